// Which low-bit kernel takes a call. Pure host logic: it runs, and is tested, without a GPU.
#include <algorithm>
#include <array>

#include "lowbit/integer_shape.h"
#include "lowbit/limits.h"
#include "lowbit/several_shape.h"
#include "octofuse/error.h"
#include "octofuse/lowbit.h"

namespace octofuse {
namespace {

// In the order in which "auto" asks them: the first that can serve and is worth it.
constexpr std::array kEngines = {LowbitEngine::kCpu,        LowbitEngine::kGemvBinary, LowbitEngine::kGemvInt8,
                                 LowbitEngine::kGemm,       LowbitEngine::kGemmSplit,  LowbitEngine::kGemmMany,
                                 LowbitEngine::kDequantized};

constexpr const char* kNoRoom = "a token and three stages of its weights do not fit into a block's shared memory";

// Each engine states its own preconditions: nullptr means that it can serve.

const char* why_not_gemv(const LowbitProblem& problem, const Capability& capability) {
  if (problem.unserved != nullptr) return problem.unserved;
  if (capability.compute_capability < 80) return "needs compute capability 8.0 (cp.async, mma.sync)";
  if (!capability.kernels_mma) return "this build holds no mma.sync kernels for this device";
  return nullptr;
}

const char* why_not_gemv_binary(const LowbitProblem& problem, const Capability& capability) {
  if (const char* reason = why_not_gemv(problem, capability)) return reason;
  if (problem.m > 1) return "it takes one token";
  if (problem.is_integer) return "it has no products of integers";
  if (!lowbit::is_binary(problem.format, problem.bits)) return "it takes codes of up to 3 bits, or up to 4 planes";
  if (problem.n % 16 != 0) return "N must be a multiple of 16";
  if (!problem.aligned) return "scale and zero must start at multiples of 16 bytes";
  return lowbit::least_binary_gemv(problem, capability.sm_count) <= capability.shared_memory ? nullptr : kNoRoom;
}

const char* why_not_gemv_int8(const LowbitProblem& problem, const Capability& capability) {
  if (const char* reason = why_not_gemv(problem, capability)) return reason;
  if (problem.m > lowbit::kMostSeveral) return "it takes up to 4 tokens, beside some weights 8";
  if (lowbit::takes_several(problem, capability.shared_memory, capability.kernels_sm90a)) return nullptr;
  if (problem.m > lowbit::kTokensOfSet) {
    return lowbit::several_takes(problem) ? kNoRoom : "beside this weight it takes up to 4 tokens";
  }
  return lowbit::least_int8_gemv(problem) <= capability.shared_memory ? nullptr : kNoRoom;
}

const char* why_not_gemm_many(const LowbitProblem& problem, const Capability& capability) {
  if (problem.unserved != nullptr) return problem.unserved;
  if (capability.compute_capability != 90) return "needs compute capability 9.0 (wgmma)";
  if (!capability.kernels_sm90a) return "this build holds no sm_90a kernels";
  if (!problem.aligned) return "scale and zero must start at multiples of 16 bytes";
  // The rows of what TMA reads start at multiples of 16 bytes. A single row may have any length.
  const bool one_row = problem.format != LowbitFormat::kPlanes || problem.bits == 1;
  if (one_row && (problem.group == 0 || problem.group >= problem.k)) return nullptr;
  if (problem.has_zeros) return problem.n % 16 == 0 ? nullptr : "with zero points of groups N must be a multiple of 16";
  return problem.n % 8 == 0 ? nullptr : "with groups or planes N must be a multiple of 8";
}

const char* why_not_gemm_split(const LowbitProblem& problem, const Capability& capability) {
  if (const char* reason = why_not_gemm_many(problem, capability)) return reason;
  if (problem.is_integer) return "of integers gemm_many divides K itself";
  return lowbit::k_blocks_of(problem.k) < lowbit::kSharing ? "up to 128 columns there is nothing to divide" : nullptr;
}

const char* why_not_gemm(const LowbitProblem& problem, const Capability& capability) {
  if (problem.m > lowbit::kMostGemmTokens) return "it takes up to 4194240 tokens (its grid)";
  return why_not_gemm_many(problem, capability);
}

const char* why_not(LowbitEngine engine, const LowbitProblem& problem, const Capability& capability) {
  switch (engine) {
    case LowbitEngine::kCpu:
      return problem.why_not_cpu;
    case LowbitEngine::kGemvBinary:
      return why_not_gemv_binary(problem, capability);
    case LowbitEngine::kGemvInt8:
      return why_not_gemv_int8(problem, capability);
    case LowbitEngine::kGemm:
      return why_not_gemm(problem, capability);
    case LowbitEngine::kGemmSplit:
      return why_not_gemm_split(problem, capability);
    case LowbitEngine::kGemmMany:
      return why_not_gemm_many(problem, capability);
    case LowbitEngine::kDequantized:
      return nullptr;
  }
  return "unknown";
}

// Whether a weight that is written to memory once, and cuBLAS, are faster than a kernel that makes it again for every
// 128 to 256 tokens (measured from 768 x 768 to 57344 x 8192): where N is too small for many tiles and K is long; and
// planes, which take the longer the more there are.
bool is_better_dequantised(const LowbitProblem& problem) {
  constexpr int64_t kMostTokensOfPlanes = 1024;
  if (problem.format == LowbitFormat::kPlanes && problem.bits > 3 && problem.m > kMostTokensOfPlanes) return true;
  // Where the card's power limit decides, bytes of weights that every block reads again count.
  constexpr int64_t kLongRows = 10240, kManyTokens = 8192;
  if (problem.format == LowbitFormat::kUniform && problem.bits > 4 && problem.k >= kLongRows) {
    return problem.m >= kManyTokens;
  }
  return lowbit::GemmShape::is_split_by_4(problem.n, lowbit::k_blocks_of(problem.k));
}

// The same of products of integers, whose bits do not depend on the engine.
const char* why_slower_integer(LowbitEngine engine, const LowbitProblem& problem, const Capability& capability) {
  const bool has_gemm = why_not_gemm(problem, capability) == nullptr;
  // Of 3 or 4 tokens so many columns leave little room for weights (measured with 4 tokens on six layers: 4096 x 14336
  // alone, which has more, is faster by gemm).
  constexpr int kMostBlocks = 80;
  const bool is_long = problem.m > 2 && lowbit::k_blocks_of(problem.k) > kMostBlocks;
  if (engine == LowbitEngine::kGemvInt8 && has_gemm && is_long) return "slower: so many columns of 3 or 4 tokens";
  if (engine == LowbitEngine::kGemm &&
      lowbit::integer_choice(problem, true).time < lowbit::integer_choice(problem, false).time) {
    return "slower: gemm_many's tiles fit better";
  }
  return nullptr;
}

// Why "auto" leaves out an engine that could serve.
const char* why_slower(LowbitEngine engine, const LowbitProblem& problem, const Capability& capability) {
  if (problem.is_integer) return why_slower_integer(engine, problem, capability);
  if (engine == LowbitEngine::kGemvInt8 && problem.m > lowbit::kTokensOfSet) {
    const bool has_gemm = why_not_gemm(problem, capability) == nullptr;
    return has_gemm && !lowbit::is_faster_by_several(problem) ? "slower: gemm's blocks fit better" : nullptr;
  }
  const bool is_split = engine == LowbitEngine::kGemmSplit;
  if (engine != LowbitEngine::kGemm && !is_split && engine != LowbitEngine::kGemmMany) return nullptr;
  const bool is_many = problem.m >= lowbit::kLeastManyTokens &&  // without asking: it is never less
                       problem.m > lowbit::limits_of(problem).most_gemm;
  if (!is_many) return engine == LowbitEngine::kGemm ? nullptr : "slower: so few tokens make too few of its tiles";
  const bool may_split = problem.m <= lowbit::limits_of(problem).most_split;
  if (!may_split && is_better_dequantised(problem)) {
    return "slower: for so many tokens a weight that is dequantised once is faster";
  }
  if (engine == LowbitEngine::kGemm) return "slower: others dequantise a weight for more tokens at a time";
  if (is_split && !may_split) return "slower: there are tiles for all SMs";
  return may_split && !is_split ? "slower: so few tiles that blocks had better divide K" : nullptr;
}

LowbitEngine best(const LowbitProblem& problem, const Capability& capability) {
  for (const LowbitEngine engine : kEngines) {
    if (why_not(engine, problem, capability) == nullptr && why_slower(engine, problem, capability) == nullptr)
      return engine;
  }
  return LowbitEngine::kDequantized;
}

}  // namespace

const char* name_of(LowbitEngine engine) {
  switch (engine) {
    case LowbitEngine::kCpu:
      return "cpu";
    case LowbitEngine::kGemvBinary:
      return "gemv_binary";
    case LowbitEngine::kGemvInt8:
      return "gemv_int8";
    case LowbitEngine::kGemm:
      return "gemm";
    case LowbitEngine::kGemmSplit:
      return "gemm_split";
    case LowbitEngine::kGemmMany:
      return "gemm_many";
    case LowbitEngine::kDequantized:
      return "dequantized";
  }
  return "unknown";
}

LowbitEngine select_lowbit(const LowbitProblem& problem, const Capability& capability, std::string_view engine) {
  if (engine == "auto") return best(problem, capability);
  const std::string quoted = "'" + std::string(engine) + "'";
  std::string names = "'auto'";
  for (const LowbitEngine one : kEngines) {
    names += std::string(", '") + name_of(one) + "'";
    if (engine != name_of(one)) continue;
    const char* reason = why_not(one, problem, capability);
    if (reason == nullptr) return one;
    refuse<ValueError>("engine", "one that can serve this call", quoted + "; " + name_of(one) + ": " + reason);
  }
  refuse<ValueError>("engine", "one of " + names, quoted);
}

LowbitTile tile_of(const LowbitProblem& problem, LowbitEngine engine) {
  const int k_blocks = lowbit::k_blocks_of(problem.k);
  const bool is_many = engine == LowbitEngine::kGemmMany;
  if (problem.is_integer && (is_many || engine == LowbitEngine::kGemm)) {
    const lowbit::IntegerChoice choice = lowbit::integer_choice(problem, is_many);
    return {choice.tile.tokens, choice.tile.channels, choice.tile.split, choice.shares};
  }
  if (engine == LowbitEngine::kGemm && lowbit::streams(problem)) {
    return {lowbit::stream_tokens(problem.m), lowbit::kStreamChannels, 1, true};
  }
  if (engine == LowbitEngine::kGemm) {
    const lowbit::GemmShape shape(problem);
    return {shape.tokens, shape.channels, shape.split, false};
  }
  if (!is_many && engine != LowbitEngine::kGemmSplit) return {};
  const lowbit::TileSet set = lowbit::tile_set_of(problem.format, problem.bits);
  const lowbit::ManyShape shape(problem.m, problem.n, k_blocks, set, !is_many);
  return {shape.tokens, shape.channels, is_many ? 1 : lowbit::kSharing, shape.shares};
}

LowbitDecision explain_lowbit(const LowbitProblem& problem, const Capability& capability, std::string_view engine) {
  LowbitDecision decision;
  decision.chosen = select_lowbit(problem, capability, engine);
  decision.why = engine != "auto" ? "asked for by name"
                 : decision.chosen == LowbitEngine::kDequantized
                     ? "the weight is written to memory for this call: no kernel "
                       "reads the codes faster"
                     : "the fastest of those that can serve";
  const LowbitTile tile = tile_of(problem, decision.chosen);
  if (tile.tokens > 0) {
    decision.why +=
        ": tiles of " + std::to_string(tile.tokens) + " tokens by " + std::to_string(tile.channels) + " channels";
    if (tile.split > 1) decision.why += ", K divided by " + std::to_string(tile.split) + " blocks";
    if (tile.shares) {
      decision.why += decision.chosen == LowbitEngine::kGemm ? "; all blocks share the k-blocks of all tiles"
                                                             : "; what whole rounds leave over is shared by all blocks";
    }
  }
  for (const LowbitEngine other : kEngines) {
    if (other == decision.chosen || engine != "auto") continue;
    const char* reason = why_not(other, problem, capability);
    if (reason == nullptr) reason = why_slower(other, problem, capability);
    decision.declined.emplace_back(name_of(other), reason != nullptr ? reason : "slower");
  }
  return decision;
}

LowbitProblem problem_of(const LowbitArgs& args) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  LowbitProblem problem;
  problem.format = args.format;
  problem.bits = args.bits;
  problem.m = args.m;
  problem.n = args.n;
  problem.k = args.k;
  problem.group = args.group;
  problem.has_zeros = args.zero != nullptr;
  problem.is_integer = has_integers(args);
  // Of two levels a row's scale is read by the outputs alone, which look at it themselves.
  const bool has_levels = args.format == LowbitFormat::kTwoLevel;
  problem.aligned = (has_levels || aligned(args.scale)) && aligned(args.zero) && aligned(args.group_scale);
  if (!aligned(args.packed)) problem.unserved = "packed must start at a multiple of 16 bytes";
  if (!takes_group(args.group)) problem.unserved = "kernels take groups of 32, 64 and 128 times a power of two";
  return problem;
}

}  // namespace octofuse
