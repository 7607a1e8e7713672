// What the kernels of gemm and gemm_many share: a kernel at compile time, and what the host hands to it.
#pragma once

#include <algorithm>
#include <cmath>

#include "device/launch.h"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"
#include "lowbit/epilogue.cuh"
#include "lowbit/integers.cuh"
#include "lowbit/stage.cuh"
#include "lowbit/weights.cuh"
#include "octofuse/error.h"

namespace octofuse::lowbit {

constexpr int kMostStages = 16;
constexpr int kTokenRun = 128;   // bytes of a token that are copied and multiplied at a time: TMA's widest swizzle
constexpr int kSwizzleRows = 8;  // runs that a swizzle's unit has

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// A stage of the ring holds a k-block: the runs of the tokens, codes, scales [group, plane][channel], zeros
// [group][channel]. Offsets in bytes.
struct StageLayout {
  int tile;                  // bytes of a row tile's codes
  int codes, scales, zeros;  // where they start; the tokens are at 0
  int stage;                 // bytes of one
  int stages;                // of a consumer group's ring
};

struct GemmArgs {
  Epilogue epilogue;
  Groups groups;
  int m, n, planes;
  int split;                        // blocks that share K
  int slice_blocks, longer_slices;  // k-blocks of a K slice; the first longer_slices have one more
  int tokens_read;                  // rows of x's box
  uint32_t base;                    // Dequantizer's
  int twice_zero;                   // where there are no zero points: 0 with them
  bool has_scales;                  // of groups: beside integers uniform codes have none
  bool has_zeros, constant_weight, chained;
  bool plain;  // a k-block has one scale and no zero point, the zero of all is an integer
  StageLayout layout;
  uint16_t levels[16];  // of a codebook, in x's type
  CUtensorMap codes, scales, zeros, x;
};

// From token to token of a block's sums in shared memory.
constexpr int pitch_of(int channels) { return channels + 4; }

// A kernel at compile time. kType: of the tokens as they are multiplied; sums of int8 are integers. A consumer
// warpgroup has kChannelParts times 64 channels, and as many warpgroups as its channels need form a group; the groups
// share K. Sums of 128 tokens take the registers of twice the threads: a group then has two K slices, one after the
// other.
template <LowbitFormat kFormat_, int kBits, DType kType_, int kTokens_, int kChannels_, int kChannelParts_ = 1>
struct GemmTraits {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr DType kType = kType_;
  static constexpr bool kIntegers = kType == DType::kInt8;
  // Whether codes are requested in front of products that are still to be started (measured: beside int8 it is faster,
  // 28672 x 4096 with 16 tokens by a seventh; of two levels, and as fp16, mostly slower).
  static constexpr bool kAsksAhead = kIntegers && kFormat == LowbitFormat::kUniform;
  using Sum = std::conditional_t<kIntegers, uint32_t, float>;  // uint32_t: CuTe takes int32 so
  static constexpr int kRuns = kIntegers ? 1 : 2;              // of a token's k-block
  static constexpr int kTokens = kTokens_;
  static constexpr int kChannels = kChannels_;
  static constexpr int kRowTiles = kChannels / kTileRows;
  using Code = Codes<kFormat, kBits>;
  static constexpr int kChannelParts = kChannelParts_;
  static constexpr int kSums = kTokens / 2;                                             // of a consumer thread's part
  static constexpr int kSlices = kChannels == 64 ? 4 : kChannels == 128 ? 2 : 1;        // of K, in a block
  static constexpr int kConsumers = kChannels == 192 ? 384 : kTokens > 64 ? 256 : 512;  // threads that multiply
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kGroupThreads = 2 * kChannels / kChannelParts;
  static constexpr int kGroups = kConsumers / kGroupThreads;
  static constexpr int kSlicesOfGroup = kSlices / kGroups;
  static constexpr int kTokenBytes = kTokens * kTokenRun;  // of a run
  static constexpr int kWriters = 1;                       // blocks that write to a block's tokens
  static constexpr int kPitch = pitch_of(kChannels);
  static constexpr int kOutputs = kTokens * kPitch;                           // a group's sums
  static constexpr int kTableBytes = Code::kCodebook ? kLevelTableBytes : 0;  // in front of the rings
};

// ---- launch ----

// A kernel as the host sees it.
struct GemmKernel {
  const void* function;
  DeviceFlags* raised;
  int tokens, channels, threads, groups, slices;
  int token_size;  // bytes of a token's element
  int code_bytes;  // of a row tile and plane
  int table_bytes;
  uint32_t base;           // Dequantizer's
  int exchange_bytes = 0;  // of sums in shared memory: another block's, or a group's
  int handover_bytes = 0;  // of a thread's sums, between blocks that share a tile
  int stage_barriers = 0;  // bytes; 0: they do not lie in the stages
};

template <class Traits>
constexpr uint32_t base_of() {
  if constexpr (Traits::kIntegers) return 0;
  if constexpr (!Traits::kIntegers) return Dequantizer<typename Traits::Code, Traits::kType>::kBase;
}

// function: what Traits make of one of the kernels.
template <class Traits>
GemmKernel kernel_of(const void* function, DeviceFlags* raised) {
  return {function,         raised,          Traits::kTokens,           Traits::kChannels,    Traits::kThreads,
          Traits::kGroups,  Traits::kSlices, Traits::kIntegers ? 1 : 2, Traits::Code::kBytes, Traits::kTableBytes,
          base_of<Traits>()};
}

// Without the number of stages. tokens: bytes of them in a stage.
inline StageLayout layout_of(const GemmArgs& args, const GemmKernel& kernel, int tokens) {
  StageLayout layout{};
  const int scales = args.groups.segments * kernel.channels;
  layout.tile = kernel.code_bytes * args.planes;
  layout.codes = tokens;
  layout.scales = layout.codes + kernel.channels / kTileRows * layout.tile;
  layout.zeros = layout.scales + (args.has_scales ? args.planes * scales * 2 : 0);
  const int end = layout.zeros + (args.has_zeros ? scales : 0);
  layout.stage = static_cast<int>(round_up(end + kernel.stage_barriers, 1024));  // the swizzle's unit
  return layout;
}

inline void describe_operands(const LowbitArgs& given, const Weight& w, const GemmKernel& kernel, GemmArgs& args) {
  const StageLayout& layout = args.layout;
  const int size = kernel.token_size;
  args.x = tensor_map({given.x, given.m, given.k, given.ldx * size, size, args.tokens_read, kTokenRun / size, true});
  const int64_t row_tiles = ceil_div(given.n, kTileRows);
  const int64_t row_tile = int64_t{w.k_blocks} * layout.tile;  // bytes
  args.codes =
      tensor_map({w.packed, row_tiles, row_tile / 8, row_tile, 8, kernel.channels / kTileRows, layout.tile / 8, false});
  const auto of_groups = [&](const void* data, int64_t rows, int bytes, int box_rows) {
    const int64_t pitch = round_up(int64_t{bytes} * given.n, 16);  // of a single row it is never used
    return tensor_map({data, rows, given.n, pitch, bytes, box_rows, kernel.channels, false});
  };
  const int64_t groups = w.last + 1;
  if (args.has_scales) args.scales = of_groups(w.scale, groups * w.planes, 2, w.groups.segments * w.planes);
  if (args.has_zeros) args.zeros = of_groups(w.zero, groups, 1, w.groups.segments);
}

// All but how the outputs are cut into blocks. slices: of K. tokens_read: rows that a copy of tokens reads.
// token_bytes: of a stage.
inline GemmArgs gemm_args_of(const LowbitArgs& given, const Weight& w, const GemmKernel& kernel, int slices,
                             int tokens_read, int token_bytes, bool chained) {
  GemmArgs args{Epilogue(given), w.groups};
  args.m = given.m;
  args.n = given.n;
  args.planes = w.planes;
  args.slice_blocks = w.k_blocks / slices;
  args.longer_slices = w.k_blocks % slices;
  args.tokens_read = tokens_read;
  args.base = kernel.base;
  if (has_integers(given)) args.epilogue.w_unit = std::ldexp(1.0F, -log_unit_of(given.format, given.bits));
  args.has_scales = !has_integers(given) || given.format == LowbitFormat::kTwoLevel;
  args.has_zeros = w.has_zeros != 0;
  args.twice_zero = w.twice_zero;
  args.plain = w.groups.segments == 1 && !args.has_zeros && w.twice_zero % 2 == 0;
  args.constant_weight = given.constant_weight;
  args.chained = chained;
  if (given.format == LowbitFormat::kCodebook) {
    for (size_t i = 0; i < given.levels.size(); ++i) args.levels[i] = level_bits(given.levels[i], given.type);
  }
  args.layout = layout_of(args, kernel, token_bytes);
  describe_operands(given, w, kernel, args);
  return args;
}

}  // namespace octofuse::lowbit
