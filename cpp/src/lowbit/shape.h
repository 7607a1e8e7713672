// How the low-bit kernels cut their work, and what of it fits where. Pure: selection and launches both ask here.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "device/align.h"
#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

constexpr int kTileRows = 16;  // output channels of a row tile
constexpr int kBlockK = 128;   // columns of a k-block
constexpr int kLogSlices = 4;
constexpr int kSlices = 1 << kLogSlices;  // K slices of the gemv kernels: slice i has k-blocks i, i + 16, ...
constexpr int kTokensOfSet = 4;           // whose high and low bytes are the 8 columns of a product
constexpr int kMostShared = 227 << 10;    // bytes of a block on an H200

constexpr int k_blocks_of(int64_t k) { return static_cast<int>(ceil_div(k, kBlockK)); }

constexpr int kMostSegments = 4;  // of a k-block: groups of 32 columns

// Scales that a row has in a k-block: those of its 2 or 4 groups, or of the one group that it lies in.
constexpr int segments_of(int64_t group) { return group == 32 || group == 64 ? static_cast<int>(kBlockK / group) : 1; }

// Bits that a column takes in a tile (of a plane), and the planes.
constexpr int width_of(LowbitFormat format, int bits) {
  return format == LowbitFormat::kPlanes ? 1 : format == LowbitFormat::kSparse12 ? 4 : bits;
}
constexpr int planes_of(LowbitFormat format, int bits) { return format == LowbitFormat::kPlanes ? bits : 1; }

// Bytes of a k-block's codes, scales and zero points for some row tiles. A stage starts at a multiple of 128 bytes:
// with lines of memory copied across lines of shared memory, 8 bits at 12288 squared took 41 us instead of 36.
constexpr int stage_bytes(LowbitFormat format, int bits, int segments, int row_tiles) {
  const int planes = planes_of(format, bits);
  const int rows = row_tiles * kTileRows;
  const int codes = 256 * width_of(format, bits) * planes * row_tiles;
  const int zeros = format == LowbitFormat::kUniform ? segments * rows : 0;
  return static_cast<int>(round_up(codes + segments * planes * rows * 2 + zeros, 128));
}

constexpr int kBarriersOfUnit = 5;  // of gemv_several.cu

// Shared memory of a gemv block: tokens; the scale and sum of each in every segment; two sets of the slices' sums;
// rings.
struct SharedLayout {
  int scales_and_sums = 0, sums = 0, inbox = 0, barriers = 0, table = 0, ring = 0;  // offsets
  int bytes = 0;

  // tokens: slots for them. stages: of a warp. table_bytes: of a codebook. several: for gemv_several.cu, which has one
  // set of sums and barriers to keep it, and two sums of each output from another block, in two sets.
  constexpr SharedLayout() = default;
  constexpr SharedLayout(int k_blocks, int segments, int tokens, int row_tiles, int stages, int stage,
                         int table_bytes = 0, bool several = false) {
    scales_and_sums = k_blocks * tokens * 2 * kBlockK;
    sums = static_cast<int>(round_up(scales_and_sums + k_blocks * segments * tokens * 8, 16));
    const int outputs = row_tiles * kTileRows * tokens;
    inbox = sums + (several ? 1 : 2) * kSlices * outputs * 4;
    barriers = inbox + (several ? 2 * outputs * 8 : 0);
    table = static_cast<int>(round_up(barriers + (several ? kBarriersOfUnit * 8 : 0), 128));
    ring = table + table_bytes;
    bytes = ring + kSlices * stages * stage;
  }
};

// The levels of a codebook in a gemv block's shared memory (LevelTable in codes.cuh): a row of 256 bytes for every
// byte, and zeros behind them.
constexpr int kLevelZerosAt = 256 * 256;
constexpr int kIntegerTableBytes = kLevelZerosAt + 256;

// Slots for tokens, as a power of two: 1, 2, 4 or 8.
constexpr int log_slots(int64_t m) { return m > 4 ? 3 : m > 2 ? 2 : m == 2 ? 1 : 0; }

// K-blocks of which a block has tokens.
constexpr int own_k_blocks(int k_blocks, int log_divide) {
  return log_divide == 0 ? k_blocks : static_cast<int>(ceil_div(k_blocks, kSlices)) << (kLogSlices - log_divide);
}

