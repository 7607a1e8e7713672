// What the kernels of gemm and gemm_many share: a kernel at compile time, and what the host hands to it.
#pragma once

#include "device/launch.h"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"
#include "lowbit/epilogue.cuh"
#include "lowbit/integers.cuh"
#include "lowbit/stage.cuh"
#include "lowbit/weights.cuh"

namespace octofuse::lowbit {

constexpr int kMostStages = 16;
constexpr int kTokenRun = 128;   // bytes of a token that are copied and multiplied at a time: TMA's widest swizzle
constexpr int kSwizzleRows = 8;  // runs that a swizzle's unit has

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// A stage of the ring holds a k-block, or half of one: the runs of the tokens, codes, scales [group, plane][channel],
// zeros [group][channel]. Offsets in bytes.
struct StageLayout {
  int tile;                  // bytes of a row tile's codes and planes, or of a run's codes
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

// Four channels' sums of a token.
template <class Sum>
struct alignas(16) Quad {
  Sum values[4];
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
  // Runs that are made and multiplied together: beside 16 tokens both of a k-block, since sums leave registers for
  // them, where codes take few.
  static constexpr int kOperandRuns = kRuns == 2 && kTokens == 16 && !Code::kPlanes && Code::kWidth <= 4 ? 2 : 1;
  static constexpr int kChannelParts = kChannelParts_;
  static constexpr int kSums = kTokens / 2;                                             // of a consumer thread's part
  static constexpr int kSlices = kChannels == 64 ? 4 : kChannels == 128 ? 2 : 1;        // of K, in a block
  static constexpr int kConsumers = kChannels == 192 ? 384 : kTokens > 64 ? 256 : 512;  // threads that multiply
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kGroupThreads = 2 * kChannels / kChannelParts;
  static constexpr int kGroups = kConsumers / kGroupThreads;
  static constexpr int kSlicesOfGroup = kSlices / kGroups;
  static constexpr int kTokenBytes = kTokens * kTokenRun;                     // of a run
  static constexpr int kTableBytes = Code::kCodebook ? kLevelTableBytes : 0;  // in front of the rings
  // Whether the codes of a run lie together.
  static constexpr bool kCodesByRun = !Code::kPlanes && (Code::kWidth == 4 || Code::kWidth == 8);
  // Stages of a group's ring, at least, if a k-block is cut into so many.
  static constexpr int stages_of(int parts) {
    const int codes = kRowTiles * Code::kBytes / (kCodesByRun ? parts : 1);
    const int scales = kMostSegments * kChannels * 3;  // with zero points
    const auto stage =
        static_cast<int>(round_up(kRuns * kTokenBytes / parts + codes + scales + kBarriersOfStage, kBarrierBytes));
    return (kMostShared - kBarrierBytes - kTableBytes) / stage / kGroups;
  }
  // Stages of a k-block. Where a ring would have two, and four of half a size fit, they hold a run: the sooner a part
  // of the ring comes free, the more is on its way.
  static constexpr int kStagesOfBlock =
      !kIntegers && !Code::kPlanes && kChannels == 64 && stages_of(1) < 3 && stages_of(2) > 3 ? 2 : 1;
  static constexpr bool kPairs =
      kIntegers || kStagesOfBlock == 2 || kOperandRuns == 2;  // two stages a turn of the loop
  static_assert(kStagesOfBlock == 1 || kOperandRuns == 1);
  static constexpr int kWriters = 1;  // blocks that write to a block's tokens
  static constexpr int kPitch = pitch_of(kChannels);
  static constexpr int kOutputs = kTokens * kPitch;  // a group's sums
};

// A kernel as the host sees it.
struct GemmKernel {
  const void* function;
  DeviceFlags* raised;
  int tokens, channels, threads, groups, slices;
  int token_size;  // bytes of a token's element
  int code_bytes;  // of a row tile and plane
  int table_bytes;
  uint32_t base;              // Dequantizer's
  int least_stages;           // of a group's ring: a turn of the loop that has two holds the one before, too
  int exchange_bytes = 0;     // of sums in shared memory: another block's, or a group's
  int handover_bytes = 0;     // of a thread's sums, between blocks that share a tile
  int stage_barriers = 0;     // bytes; 0: they do not lie in the stages
  int stages_of_block = 1;    // 2: a stage has a run of a k-block
  bool codes_by_run = false;  // its codes too, otherwise the first one has all
};

template <class Traits>
constexpr uint32_t base_of() {
  if constexpr (Traits::kIntegers) return 0;
  if constexpr (!Traits::kIntegers) return Dequantizer<typename Traits::Code, Traits::kType>::kBase;
}

// function: what Traits make of one of the kernels.
template <class Traits>
GemmKernel kernel_of(const void* function, DeviceFlags* raised) {
  return {function,
          raised,
          Traits::kTokens,
          Traits::kChannels,
          Traits::kThreads,
          Traits::kGroups,
          Traits::kSlices,
          Traits::kIntegers ? 1 : 2,
          Traits::Code::kBytes,
          Traits::kTableBytes,
          base_of<Traits>(),
          Traits::kPairs ? 3 : 2};
}

}  // namespace octofuse::lowbit
