#include "gemm/candidates.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "gemm/cutlass/tiles_sm80.h"
#include "gemm/measured.h"
#include "gemm/skinny/tiles.h"
#include "gemm/wgmma/tiles.h"

namespace octofuse {
namespace {

using Form = wgmma::Form;
constexpr Form kTokens = Form::kTokens, kSwapped = Form::kSwapped, kPingpong = Form::kPingpong,
               kCooperative = Form::kCooperative;
constexpr Arithmetic kInt8 = Arithmetic::kInt8, kFloat8 = Arithmetic::kFloat8, kFast = Arithmetic::kFloat8Fast,
                     kE5M2 = Arithmetic::kE5M2;

// How each wgmma tile is offered: Candidate's split, blocks_per_sm and cluster.
struct Variant {
  int rows, cols;
  Form form;
  int split, blocks_per_sm;
  int cluster = 1;
  Arithmetic arithmetic = kInt8;
};

constexpr Variant kVariants[] = {
    {64, 32, kTokens, 1, 1},
    {64, 48, kTokens, 1, 1},
    {64, 64, kTokens, 1, 1},
    {64, 64, kTokens, 2, 1},
    {64, 64, kTokens, 3, 1},
    {64, 80, kTokens, 1, 1},
    {64, 96, kTokens, 1, 1},
    {64, 112, kTokens, 1, 1},
    {64, 112, kTokens, 1, 2},
    {64, 128, kTokens, 1, 1},
    {64, 160, kTokens, 1, 1},
    {64, 224, kTokens, 1, 1},
    {64, 224, kTokens, 1, 2},
    {128, 64, kTokens, 1, 1},
    {128, 96, kTokens, 1, 1},
    {128, 128, kTokens, 1, 1},
    {128, 144, kTokens, 1, 1},
    {128, 160, kTokens, 1, 1},
    {128, 192, kTokens, 1, 1},
    {128, 224, kTokens, 1, 1},
    {128, 240, kTokens, 1, 1},
    {128, 256, kTokens, 1, 1},
    {64, 16, kSwapped, 1, 1},
    {64, 16, kSwapped, 1, 2},
    {64, 16, kSwapped, 2, 1},
    {64, 16, kSwapped, 2, 2},
    {64, 32, kSwapped, 1, 1},
    {64, 32, kSwapped, 1, 2},
    {64, 32, kSwapped, 2, 1},
    {64, 32, kSwapped, 3, 1},
    {64, 64, kSwapped, 1, 1},
    {64, 64, kSwapped, 1, 2},
    {64, 64, kSwapped, 2, 1},
    {64, 64, kSwapped, 4, 1},
    {64, 80, kSwapped, 1, 1},
    {64, 96, kSwapped, 1, 1},
    {64, 112, kSwapped, 1, 1},
    {64, 128, kSwapped, 1, 1},
    {64, 80, kSwapped, 1, 2},
    {128, 80, kSwapped, 1, 1},
    {128, 112, kSwapped, 1, 1},
    {128, 96, kSwapped, 1, 1},
    {128, 128, kSwapped, 1, 1},
    {128, 192, kSwapped, 1, 1},
    {128, 128, kPingpong, 1, 1, 1},
    {128, 128, kPingpong, 1, 1, 2},
    {64, 128, kPingpong, 1, 1, 1},
    {64, 112, kPingpong, 1, 1, 1},
    {128, 256, kCooperative, 1, 1, 1},
    {128, 256, kCooperative, 1, 1, 2},
    {128, 96, kPingpong, 1, 1, 1},
    {128, 112, kPingpong, 1, 1, 1},
    {128, 112, kPingpong, 1, 1, 2},
    {128, 160, kPingpong, 1, 1, 1},
    {128, 160, kPingpong, 1, 1, 2},
    {128, 192, kPingpong, 1, 1, 1},
    {128, 192, kPingpong, 1, 1, 2},

    {64, 16, kTokens, 1, 1, 1, kFloat8},
    {64, 16, kTokens, 1, 2, 1, kFloat8},
    {64, 16, kTokens, 1, 3, 1, kFloat8},
    {64, 32, kTokens, 1, 1, 1, kFloat8},
    {64, 32, kTokens, 1, 2, 1, kFloat8},
    {64, 32, kTokens, 1, 3, 1, kFloat8},
    {64, 64, kTokens, 1, 1, 1, kFloat8},
    {64, 64, kTokens, 1, 2, 1, kFloat8},
    {64, 128, kTokens, 1, 1, 1, kFloat8},
    {128, 64, kTokens, 1, 1, 1, kFloat8},
    {128, 128, kTokens, 1, 1, 1, kFloat8},
    {64, 16, kSwapped, 1, 1, 1, kFloat8},
    {64, 16, kSwapped, 1, 2, 1, kFloat8},
    {64, 16, kSwapped, 1, 3, 1, kFloat8},
    {64, 16, kSwapped, 1, 4, 1, kFloat8},
    {64, 32, kSwapped, 1, 1, 1, kFloat8},
    {64, 32, kSwapped, 1, 2, 1, kFloat8},
    {64, 32, kSwapped, 1, 3, 1, kFloat8},
    {64, 32, kSwapped, 1, 4, 1, kFloat8},
    {64, 64, kSwapped, 1, 1, 1, kFloat8},
    {64, 64, kSwapped, 1, 2, 1, kFloat8},
    {64, 64, kSwapped, 1, 3, 1, kFloat8},
    {128, 16, kSwapped, 1, 1, 1, kFloat8},
    {128, 16, kSwapped, 1, 2, 1, kFloat8},
    {128, 32, kSwapped, 1, 1, 1, kFloat8},
    {128, 32, kSwapped, 1, 2, 1, kFloat8},
    {128, 64, kSwapped, 1, 1, 1, kFloat8},
    {128, 64, kSwapped, 1, 2, 1, kFloat8},
    {128, 128, kCooperative, 1, 1, 1, kFloat8},
    {128, 128, kCooperative, 1, 1, 2, kFloat8},
    {64, 16, kTokens, 1, 1, 1, kFast},
    {64, 16, kTokens, 1, 2, 1, kFast},
    {64, 16, kTokens, 1, 3, 1, kFast},
    {64, 32, kTokens, 1, 1, 1, kFast},
    {64, 32, kTokens, 1, 2, 1, kFast},
    {64, 32, kTokens, 1, 3, 1, kFast},
    {64, 56, kTokens, 1, 1, 1, kFast},
    {64, 56, kTokens, 1, 3, 1, kFast},
    {64, 64, kTokens, 1, 1, 1, kFast},
    {64, 64, kTokens, 1, 2, 1, kFast},
    {64, 80, kTokens, 1, 1, 1, kFast},
    {64, 112, kTokens, 1, 1, 1, kFast},
    {64, 112, kTokens, 1, 2, 1, kFast},
    {64, 128, kTokens, 1, 1, 1, kFast},
    {64, 224, kTokens, 1, 1, 1, kFast},
    {64, 224, kTokens, 1, 2, 1, kFast},
    {128, 64, kTokens, 1, 1, 1, kFast},
    {128, 80, kTokens, 1, 1, 1, kFast},
    {128, 96, kTokens, 1, 1, 1, kFast},
    {128, 128, kTokens, 1, 1, 1, kFast},
    {128, 160, kTokens, 1, 1, 1, kFast},
    {128, 192, kTokens, 1, 1, 1, kFast},
    {128, 224, kTokens, 1, 1, 1, kFast},
    {128, 256, kTokens, 1, 1, 1, kFast},
    {64, 16, kSwapped, 1, 1, 1, kFast},
    {64, 16, kSwapped, 1, 2, 1, kFast},
    {64, 16, kSwapped, 1, 3, 1, kFast},
    {64, 16, kSwapped, 1, 4, 1, kFast},
    {64, 32, kSwapped, 1, 1, 1, kFast},
    {64, 32, kSwapped, 1, 2, 1, kFast},
    {64, 32, kSwapped, 1, 3, 1, kFast},
    {64, 32, kSwapped, 1, 4, 1, kFast},
    {64, 64, kSwapped, 1, 1, 1, kFast},
    {64, 64, kSwapped, 1, 2, 1, kFast},
    {64, 64, kSwapped, 1, 3, 1, kFast},
    {64, 96, kSwapped, 1, 1, 1, kFast},
    {64, 128, kSwapped, 1, 1, 1, kFast},
    {128, 16, kSwapped, 1, 1, 1, kFast},
    {128, 16, kSwapped, 1, 2, 1, kFast},
    {128, 32, kSwapped, 1, 1, 1, kFast},
    {128, 32, kSwapped, 1, 2, 1, kFast},
    {128, 64, kSwapped, 1, 1, 1, kFast},
    {128, 64, kSwapped, 1, 2, 1, kFast},
    {128, 128, kPingpong, 1, 1, 1, kFast},
    {128, 128, kPingpong, 1, 1, 2, kFast},
    {64, 128, kPingpong, 1, 1, 1, kFast},
    {64, 112, kPingpong, 1, 1, 1, kFast},
    {128, 256, kCooperative, 1, 1, 1, kFast},
    {128, 256, kCooperative, 1, 1, 2, kFast},
    {128, 96, kPingpong, 1, 1, 1, kFast},
    {128, 112, kPingpong, 1, 1, 1, kFast},
    {128, 112, kPingpong, 1, 1, 2, kFast},
    {128, 160, kPingpong, 1, 1, 1, kFast},
    {128, 160, kPingpong, 1, 1, 2, kFast},
    {128, 192, kPingpong, 1, 1, 1, kFast},
    {128, 192, kPingpong, 1, 1, 2, kFast},
    {64, 32, kTokens, 1, 1, 1, kE5M2},
    {64, 64, kTokens, 1, 1, 1, kE5M2},
    {128, 128, kTokens, 1, 1, 1, kE5M2},
    {64, 16, kSwapped, 1, 3, 1, kE5M2},
    {64, 64, kSwapped, 1, 1, 1, kE5M2},
};

// The variant's index in wgmma::kTiles, or -1.
constexpr int index_of(const Variant& variant) {
  int index = 0;
  for (const wgmma::TileShape& t : wgmma::kTiles) {
    const bool same = t.rows == variant.rows && t.cols == variant.cols && t.form == variant.form;
    if (same && t.arithmetic == variant.arithmetic) return index;
    ++index;
  }
  return -1;
}

constexpr bool every_variant_has_a_tile() {
  for (const Variant& variant : kVariants) {
    if (index_of(variant) < 0) return false;
  }
  return true;
}
static_assert(every_variant_has_a_tile(), "kVariants names a tile that wgmma/tiles.h does not list");

std::string engine_of(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kInt8:
      return "wgmma/";
    case Arithmetic::kFloat8:
      return "wgmma_float8/";
    case Arithmetic::kFloat8Fast:
      return "wgmma_float8_fast/";
    default:
      return "wgmma_e5m2/";
  }
}

// "wgmma/64x16_swapped": tokens x channels; "_split2": blocks that share a tile's K; "_2x1": blocks that share weights;
// "_x3": blocks of an SM.
std::string name_of(const Variant& v) {
  const bool swap = v.form == kSwapped;
  std::string name =
      engine_of(v.arithmetic) + std::to_string(swap ? v.cols : v.rows) + "x" + std::to_string(swap ? v.rows : v.cols);
  if (swap) name += "_swapped";
  if (v.form == kPingpong) return name + (v.cluster > 1 ? "_pingpong_2x1" : "_pingpong");
  if (v.form == kCooperative) return name + (v.cluster > 1 ? "_cooperative_2x1" : "_cooperative");
  if (v.split > 1) name += "_split" + std::to_string(v.split);
  if (v.blocks_per_sm > 1) name += "_x" + std::to_string(v.blocks_per_sm);
  return name;
}

std::string name_of(const skinny::TileShape& t) {
  const std::string tile = "skinny/" + std::to_string(t.tokens) + "x" + std::to_string(t.channels);
  return tile + (t.depth == 0 ? "_dp4a" : "x" + std::to_string(64 * t.depth));
}

std::string name_of(const sm80::TileShape& t) {
  return "cutlass_sm80/" + std::to_string(t.m) + "x" + std::to_string(t.n) + "x" + std::to_string(t.k);
}

std::vector<Candidate> make_candidates() {
  std::vector<Candidate> all;
  int tile = 0;
  for (const skinny::TileShape& t : skinny::kTiles) {
    all.push_back({Engine::kSkinny, name_of(t), tile++, t.tokens, t.channels, 1, 1});
  }
  for (const Variant& v : kVariants) {
    const bool swap = v.form == kSwapped;
    all.push_back({Engine::kWgmma, name_of(v), index_of(v), swap ? v.cols : v.rows, swap ? v.rows : v.cols, v.split,
                   v.blocks_per_sm, v.cluster, v.arithmetic});
  }
  all.push_back({Engine::kCutlassSm90, "cutlass_sm90/128x128x128_pingpong_2x1", 0, 128, 128, 1, 1});
  tile = 0;
  for (const sm80::TileShape& t : sm80::kTiles) {
    all.push_back({Engine::kCutlassSm80, name_of(t), tile++, t.m, t.n, 1, 1});
  }
  all.push_back({Engine::kCublasLt, "cublaslt", 0, 0, 0, 1, 1});
  all.push_back({Engine::kNaive, "naive", 0, 16, 16, 1, 1});
  return all;
}

double ceil_div(int64_t a, int64_t b) { return static_cast<double>((a + b - 1) / b); }

// int8 products of an SM in a clock through mma.sync, GHz, GB/s of memory: from data sheets.
struct Chip {
  int compute_capability;
  double macs, clock, bandwidth;
};

constexpr Chip kChips[] = {
    {80, 2048, 1.41, 1555}, {86, 1024, 1.70, 760},  {87, 1024, 1.30, 205},   {89, 1024, 2.50, 864},
    {90, 2048, 1.70, 4800}, {100, 2048, 1.8, 8000}, {120, 1024, 2.40, 1792},
};

// The newest chip that is not newer: an unknown one is taken for its predecessor.
const Chip& chip_of(int compute_capability) {
  const Chip* chip = kChips;
  for (const Chip& known : kChips) {
    if (known.compute_capability <= compute_capability) chip = &known;
  }
  return *chip;
}

// GB/s: what the device says, or its chip's.
double bandwidth_of(const Capability& capability) {
  return capability.bandwidth > 0 ? capability.bandwidth : chip_of(capability.compute_capability).bandwidth;
}

// mma.sync tiles are not swept but reckoned: a launch, then the tensor cores of the SM that gets most tiles, or memory.
double roofline(const Candidate& c, const GemmProblem& problem, const Capability& capability) {
  constexpr double kLaunch = 3, kFill = 512;  // fill and epilogue take as long as 512 more of K
  const Chip& chip = chip_of(capability.compute_capability);
  const double tiles = ceil_div(problem.m, c.tile_m) * ceil_div(problem.n, c.tile_n);
  const double rounds = std::ceil(tiles / std::max(1, capability.sm_count));
  const double products = static_cast<double>(c.tile_m * c.tile_n) * (static_cast<double>(problem.k) + kFill);
  const double compute = rounds * products / (chip.macs * chip.clock * 1e3 * sm80::kTiles[c.tile].efficiency);
  const double bytes = static_cast<double>((problem.m + problem.n) * problem.k) +
                       static_cast<double>(problem.m * problem.n) * static_cast<double>(size_of(problem.out));
  return kLaunch + std::max(compute, bytes / (bandwidth_of(capability) * 1e3));
}

// Where a kernel is timed (benchmarks/sweep_gemm.py) and estimated: elsewhere most of its tile would be empty, or its
// many tiles would read the weights again and again. Few int8 tokens leave most of a tile of 64 empty, too, which
// costs nothing while weights come from memory.
bool is_swept(const Candidate& c, int64_t m) {
  if (c.engine == Engine::kSkinny) return c.tile_m < 2 * m + 16;
  if (c.engine == Engine::kWgmma && wgmma::kTiles[c.tile].form == kSwapped) {
    return m <= 512 && m <= 8 * c.tile_m && c.tile_m < 2 * m + 16;
  }
  if (c.engine == Engine::kCutlassSm90 && m % (2 * c.tile_m) != 0) return false;  // it reads rows outside x, slowly
  const bool narrow = c.engine == Engine::kWgmma && c.tile_n < 64;                // of many blocks: for few tokens
  if (c.engine == Engine::kWgmma && c.blocks_per_sm > 1 && !narrow) return m <= 4 * c.tile_m;
  return narrow ? m <= c.tile_m : m >= 48 || (c.tile_m == 64 && c.arithmetic == Arithmetic::kInt8);
}

// Whether blocks that are made to share an SM would each be alone there, with a part of its memory for no reason, while
// the same tile is offered as a block an SM. Of float8 these were measured to be as fast or faster.
bool is_cramped(const Candidate& c, const GemmProblem& problem, int sm_count) {
  if (c.blocks_per_sm == 1 || c.arithmetic != Arithmetic::kInt8) return false;
  if (ceil_div(problem.m, c.tile_m) * ceil_div(problem.n, c.tile_n) * c.split > sm_count) return false;
  return std::any_of(candidates().begin(), candidates().end(), [&](const Candidate& other) {
    return other.engine == c.engine && other.tile == c.tile && other.split == c.split && other.blocks_per_sm == 1;
  });
}

// Bytes of K that a skinny block takes in one step.
int64_t step_of(const Candidate& c) {
  const int depth = skinny::kTiles[c.tile].depth;
  return depth == 0 ? 4096 : 512 * depth;
}

}  // namespace

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = make_candidates();
  return all;
}