constexpr int kShallowStages = 3;  // of a warp's ring, where there is no room for more

// The kernel of gemv_int8.cu for a weight. groups: of a k-block, whose rows of scales are copied 16 bytes at a time; 0
// serves all others. row_tiles: that a block takes together; may_take_two: or two, where there are many and both fit.
struct Int8GemvShape {
  int groups, row_tiles;
  bool may_take_two;
};

// wide: rows of scales can be copied 16 bytes at a time. Two row tiles share what is done once for a k-block; codes of
// more bits have more of their own to do. Narrow codes come here for more than one token, or where rows of scales are
// not aligned: one kernel has to do.
constexpr Int8GemvShape int8_gemv_shape(LowbitFormat format, int bits, int segments, bool wide) {
  const bool is_uniform = format == LowbitFormat::kUniform || format == LowbitFormat::kTwoLevel;
  const bool is_float = format == LowbitFormat::kFloat8;
  const bool several = (is_uniform && (bits == 4 || bits == 8)) || format == LowbitFormat::kCodebook || is_float;
  const bool one = format == LowbitFormat::kSparse12 || bits != 7;
  if (!wide || (segments > 1 && !several) || (segments == 1 && !one)) return {0, 1, false};
  const int tile = 256 * width_of(format, bits) * planes_of(format, bits);
  if (tile < 1024 || (tile == 1024 && segments == 4)) return {segments, 2, false};
  return {segments, 1, tile == 1024 || (bits == 8 && (is_uniform || is_float) && segments < 4)};
}

// Codes that gemv_binary.cu takes, and its kernel for them. blocks_of_stage: k-blocks that a stage of its rings holds.
constexpr bool is_binary(LowbitFormat format, int bits) {
  return (format == LowbitFormat::kPlanes && bits <= 4) || (format == LowbitFormat::kUniform && bits <= 3);
}
constexpr int binary_row_tiles(int segments, bool few_row_tiles) { return segments < 4 && few_row_tiles ? 1 : 2; }
constexpr int k_blocks_of_binary_stage(int stage_bytes) { return stage_bytes <= 640 ? 2 : 1; }

constexpr Int8GemvShape int8_gemv_shape(const LowbitProblem& problem) {
  const bool wide = problem.n % 16 == 0 && problem.aligned;
  return int8_gemv_shape(problem.format, problem.bits, segments_of(problem.group), wide);
}

// What a block of a gemv kernel needs at least, in bytes of shared memory.
constexpr int least_int8_gemv(const LowbitProblem& problem, int row_tiles) {
  const int groups = int8_gemv_shape(problem).groups;
  const int stage = stage_bytes(problem.format, problem.bits, groups == 0 ? 4 : groups, row_tiles);
  return SharedLayout(k_blocks_of(problem.k), segments_of(problem.group), 1 << log_slots(problem.m), row_tiles,
                      kShallowStages, stage)
      .bytes;
}
constexpr int least_int8_gemv(const LowbitProblem& problem) {
  return least_int8_gemv(problem, int8_gemv_shape(problem).row_tiles);
}
constexpr int least_binary_gemv_of(const LowbitProblem& problem, int row_tiles) {
  const int segments = segments_of(problem.group);
  const int block = stage_bytes(problem.format, problem.bits, segments, row_tiles);
  const int stage = block * k_blocks_of_binary_stage(block);
  return SharedLayout(k_blocks_of(problem.k), segments, 1, row_tiles, kShallowStages, stage).bytes;
}
constexpr int least_binary_gemv(const LowbitProblem& problem, int sm_count) {
  const bool few_row_tiles = ceil_div(problem.n, kTileRows) <= sm_count;
  return least_binary_gemv_of(problem, binary_row_tiles(segments_of(problem.group), few_row_tiles));
}

// Whether a gemv kernel can take a row tile of gates and the one of their values together.
constexpr bool int8_gemv_takes_gate(const LowbitProblem& problem, int shared_memory) {
  const Int8GemvShape shape = int8_gemv_shape(problem);
  const bool takes_two = shape.groups > 0 && (shape.row_tiles == 2 || shape.may_take_two);
  return takes_two && problem.n % (2 * kTileRows) == 0 && least_int8_gemv(problem, 2) <= shared_memory;
}
constexpr bool binary_gemv_takes_gate(const LowbitProblem& problem, int shared_memory) {
  return problem.n % (2 * kTileRows) == 0 && least_binary_gemv_of(problem, 2) <= shared_memory;
}

