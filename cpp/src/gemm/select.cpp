// Which kernel serves a problem. Pure host logic: it runs, and is tested, without a GPU.
#include <algorithm>
#include <cmath>

#include "octofuse/error.h"
#include "octofuse/gemm.h"

namespace octofuse {

// Indices follow tiles_sm90.h and gemm_sm80.cu.
const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = {
      {Engine::kCutlassSm90, "cutlass_sm90/128x128x128_pingpong_2x1", 0, 128, 128},
      {Engine::kCutlassSm90, "cutlass_sm90/64x128x128_pingpong_1x1", 1, 64, 128},
      {Engine::kCutlassSm80, "cutlass_sm80/128x128x64", 0, 128, 128},
      {Engine::kCutlassSm80, "cutlass_sm80/64x64x64", 1, 64, 64},
      {Engine::kCublasLt, "cublaslt", 0, 0, 0},
      {Engine::kNaive, "naive", 0, 16, 16},
  };
  return all;
}

namespace {

// Each engine states its own preconditions: nullptr means that it can serve.

const char* why_not_sm90(const GemmProblem& problem, const Capability& capability) {
  if (capability.compute_capability != 90) return "needs compute capability 9.0 (wgmma)";
  if (!capability.kernels_sm90a) return "this build holds no sm_90a kernels";
  // The width too: TMA clips a row's end to 16 bytes, so a narrower edge would write beside the output.
  const auto size = static_cast<int64_t>(size_of(problem.out));
  if (!problem.out_aligned || problem.ldo * size % 16 != 0 || problem.n * size % 16 != 0) {
    return "TMA stores need output rows that start and end at multiples of 16 bytes";
  }
  if (problem.double_activation) return "fp32 output evaluates gelu and silu in double, which would serialise wgmma";
  return nullptr;
}

const char* why_not_sm80(const Capability& capability) {
  if (capability.compute_capability < 80) return "needs compute capability 8.0 (mma.sync int8 with cp.async)";
  if (!capability.kernels_mma) return "this build holds no mma.sync kernels for this device";
  return nullptr;
}

const char* why_not_cublaslt(const GemmProblem& problem, const Capability& capability) {
  if (!capability.cublaslt) return capability.cublaslt_why.c_str();
  if (capability.compute_capability < 75) return "int8 tensor cores need compute capability 7.5";
  if (problem.n % 4 != 0) return "N must be a multiple of 4";
  if (problem.raw) {
    // What it cannot fuse goes through a contiguous int32 buffer, so only raw outputs carry the caller's stride.
    if (problem.ldo % 4 != 0) return "output rows must be a multiple of 4 elements apart";
    if (!problem.out_aligned) return "the output must start at a multiple of 16 bytes";
    return nullptr;
  }
  if (!capability.kernels_naive) return "this build holds no dequantising kernel for this device";
  return nullptr;
}

const char* why_not_naive(const GemmProblem& problem, const Capability& capability) {
  if (!capability.kernels_naive) return "this build holds no kernels for this device";
  if (problem.n > 16 * int64_t{65535}) return "its grid covers at most 1048560 columns";
  return nullptr;
}

const char* why_not(const Candidate& candidate, const GemmProblem& problem, const Capability& capability) {
  switch (candidate.engine) {
    case Engine::kCutlassSm90:
      return why_not_sm90(problem, capability);
    case Engine::kCutlassSm80:
      return why_not_sm80(capability);
    case Engine::kCublasLt:
      return why_not_cublaslt(problem, capability);
    default:
      return why_not_naive(problem, capability);
  }
}

bool matches(const Candidate& candidate, std::string_view wish) {
  const std::string_view name = candidate.name;
  return wish == "auto" || name == wish || name.substr(0, name.find('/')) == wish ||
         (wish == "cutlass" && name.substr(0, 8) == "cutlass_");
}

// Lower is better. A placeholder for measured tables: waves of tiles over the SMs, then the engine's own rank.
double cost(const Candidate& candidate, const GemmProblem& problem, const Capability& capability) {
  const double sms = std::max(1, capability.sm_count);
  const auto tiles = [&](int tile_m, int tile_n) {
    return static_cast<double>((problem.m + tile_m - 1) / tile_m) *
           static_cast<double>((problem.n + tile_n - 1) / tile_n);
  };
  switch (candidate.engine) {
    case Engine::kCublasLt:
      return problem.raw ? 0.0 : 1e18;  // int32 is its home; with a second pass it comes after every fused kernel
    case Engine::kNaive:
      return 1e30;
    default: {
      const double waves = std::ceil(tiles(candidate.tile_m, candidate.tile_n) / sms);
      const double per_tile = candidate.tile_m * static_cast<double>(candidate.tile_n);
      // Measured on an H200 at 2048 x 1920 x 1920, where both sm_90a tiles fill their waves alike: the 64-row tile,
      // which re-reads its operands more often, took 1.30 times as long, and mma.sync 2.6 times.
      const double smaller = candidate.tile != 0 ? 1.3 : 1.0;
      const double older = candidate.engine == Engine::kCutlassSm80 ? 2.6 : 1.0;
      return waves * per_tile * smaller * older;
    }
  }
}

// The cheapest candidate that the wish names and that can serve; nullptr if there is none.
const Candidate* cheapest(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  const Candidate* best = nullptr;
  double best_cost = 0.0;
  for (const Candidate& candidate : candidates()) {
    if (!matches(candidate, engine) || why_not(candidate, problem, capability) != nullptr) continue;
    const double candidate_cost = cost(candidate, problem, capability);
    if (best == nullptr || candidate_cost < best_cost) {
      best = &candidate;
      best_cost = candidate_cost;
    }
  }
  return best;
}

[[noreturn]] void refuse_engine(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  std::string names = "'auto', 'cutlass'";
  std::string reasons;
  for (const Candidate& candidate : candidates()) {
    names += std::string(", '") + candidate.name + "'";
    if (matches(candidate, engine)) {
      reasons += std::string("; ") + candidate.name + ": " + why_not(candidate, problem, capability);
    }
  }
  const std::string quoted = "'" + std::string(engine) + "'";
  if (reasons.empty()) refuse<ValueError>("engine", "one of " + names + " or the part before '/'", quoted);
  refuse<ValueError>("engine", "one that can serve this call", quoted + reasons);
}

}  // namespace

const Candidate& select(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  const Candidate* chosen = cheapest(problem, capability, engine);
  if (chosen == nullptr) refuse_engine(problem, capability, engine);
  return *chosen;
}

Decision explain(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  Decision decision;
  decision.chosen = &select(problem, capability, engine);
  decision.why = engine == "auto" ? "lowest estimated cost of the kernels that can serve" : "asked for by name";
  for (const Candidate& candidate : candidates()) {
    if (&candidate == decision.chosen || !matches(candidate, engine)) continue;
    const char* reason = why_not(candidate, problem, capability);
    decision.declined.emplace_back(candidate.name, reason != nullptr ? reason : "ranked behind");
  }
  return decision;
}

}  // namespace octofuse
