// A tile of the one-tile kernel, and where its block stands.
#pragma once

#include "device/wgmma.cuh"
#include "epilogue/tile.cuh"
#include "gemm/wgmma/columns.cuh"
#include "gemm/wgmma/digits.cuh"
#include "gemm/wgmma/launch.h"
#include "gemm/wgmma/promoted.cuh"

namespace octofuse::wgmma {

template <Arithmetic kArithmetic, bool kSwap>
using InstructionOf = std::conditional_t<kArithmetic == Arithmetic::kInt8, S32S8S8,
                                         std::conditional_t<kArithmetic != Arithmetic::kE5M2, F32E4M3E4M3,
                                                            std::conditional_t<kSwap, F32E4M3E5M2, F32E5M2E4M3>>>;

template <int kWarpgroups_, int kCols_, bool kSwap_, Arithmetic kArithmetic_, Outliers kOutliers = Outliers::kNone>
struct Tile {
  static constexpr Arithmetic kArithmetic = kArithmetic_;
  static constexpr bool kGathered = kOutliers == Outliers::kGathered;
  static constexpr bool kDigits = kOutliers == Outliers::kDigits;
  using Args = std::conditional_t<kGathered || kDigits, OutlierKernelArgs, KernelArgs>;
  using Instruction = InstructionOf<kArithmetic, kSwap_>;
  using Register = typename SumsOf<Instruction>::Register;
  using Sum = std::conditional_t<kGathered, float, typename SumsOf<Instruction>::Sum>;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRowBlocks = 1;  // of a warpgroup
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kCols = kCols_;
  static constexpr bool kSwap = kSwap_;  // rows are output channels, cols are tokens
  static constexpr int kRowsOfToken = kDigits ? kDigitRows : 1;
  static constexpr int kRowsOfX = kSwap ? kCols : kRows;
  static constexpr int kTokens = kRowsOfX / kRowsOfToken;
  static constexpr int kChannels = kSwap ? kRows : kCols;
  // K slices: warpgroups that take turns with the blocks of K of a small tile, one of which could not multiply as fast
  // as a full ring comes (cpp/README.md, "Few tokens in int8"). Sums of float8 have one order.
  static constexpr int kSlices =
      kArithmetic == Arithmetic::kInt8 && kOutliers == Outliers::kNone && kWarpgroups == 1 && kCols <= 64 ? 2 : 1;
  static constexpr int kSliceThreads = 128 * kWarpgroups;
  static constexpr int kConsumers = kSliceThreads * kSlices;
  static constexpr int kProducer = kConsumers;      // its first thread
  static constexpr int kVectors = kConsumers + 32;  // the vector warp's first thread
  static constexpr int kTaker = kConsumers + 64;    // the first thread of those that take columns with outliers
  static constexpr int kThreads = kTaker + (kGathered ? 32 * kTakers : 0);
  // Registers must allow them.
  static constexpr int kBlocksPerSm = kDigits && kSwap && kCols <= 32 ? 3 : kSwap ? kSlices : 1;
  static constexpr int kBytesA = kRows * kBlockK;
  static constexpr int kStageBytes = (kRows + kCols) * kBlockK;
  static_assert(!promotes(kArithmetic) || kScaleBlock % kChannels == 0, "channels must lie in one block");
  struct NoFactors {};
  using Factors = std::conditional_t<promotes(kArithmetic), FactorRing<kTokens, kConsumers>, NoFactors>;
  struct NoColumns {};
  using Columns =
      std::conditional_t<kGathered, octofuse::wgmma::Columns<kChannels, kChannels <= 128 ? 128 : 96>, NoColumns>;
  struct NoDigits {};
  using Digits = std::conditional_t<kDigits, DigitFactors<kTokens>, NoDigits>;
  struct Shared {
    FullBarrier full[kMaxStages];
    EmptyBarrier empty[kMaxStages];
    Factors factors;
    Digits digits;
    Columns columns;
    alignas(16) float scales[kGathered ? kTokens : 1];  // of x, which are in the sums where there are outliers
    TileVectors<kTokens, kChannels> vectors;
  };
  static constexpr int kFixedBytes = (static_cast<int>(sizeof(Shared)) + 1023) / 1024 * 1024;
  // At the end the accumulators lie in the ring's place, [rows of x][channels]. The pitch (in words) spreads a
  // fragment's rows over all banks.
  static constexpr int kPitch = kSwap ? kChannels + 4 : kChannels + (40 - kChannels % 32) % 32;
  static constexpr int kTokenPitch = kRowsOfToken * kPitch;
  static constexpr int kSliceSums = kRowsOfX * kPitch;
  static constexpr int kEpilogueBytes = kSlices * kSliceSums * static_cast<int>(sizeof(Sum));
  using Share = TileShare<kTokens, kChannels, kConsumers>;
};

// Where a block stands: its tile and its slice of K.
struct Place {
  int tile_r, tile_c, rank_k;
  int k_begin, k_count;  // in blocks of kBlockK

  __device__ explicit Place(const KernelArgs& args) {
    tile_c = static_cast<int>(blockIdx.x);
    tile_r = static_cast<int>(blockIdx.y);
    rank_k = static_cast<int>(blockIdx.z);  // a cluster spans the grid's z, so this is the rank in it too
    k_begin = rank_k * args.k_share;
    k_count = max(0, min(args.k_share, args.k_blocks - k_begin));
  }
};

}  // namespace octofuse::wgmma
