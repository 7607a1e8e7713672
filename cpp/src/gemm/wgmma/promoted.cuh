// Sums of float8 products, in two steps: the tensor cores add up a block of 128 columns, and the blocks, each times the
// factor of its scales, are added in fp32: sum = fma(block, x_scale * w_scale, sum), from the first block to the last.
//
// A warp beside the producer reads the scales, far enough ahead to hide memory's latency, and hands the factors on in a
// ring of their own. Without scales all factors are 1, and there is nothing to read.
#pragma once

#include "device/chain.cuh"
#include "device/wgmma.cuh"
#include "gemm/wgmma/launch.h"

namespace octofuse::wgmma {

// Whether every 128 columns' sums are added to others in fp32.
constexpr bool promotes(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kFloat8 || arithmetic == Arithmetic::kE5M2;
}

// Where the factors of a tile's tokens wait for their blocks, kBlocks of them together. Every lane that writes and
// every thread that reads says so for itself.
template <int kTokens, int kReaders>
struct FactorRing {
  static constexpr int kBlocks = kTokens < 128 ? 4 : 2;
  static constexpr int kSlots = 4;
  EmptyBarrier full[kSlots], empty[kSlots];
  alignas(16) float values[kSlots][kBlocks][kTokens];

  __device__ void init() {
    for (int slot = 0; slot < kSlots; ++slot) {
      full[slot].init(32);
      empty[slot].init(kReaders);
    }
  }
};

// A warp's view of the ring: it reads scales of tile after tile and writes their products.
template <class Ring, int kTokens>
class FactorWriter {
  static constexpr int kBlocks = Ring::kBlocks;
  static constexpr int kOfLane = (kTokens + 31) / 32;

 public:
  __device__ FactorWriter(const KernelArgs& args, Ring& ring, int lane) : args_(args), ring_(ring), lane_(lane) {}

  // The tile whose first token and channel these are.
  __device__ void write(int m0, int n0) {
    const float* w = args_.w_blocks.data + n0 / static_cast<int>(kScaleBlock) * args_.w_blocks.row;
    read(w, m0, 0);
    for (int first = 0; first < args_.k_blocks; first += kBlocks) {
      float factors[kBlocks][kOfLane];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) factors[b][i] = __fmul_rn(x_scale_[b][i], w_scale_[b]);
      }
      read(w, m0, first + kBlocks);
      ring_.empty[slot_].wait(phase_ ^ 1);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          if (32 * i + lane_ < kTokens) ring_.values[slot_][b][32 * i + lane_] = factors[b][i];
        }
      }
      ring_.full[slot_].arrive();
      if (++slot_ == Ring::kSlots) {
        slot_ = 0;
        phase_ ^= 1;
      }
    }
  }

 private:
  __device__ void read(const float* w, int m0, int first) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int64_t block = min(first + b, args_.k_blocks - 1);
      w_scale_[b] = w[block * args_.w_blocks.step];
      const float* x = args_.x_blocks.data + block * args_.x_blocks.step;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        x_scale_[b][i] = x[min(m0 + 32 * i + lane_, args_.output.m - 1) * args_.x_blocks.row];
      }
    }
  }

  const KernelArgs& args_;
  Ring& ring_;
  int lane_, slot_ = 0;
  uint32_t phase_ = 0;
  float x_scale_[kBlocks][kOfLane], w_scale_[kBlocks];
};

// The factors of a thread's fragment of 64 x kCols: of the side that is x it has two tokens, or swapped kCols / 4.
template <bool kSwap, int kCols>
struct BlockFactors {
  float of_token[kSwap ? kCols / 4 : 2];

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

// A thread's view of the ring: the factors of its fragment, block after block. Without scales they stay 1.
template <class Ring, bool kSwap, int kCols>
class FactorReader {
 public:
  BlockFactors<kSwap, kCols> factors;

  __device__ FactorReader(const KernelArgs& args, Ring& ring, int row, int thread)
      : ring_(ring), scaled_(args.x_blocks.data != nullptr), row_(row), thread_(thread) {
#pragma unroll
    for (float& factor : factors.of_token) factor = 1.0F;
  }

  // is_last: of its tile.
  __device__ void next(bool is_last) {
    if (!scaled_) return;
    if (block_ == 0) ring_.full[slot_].wait(phase_);
    factors.load(ring_.values[slot_][block_], row_, thread_);
    if (++block_ < Ring::kBlocks && !is_last) return;
    ring_.empty[slot_].arrive();
    block_ = 0;
    if (++slot_ == Ring::kSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  Ring& ring_;
  bool scaled_;
  int row_, thread_, slot_ = 0, block_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace octofuse::wgmma
