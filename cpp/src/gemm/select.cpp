// Which kernel serves a problem. Pure host logic: it runs, and is tested, without a GPU.
#include <algorithm>
#include <array>
#include <tuple>

#include "gemm/candidates.h"
#include "gemm/skinny/one_token.h"
#include "gemm/skinny/tiles.h"
#include "gemm/wgmma/tiles.h"
#include "octofuse/error.h"
#include "octofuse/gemm.h"

namespace octofuse {

namespace {

// Each engine states its own preconditions: nullptr means that it can serve.

const char* why_not_sm90(const GemmProblem& problem, const Capability& capability) {
  if (capability.compute_capability != 90) return "needs compute capability 9.0 (wgmma)";
  if (!capability.kernels_sm90a) return "this build holds no sm_90a kernels";
  if (problem.out != DType::kFloat16) return "it is built for fp16 output alone";
  // The width too: TMA clips a row's end to 16 bytes, so a narrower edge would write beside the output.
  const auto size = static_cast<int64_t>(size_of(problem.out));
  if (!problem.out_aligned || problem.ldo * size % 16 != 0 || problem.n * size % 16 != 0) {
    return "TMA stores need output rows that start and end at multiples of 16 bytes";
  }
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
  if (problem.block_scales) return "it takes no scales of blocks";
  if (problem.arithmetic != Arithmetic::kInt8) {
    if (capability.compute_capability < 89) return "float8 tensor cores need compute capability 8.9";
    if (problem.n % 16 != 0) return "of float8, N must be a multiple of 16";
  }
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

const char* why_not_skinny(const Candidate& candidate, const GemmProblem& problem, const Capability& capability) {
  const int64_t rows = problem.outliers == Outliers::kDigits ? kDigitRows : 1;
  if (problem.m > rows * candidate.tile_m) return "M is larger than its tile";
  if (problem.double_activation) return "fp32 output evaluates gelu and silu in double";
  return why_not_sm80(capability);
}

const char* why_not_wgmma(const GemmProblem& problem, const Capability& capability) {
  if (capability.compute_capability != 90) return "needs compute capability 9.0 (wgmma)";
  if (!capability.kernels_sm90a) return "this build holds no sm_90a kernels";
  if (problem.double_activation && problem.arithmetic == Arithmetic::kInt8) {
    return "fp32 output evaluates gelu and silu in double, which would serialise wgmma";
  }
  if (problem.m > 4000000 || problem.n > 4000000) return "its grid covers at most 4 million rows of each operand";
  return nullptr;
}

const char* why_not_outliers(const Candidate& candidate, const GemmProblem& problem) {
  if (problem.outliers == Outliers::kNone) return nullptr;
  const bool takes_one = candidate.engine == Engine::kSkinny && candidate.tile < skinny::kOneTokenTiles;
  if (problem.outliers == Outliers::kDigits && takes_one) return nullptr;
  if (candidate.engine != Engine::kWgmma) return "it multiplies no columns with outliers";
  const wgmma::TileShape& tile = wgmma::kTiles[candidate.tile];
  if (!tile.takes_gathered) return "its tile has no kernel for columns with outliers";
  if (problem.outliers == Outliers::kDigits) {
    return tile.takes_digits ? nullptr : "its tile has no kernel for digits of outliers";
  }
  return candidate.split > 1 ? "it multiplies no columns with outliers where blocks share K" : nullptr;
}

const char* why_not_arithmetic(const Candidate& candidate, Arithmetic asked) {
  if (candidate.arithmetic == asked || candidate.engine == Engine::kCublasLt) return nullptr;
  switch (candidate.arithmetic) {
    case Arithmetic::kInt8:
      return "it multiplies int8";
    case Arithmetic::kFloat8:
      return "it multiplies e4m3 and adds every 128 columns in fp32";
    case Arithmetic::kFloat8Fast:
      return "it multiplies e4m3, with fast_accumulate";
    default:
      return "it multiplies e5m2 with e4m3";
  }
}

const char* why_not(const Candidate& candidate, const GemmProblem& problem, const Capability& capability) {
  if (const char* reason = why_not_arithmetic(candidate, problem.arithmetic)) return reason;
  if (const char* reason = why_not_outliers(candidate, problem)) return reason;
  switch (candidate.engine) {
    case Engine::kSkinny:
      return why_not_skinny(candidate, problem, capability);
    case Engine::kWgmma:
      return why_not_wgmma(problem, capability);
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
  if (wish == "wgmma") return candidate.engine == Engine::kWgmma;
  return wish == "auto" || name == wish || name.substr(0, name.find('/')) == wish ||
         (wish == "cutlass" && name.substr(0, 8) == "cutlass_");
}

// wgmma tiles for other types go without saying, where they are not asked for.
bool is_worth_a_word(const Candidate& candidate, const GemmProblem& problem, std::string_view engine) {
  return candidate.engine != Engine::kWgmma || candidate.arithmetic == problem.arithmetic || engine == candidate.name ||
         engine == candidate.name.substr(0, candidate.name.find('/'));
}

// The cheapest candidate that the wish names and that can serve; nullptr if there is none.
const Candidate* cheapest(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  const Candidate* best = nullptr;
  double best_cost = 0.0;
  for (const Candidate& candidate : candidates()) {
    if (!matches(candidate, engine) || why_not(candidate, problem, capability) != nullptr) continue;
    const double candidate_cost = estimated_time(candidate, problem, capability);
    if (best == nullptr || candidate_cost < best_cost) {
      best = &candidate;
      best_cost = candidate_cost;
    }
  }
  return best;
}

// What was measured on this device: exactly this N, K, output and arithmetic, and the nearest M that is not below the
// problem's.
const Candidate* tuned(const GemmProblem& problem, const Capability& capability) {
  const TunedShape* best = nullptr;
  if (capability.tuned == nullptr || problem.outliers == Outliers::kDigits) return nullptr;  // its rows are no tokens
  for (const TunedShape& shape : capability.tuned->shapes) {
    if (shape.n != problem.n || shape.k != problem.k || shape.out != problem.out) continue;
    if (shape.best->arithmetic != problem.arithmetic) continue;
    if (shape.m < problem.m || shape.m >= 2 * problem.m) continue;
    if (best == nullptr || shape.m < best->m) best = &shape;
  }
  return best != nullptr && why_not(*best->best, problem, capability) == nullptr ? best->best : nullptr;
}

// int8 by one factor is all that cuBLASLt's epilogue does, and there it is fast: 1.17x as fast as the kernels of this
// library on geometric mean over 99 shapes of 14 weights, from 32 tokens on, on an H200.
const Candidate* requantised_by_cublaslt(const GemmProblem& problem, const Capability& capability) {
  constexpr int64_t kTokens = 32;
  if (problem.arithmetic != Arithmetic::kInt8) return nullptr;
  if (!problem.raw || problem.out != DType::kInt8 || problem.m < kTokens || capability.compute_capability != 90) {
    return nullptr;
  }
  return cheapest(problem, capability, "cublaslt");
}

// One token's outliers as digits: dot products skip the digits that are zero, and are faster, except where N is large
// and K small: there blocks are short, and each waits for digits (28672 x 4096 on an H200: 34.1 us, wgmma 31.6).
const Candidate* one_token_with_digits(const GemmProblem& problem, const Capability& capability) {
  constexpr int64_t kManyChannels = 16384, kFewColumns = 8192;
  if (problem.m != kDigitRows || (problem.n >= kManyChannels && problem.k <= kFewColumns)) return nullptr;
  GemmProblem one = problem;
  one.m = 1;
  const auto time = [&](size_t tile) { return estimated_time(candidates()[tile], one, capability); };
  static_assert(skinny::kOneTokenTiles == 2);  // the first of candidates()
  return &candidates()[time(0) <= time(1) ? 0 : 1];
}

// What was best for half the rows and has room for all (no tile has for more than 128): it reads its weights as fast.
// Asked for where the best of so many rows is a persistent tile; none of these has a kernel for digits.
const Candidate* best_of_half(GemmProblem problem, const Capability& capability) {
  const int64_t rows = problem.m;
  problem.m = rows / 2;
  const Candidate* best = measured_best(problem, capability);
  return best != nullptr && best->tile_m >= rows ? best : nullptr;
}

const Candidate* measured(const GemmProblem& problem, const Capability& capability) {
  const auto serves = [&](const Candidate* c) { return c != nullptr && why_not(*c, problem, capability) == nullptr; };
  const bool digits = problem.outliers == Outliers::kDigits;
  const Candidate* best =
      digits ? one_token_with_digits(problem, capability) : requantised_by_cublaslt(problem, capability);
  if (best == nullptr) best = measured_best(problem, capability);
  if (digits && !serves(best)) best = best_of_half(problem, capability);
  return serves(best) ? best : nullptr;
}

// What select() reads of a problem and of a capability.
auto fields(const GemmProblem& p) {
  return std::tie(p.m, p.n, p.k, p.out, p.raw, p.ldo, p.out_aligned, p.double_activation, p.arithmetic, p.block_scales,
                  p.outliers);
}

auto fields(const Capability& c) {
  return std::make_tuple(c.compute_capability, c.sm_count, c.bandwidth, c.kernels_sm90a, c.kernels_mma, c.kernels_naive,
                         c.cublaslt, c.tuned == nullptr ? 0 : c.tuned->id);
}

// The last choices of this thread, so that a call does not estimate every candidate again.
struct Remembered {
  GemmProblem problem;
  decltype(fields(Capability())) capability;
  const Candidate* chosen = nullptr;
};

Remembered& slot_for(const GemmProblem& p) {
  thread_local std::array<Remembered, 64> slots;
  const auto mixed = static_cast<uint64_t>(p.m * 31 + p.n * 7 + p.k * 3 + static_cast<int>(p.out) +
                                           16 * static_cast<int>(p.arithmetic));
  return slots[mixed % slots.size()];
}

const Candidate* remembered(const GemmProblem& problem, const Capability& capability) {
  const Remembered& slot = slot_for(problem);
  const bool same =
      slot.chosen != nullptr && slot.capability == fields(capability) && fields(slot.problem) == fields(problem);
  return same ? slot.chosen : nullptr;
}

void remember(const GemmProblem& problem, const Capability& capability, const Candidate& chosen) {
  slot_for(problem) = {problem, fields(capability), &chosen};
}

[[noreturn]] void refuse_engine(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  std::string names = "'auto', 'cutlass'";
  std::string reasons;
  for (const Candidate& candidate : candidates()) {
    names += ", '" + candidate.name + "'";
    if (matches(candidate, engine) && is_worth_a_word(candidate, problem, engine)) {
      reasons += "; " + candidate.name + ": " + why_not(candidate, problem, capability);
    }
  }
  const std::string quoted = "'" + std::string(engine) + "'";
  if (reasons.empty()) refuse<ValueError>("engine", "one of " + names + " or the part before '/'", quoted);
  refuse<ValueError>("engine", "one that can serve this call", quoted + reasons);
}

}  // namespace

const Candidate& select(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  const bool is_auto = engine == "auto";
  const Candidate* chosen = is_auto ? remembered(problem, capability) : nullptr;
  if (chosen == nullptr) {
    if (is_auto) chosen = tuned(problem, capability);
    if (is_auto && chosen == nullptr) chosen = measured(problem, capability);
    if (chosen == nullptr) chosen = cheapest(problem, capability, engine);
    if (chosen == nullptr) refuse_engine(problem, capability, engine);
    if (is_auto) remember(problem, capability, *chosen);
  }
  return *chosen;
}

Decision explain(const GemmProblem& problem, const Capability& capability, std::string_view engine) {
  Decision decision;
  decision.chosen = &select(problem, capability, engine);
  const bool was_tuned = engine == "auto" && tuned(problem, capability) == decision.chosen;
  const bool was_measured = engine == "auto" && measured(problem, capability) == decision.chosen;
  decision.why = was_tuned ? "the fastest measured on this device (octofuse tune)"
                 : was_measured && decision.chosen->engine == Engine::kCublasLt
                     ? "it requantises by one factor faster than fused kernels do (measured)"
                 : was_measured     ? "the fastest measured at this N and K for the next M that was timed"
                 : engine == "auto" ? "the lowest estimated time of those that can serve"
                                    : "asked for by name";
  for (const Candidate& candidate : candidates()) {
    if (&candidate == decision.chosen || !matches(candidate, engine)) continue;
    if (!is_worth_a_word(candidate, problem, engine)) continue;
    const char* reason = why_not(candidate, problem, capability);
    const double time = estimated_time(candidate, problem, capability);
    const std::string estimate = time < kNoEstimate
                                     ? "slower: estimated " + std::to_string(static_cast<int>(time + 0.5)) + " us"
                                 : time == kNoEstimate ? "its tiles do not suit these sizes: nothing was measured there"
                                                       : "a last resort";
    decision.declined.emplace_back(candidate.name, reason != nullptr ? reason : estimate);
  }
  return decision;
}

std::string captured_kernel(const GemmProblem& problem, const Capability& capability, const Candidate& chosen) {
  const bool is_gemv = chosen.engine == Engine::kSkinny && chosen.tile < skinny::kGemvTiles;
  const char* name = is_gemv && problem.m == 1 ? skinny::chained_kernel(problem.n, problem.k, capability) : nullptr;
  return name != nullptr ? name : chosen.name;
}

std::vector<std::pair<const Candidate*, double>> estimates(const GemmProblem& problem, const Capability& capability) {
  std::vector<std::pair<const Candidate*, double>> all;
  for (const Candidate& candidate : candidates()) {
    if (why_not(candidate, problem, capability) != nullptr) continue;
    all.emplace_back(&candidate, estimated_time(candidate, problem, capability));
  }
  return all;
}

}  // namespace octofuse