// For tiles: one; rounds in which the device runs its blocks; steps of K of the blocks that share an SM; megabytes of
// weights; megabytes that all blocks read; millions of products. For skinny kernels: one; rounds; megabytes of weights;
// of tokens, as all blocks read them; steps of K; none.
TimeModel features_of(const Candidate& c, const GemmProblem& problem, int sm_count) {
  const double sms = std::max(1, sm_count);
  const double k = static_cast<double>(problem.k);
  const double megabytes = static_cast<double>(problem.n) * k / 1e6;
  const double tokens = static_cast<double>(std::min<int64_t>(c.tile_m, problem.m));
  const double across = ceil_div(problem.n, c.tile_n);
  if (c.engine == Engine::kSkinny) {
    return {1, std::ceil(across / (3 * sms)), megabytes, across * tokens * k / 8e6, ceil_div(problem.k, step_of(c)), 0};
  }
  // Clusters of 3 and 4 blocks leave SMs of a GPC idle.
  const double usable = c.split >= 4 ? 112.0 / 132 : c.split == 3 ? 120.0 / 132 : 1.0;
  // Blocks of a cluster work on neighbouring tiles of tokens, the last of them perhaps on none.
  const double tiles = ceil_div(problem.m, int64_t{c.tile_m} * c.cluster) * c.cluster * across;
  const double filled = std::floor(sms * usable);
  return {1,
          std::ceil(tiles * c.split / (filled * c.blocks_per_sm)),
          std::ceil(tiles * c.split / filled) * ceil_div(ceil_div(problem.k, 128), c.split),
          megabytes,
          tiles * (tokens + c.tile_n) * k / 1e6,
          static_cast<double>(problem.m) * megabytes};
}