constexpr int kSms = 132;          // of an H200
constexpr int kManyClusters = 66;  // of two blocks, at once

// ---- gemm_stream.cuh ----

constexpr int kStreamChannels = 128;  // of a block, which has both of 2 slices

// Whether gemm has blocks that share the k-blocks of all tiles: where there are more tiles than SMs, which would work
// in rounds. A token's bits are the same. planes: a code's bits or planes; with 8 of them and more than 32 tokens what
// comes through L2 decides, and rounds are as fast (H200).
constexpr bool streams(int64_t m, int64_t n, int k_blocks, int planes) {
  constexpr int64_t kMostTokens = 64, kMostOfWide = 32;
  const bool is_wide = planes >= 8;
  return m <= (is_wide ? kMostOfWide : kMostTokens) && k_blocks >= 2 && ceil_div(n, kStreamChannels) > kSms;
}
inline bool streams(const LowbitProblem& problem) {
  return streams(problem.m, problem.n, k_blocks_of(problem.k), problem.bits);
}
constexpr int stream_tokens(int64_t m) { return m <= 16 ? 16 : m <= 32 ? 32 : m <= 48 ? 48 : 64; }

// ---- gemm_kernel.cuh ----

constexpr int kBarrierBytes = 1024;                       // in front of all stages: where a stage may start
constexpr int kBarriersOfStage = 16;                      // bytes in front of each stage (gemm_ring.cuh)
constexpr int kLevelTableBytes = 256 * 32 * 4;            // of a codebook (weights.cuh)
constexpr int kMostSplit = 4;                             // blocks of a cluster
constexpr int64_t kMostGemmTokens = int64_t{64} * 65535;  // a grid has no more blocks in z, of 64 tokens at least then
constexpr int kFewChannels = 64 * 66;  // 66 tiles of 64 channels, two blocks each: one for each of 132 SMs

// Which widths have all kinds of blocks. The others do without the largest ones, to keep the library small.
constexpr bool has_every_block(LowbitFormat format, int bits) {
  const bool common = bits == 8 || bits <= 4;
  return format == LowbitFormat::kPlanes || format == LowbitFormat::kCodebook || format == LowbitFormat::kFloat8 ||
         (format == LowbitFormat::kUniform && common);
}

constexpr int kGemmTokens[] = {16, 32, 48, 64, 96, 128};  // that a block may have

// A block has so many tokens and output channels; so many blocks share K, a cluster. K has 4 slices a block of 64
// channels, 2 of 128 and 1 of 192: how many there are in all depends on N and K alone, and so do a token's bits. Sizes
// are those of an H200, 132 SMs with room for 66 clusters of 2 or 30 of 4, whatever the GPU: the same bits on all.
struct GemmShape {
  int tokens = 32, channels = 64, split = 1;

  // every: all kinds of blocks are there, else those of up to 64 tokens and 64 or 128 channels.
  GemmShape(int m, int n, int k_blocks, bool every) {
    if (is_split_by_4(n, k_blocks)) {
      split = 4;
    } else if (n <= kFewChannels) {
      split = k_blocks >= 8 ? 2 : 1;
    } else if (n <= 2 * kFewChannels) {  // 4 slices; with more channels in a block tokens are read less often
      const bool by_192 = every && n <= kClusters[4] * 192;
      if (m > 32) channels = by_192 ? 192 : 128;
      if (m > 32) split = by_192 ? 4 : 2;
    } else {  // 2 slices
      const bool by_192 = every && rounds(n, 192, 2) * 192 < rounds(n, 128, 1) * 128 * 2;
      channels = by_192 ? 192 : 128;
      split = by_192 ? 2 : 1;
    }
    // Few tokens in each of many blocks where SMs have room for these at once.
    for (const int of_block : kGemmTokens) {
      if (of_block == 16 ? m > 16 : of_block > (every ? 128 : 64)) continue;
      tokens = of_block;
      if (tokens >= m || ceil_div(n, channels) * ceil_div(m, tokens) <= kClusters[split]) break;
    }
  }

