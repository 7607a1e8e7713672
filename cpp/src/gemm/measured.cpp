#include "gemm/measured.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>

namespace octofuse {
namespace {

struct NamedModel {
  std::string_view name;
  TimeModel model;
};

// As benchmarks/fit_select.py writes it.
struct Table {
  std::vector<NamedModel> models;
  std::vector<Measured::Part> parts;
};

Table table_h200() {
  return
#include "gemm/measured_h200.inc"
      ;
}

Table table_h100() {
  return
#include "gemm/measured_h100.inc"
      ;
}

const Candidate* find(std::string_view name) {
  for (const Candidate& candidate : candidates()) {
    if (candidate.name == name) return &candidate;
  }
  return nullptr;
}

// The name of the same tile for int8.
std::string int8_name(const Candidate& candidate) {
  std::string name = "wgmma" + candidate.name.substr(candidate.name.find('/'));
  const size_t at = name.find("cooperative");
  return at == std::string::npos ? name : name.replace(at, 11, "pingpong");
}

// What kernels that were not timed are taken to take: longer than any other, or what they take on another device, with
// the weights' bytes at this one's bandwidth.
std::vector<TimeModel> untimed(double bandwidth, const Measured* other) {
  if (other == nullptr) return std::vector<TimeModel>(candidates().size(), TimeModel{100, 100, 10, 1, 0});
  std::vector<TimeModel> models = other->models;
  for (size_t i = 0; i < models.size(); ++i) {
    models[i][candidates()[i].engine == Engine::kSkinny ? 2 : 3] *= other->bandwidth / bandwidth;
  }
  return models;
}

Measured from_table(int sm_count, double bandwidth, Table table, const Measured* other = nullptr) {
  Measured measured{sm_count, bandwidth, untimed(bandwidth, other), {}, std::move(table.parts)};
  for (const auto& [name, model] : table.models) {
    const Candidate* candidate = find(name);
    measured.timed.push_back(candidate);
    if (candidate == nullptr) continue;
    TimeModel& own = measured.models[static_cast<size_t>(candidate - candidates().data())];
    const double limited = other != nullptr && model.back() == 0 ? own.back() : model.back();
    own = model;
    own.back() = limited;  // power limits both devices alike
  }
  if (other != nullptr) return measured;
  // Tiles of float8 that were not timed themselves take as long as those of int8: they read the same bytes.
  for (const Candidate& candidate : candidates()) {
    const bool timed = std::find(measured.timed.begin(), measured.timed.end(), &candidate) != measured.timed.end();
    const Candidate* like = candidate.arithmetic == Arithmetic::kInt8 || timed ? nullptr : find(int8_name(candidate));
    if (like == nullptr) continue;
    measured.models[static_cast<size_t>(&candidate - candidates().data())] =
        measured.models[static_cast<size_t>(like - candidates().data())];
  }
  return measured;
}

}  // namespace

const Candidate* Measured::best(const GemmProblem& problem) const {
  for (const Part& part : parts) {
    if (part.arithmetic != problem.arithmetic) continue;
    const auto row = std::lower_bound(part.rows.begin(), part.rows.end(), problem.m);
    if (row == part.rows.end()) return nullptr;
    for (const Shape& shape : part.shapes) {
      if (shape.n != problem.n || shape.k != problem.k) continue;
      const int index = shape.best[static_cast<size_t>(row - part.rows.begin())];
      return index < 0 ? nullptr : timed[static_cast<size_t>(index)];
    }
  }
  return nullptr;
}

const Measured& measured_near(double bandwidth) {
  static const Measured h200 = from_table(132, 4917, table_h200());
  static const std::array<Measured, 2> all = {h200, from_table(132, 3352, table_h100(), &h200)};
  return *std::min_element(all.begin(), all.end(), [&](const Measured& a, const Measured& b) {
    return std::abs(a.bandwidth - bandwidth) < std::abs(b.bandwidth - bandwidth);
  });
}

}  // namespace octofuse