double estimated_time(const Candidate& c, const GemmProblem& problem, const Capability& capability) {
  // With a second pass, or without tensor cores, they come after every fused kernel.
  if (c.engine == Engine::kCublasLt) return 1e17;
  if (c.engine == Engine::kNaive) return 1e30;
  if (c.engine == Engine::kCutlassSm80) {
    // Data sheets promise more than these kernels get: where measured kernels run they come behind those.
    const bool has_measured = capability.compute_capability == 90 && capability.kernels_sm90a;
    return roofline(c, problem, capability) + (has_measured ? kLastResort : 0);
  }
  if (!is_swept(c, problem.m) || is_cramped(c, problem, capability.sm_count)) return kNoEstimate;
  const Measured& measured = measured_near(bandwidth_of(capability));
  const TimeModel& model = measured.models[static_cast<size_t>(&c - candidates().data())];
  TimeModel features = features_of(c, problem, capability.sm_count);
  if (c.engine == Engine::kSkinny) {  // elsewhere the same bytes come at another rate
    const double slower = measured.bandwidth / bandwidth_of(capability);
    features[2] *= slower;
    features[3] *= slower;
  }
  // Large products run as fast as power allows, which depends on how often a tile's operands are read.
  constexpr double kLimited = 2e5, kUntimed = 1.25;
  const double found = std::inner_product(model.begin(), model.end() - 1, features.begin(), 0.0);
  if (model.back() == 0 && features.back() >= kLimited) return kUntimed * found;
  return std::max(found, model.back() * features.back());
}

const Candidate* measured_best(const GemmProblem& problem, const Capability& capability) {
  if (capability.compute_capability != 90) return nullptr;
  const Measured& measured = measured_near(bandwidth_of(capability));
  const double rate = bandwidth_of(capability) / measured.bandwidth;
  if (capability.sm_count != measured.sm_count || rate < 0.9 || rate > 1.1) return nullptr;
  return measured.best(problem);
}

}  // namespace octofuse
