// Sums of float8 products, in two steps: the tensor cores add up a block of 128 columns, and the blocks, each times the
// factor of its scales, are added in fp32: sum = fma(block, x_scale * w_scale, sum), from the first block to the last.
//
// A warp beside the producer reads the scales, far enough ahead to hide memory's latency, and lays the factors of a
// block beside its operands in the ring. Without scales all factors are 1, and there is nothing to read.
#pragma once

#include "device/chain.cuh"
#include "device/wgmma.cuh"
#include "gemm/wgmma/launch.h"

namespace octofuse::wgmma {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// Whether every 128 columns' sums are added to others in fp32.
constexpr bool promotes(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kFloat8 || arithmetic == Arithmetic::kE5M2;
}

// The factors of kTokens tokens beside the channels of one block of 128, a few blocks of columns at a time.
template <int kTokens>
class FactorReader {
 public:
  static constexpr int kBlocks = kTokens < 128 ? 4 : 2;  // read at once

  __device__ FactorReader(const KernelArgs& args, int m0, int n0, int lane) : args_(args), m0_(m0), lane_(lane) {
    // A tile that reaches beyond the last channel begins before it.
    w_ = args.w_blocks.data + n0 / static_cast<int>(kScaleBlock) * args.w_blocks.row;
    read(0);
  }

  // Hands the blocks in order to store(block, factors): factors[i] is that of token 32 * i + lane.
  template <class Store>
  __device__ void for_each(Store store) {
    for (int first = 0; first < args_.k_blocks; first += kBlocks) {
      float now[kBlocks][kOfLane];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) now[b][i] = __fmul_rn(x_scale_[b][i], w_scale_[b]);
      }
      read(first + kBlocks);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (first + b < args_.k_blocks) store(first + b, now[b]);
      }
    }
  }

 private:
  static constexpr int kOfLane = (kTokens + 31) / 32;

  __device__ void read(int first) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t block = min(first + b, args_.k_blocks - 1);
      w_scale_[b] = w_[block * args_.w_blocks.step];
      const float* x = args_.x_blocks.data + block * args_.x_blocks.step;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        x_scale_[b][i] = x[min(m0_ + 32 * i + lane_, args_.output.m - 1) * args_.x_blocks.row];
      }
    }
  }

  const KernelArgs& args_;
  const float* w_;
  int m0_, lane_;
  float x_scale_[kBlocks][kOfLane], w_scale_[kBlocks];
};

// Warps of a warpgroup that say that they are done with a stage: each for itself, since a warp's reads of factors,
// unlike the tensor cores' of operands, are not its warpgroup's.
constexpr uint32_t kReaders = 4;

// Frees the stage in this block, or in the first `blocks` blocks of the cluster.
__device__ inline void release_factors(EmptyBarrier& empty, int thread) {
  __syncwarp();
  if (thread % 32 == 0) empty.arrive();
}
__device__ inline void release_factors(EmptyBarrier& empty, int thread, int blocks) {
  __syncwarp();
  if (thread % 32 < blocks) empty.arrive(static_cast<uint32_t>(thread % 32));
}

template <int kTokens, size_t kOfLane>
__device__ inline void store_factors(float* to, const float (&factors)[kOfLane], int lane) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(kOfLane); ++i) {
    if (32 * i + lane < kTokens) to[32 * i + lane] = factors[i];
  }
}

// The factors of a thread's fragment of 64 x kCols: of the side that is x it has two tokens, or swapped kCols / 4.
template <bool kSwap, int kCols>
struct BlockFactors {
  float of_token[kSwap ? kCols / 4 : 2];

  __device__ BlockFactors() {
#pragma unroll
    for (float& factor : of_token) factor = 1.0F;
  }

  // factors: of the tile's tokens; row: this warpgroup's first one; thread: of the warpgroup.
  __device__ void load(const float* factors, int row, int thread) {
    if constexpr (kSwap) {
#pragma unroll
      for (int i = 0; i < kCols / 4; i += 2) {
        const float2 pair = *reinterpret_cast<const float2*>(factors + i / 2 * 8 + thread % 4 * 2);
        of_token[i] = pair.x;
        of_token[i + 1] = pair.y;
      }
    } else {
      of_token[0] = factors[row + 16 * (thread / 32) + thread % 32 / 4];
      of_token[1] = factors[row + 16 * (thread / 32) + thread % 32 / 4 + 8];
    }
  }

  __device__ void add(const float (&block)[kCols / 2], float (&sums)[kCols / 2]) const {
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      sums[i] = __fmaf_rn(block[i], of_token[kSwap ? i / 4 * 2 + i % 2 : i / 2 % 2], sums[i]);
    }
  }
};

}  // namespace octofuse::wgmma
