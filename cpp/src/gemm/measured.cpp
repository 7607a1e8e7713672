#include "gemm/measured.h"

#include <algorithm>
#include <array>
#include <cmath>
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
  std::vector<int64_t> rows;
  std::vector<Measured::Shape> shapes;
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

Measured from_table(int sm_count, double bandwidth, Table table) {
  Measured measured{sm_count, bandwidth, {}, {}, std::move(table.rows), std::move(table.shapes)};
  measured.models.resize(candidates().size(), TimeModel{100, 100, 10, 1, 0});
  for (const auto& [name, model] : table.models) {
    const Candidate* candidate = find(name);
    measured.timed.push_back(candidate);
    if (candidate != nullptr) measured.models[static_cast<size_t>(candidate - candidates().data())] = model;
  }
  return measured;
}

}  // namespace

const Candidate* Measured::best(int64_t m, int64_t n, int64_t k) const {
  const auto row = std::lower_bound(rows.begin(), rows.end(), m);
  if (row == rows.end()) return nullptr;
  for (const Shape& shape : shapes) {
    if (shape.n != n || shape.k != k) continue;
    const int index = shape.best[static_cast<size_t>(row - rows.begin())];
    return index < 0 ? nullptr : timed[static_cast<size_t>(index)];
  }
  return nullptr;
}

const Measured& measured_near(double bandwidth) {
  static const std::array<Measured, 2> all = {from_table(132, 4917, table_h200()), from_table(132, 3352, table_h100())};
  return *std::min_element(all.begin(), all.end(), [&](const Measured& a, const Measured& b) {
    return std::abs(a.bandwidth - bandwidth) < std::abs(b.bandwidth - bandwidth);
  });
}

}  // namespace octofuse