  // Of a problem: with fewer tokens in a block where a ring would have one stage (8 planes in groups of 32).
  explicit GemmShape(const LowbitProblem& problem)
      : GemmShape(static_cast<int>(problem.m), static_cast<int>(problem.n), k_blocks_of(problem.k),
                  has_every_block(problem.format, problem.bits)) {
    for (auto of_block = std::rbegin(kGemmTokens); tokens > 32 && stages(problem) < 2; ++of_block) {
      tokens = std::min(tokens, *of_block);
    }
  }

  static constexpr bool is_split_by_4(int64_t n, int k_blocks) { return n <= kClusters[4] * 64 && k_blocks >= 16; }

  // ns on an H200, of more than 64 tokens.
  int64_t time(int64_t m, int64_t n, int k_blocks) const {
    const int of_128 = channels == 192 ? 1170 : channels == 128 ? 870 : split == 4 ? 350 : 435;
    const int of_block = of_128 * (32 + tokens) / 160;
    const int of_round = split == 1 ? 2700 : 4400;
    const int64_t blocks = ceil_div(n, channels) * ceil_div(m, tokens);
    return ceil_div(blocks, kClusters[split]) * (ceil_div(k_blocks, split) * of_block + of_round);
  }

  // The same of up to 16 tokens. Of 5 and 7 bits reckoned from the others.
  int64_t time_of_few(int bits, int64_t n, int k_blocks) const {
    if (streams(16, n, k_blocks, bits)) return time_of_stream(bits, n, k_blocks);
    constexpr int kOfBlock[9] = {0, 620, 620, 760, 645, 820, 890, 950, 1000};  // a group's, of 64 channels or more
    const int slices = split * (channels == 64 ? 4 : channels == 128 ? 2 : 1);
    const int64_t rounds = ceil_div(ceil_div(n, channels), kClusters[split]);
    const int of_round = split == 1 ? 430 : channels == 64 ? 1500 : 950;
    return 2700 + rounds * (ceil_div(k_blocks, slices) * kOfBlock[bits] + of_round);
  }

 private:
  // Of each group's ring.
  int stages(const LowbitProblem& problem) const {
    const int groups = channels == 192 ? 1 : (tokens > 64 ? 128 : 256) / channels;
    const int weights = stage_bytes(problem.format, problem.bits, segments_of(problem.group), channels / kTileRows);
    const auto stage = static_cast<int>(round_up(tokens * 2 * kBlockK + weights + kBarriersOfStage, kBarrierBytes));
    return (kMostShared - kBarrierBytes - (problem.format == LowbitFormat::kCodebook ? kLevelTableBytes : 0)) / stage /
           groups;
  }

  static int64_t time_of_stream(int bits, int64_t n, int k_blocks) {
    constexpr int kOfStep[9] = {0, 595, 595, 780, 680, 830, 930, 1010, 1090};  // two k-blocks of 128 channels
    return 4000 + ceil_div(n, kStreamChannels) * ceil_div(k_blocks, 2) * kOfStep[bits] / kSms;
  }

  static constexpr int kClusters[kMostSplit + 1] = {0, 132, 66, 39, 30};  // at once, of so many blocks

  static int64_t rounds(int n, int channels, int split) { return ceil_div(ceil_div(n, channels), kClusters[split]); }
};

// f(i), an integral constant, for each i below kCount.
template <class F, size_t... i>
void for_each_index(F f, std::index_sequence<i...>) {
  (f(std::integral_constant<size_t, i>()), ...);
}
template <size_t kCount, class F>
void for_each_index(F f) {
  for_each_index(f, std::make_index_sequence<kCount>());
}

// f(tokens, channels), integral constants.
template <bool kEvery, class F>
void with_shape(const GemmShape& shape, F f) {
  const auto with_channels = [&](auto tokens) {
    if (shape.channels == 64) return f(tokens, std::integral_constant<int, 64>());
    if constexpr (kEvery) {
      if (shape.channels == 192) return f(tokens, std::integral_constant<int, 192>());
    }
    f(tokens, std::integral_constant<int, 128>());
  };
  for_each_index<std::size(kGemmTokens)>([&](auto i) {
    constexpr int kTokens = kGemmTokens[i.value];
    if constexpr (kEvery || kTokens <= 64) {
      if (shape.tokens == kTokens) with_channels(std::integral_constant<int, kTokens>());
    }
  });
}

}  // namespace octofuse::lowbit
