// LLM.int8() of many tokens: a weight's columns that are multiplied by outliers of x are taken out of the ring as they
// pass, by a warp that does nothing else. In memory their bytes lie K apart, and an SM gets no more than one of them in
// some five cycles (cpp/README.md).
#pragma once

#include <climits>

#include "device/wgmma.cuh"
#include "epilogue/formula.cuh"
#include "gemm/wgmma/launch.h"

namespace octofuse::wgmma {

// What that warp hands to those that multiply: kTaken columns at most of kChannels channels, in x's type, [columns / 8]
// [channels][8], and the scales of kTokens tokens. kAtOnce: tiles that there is room for.
template <int kTokens_, int kChannels, int kTaken_, int kAtOnce_>
struct Columns {
  static constexpr int kTokens = kTokens_;
  static constexpr int kTaken = kTaken_;
  static constexpr int kAtOnce = kAtOnce_;
  static_assert(kTaken % 16 == 0 && kTaken <= kMostGathered);
  static constexpr int kBytes = 2 * kTaken * kChannels;
  alignas(128) uint8_t taken[kAtOnce][kBytes];
  alignas(16) float scales[kAtOnce][kTokens];  // of x
  uint32_t list[kTaken + 1];                   // the last one is behind all columns
  EmptyBarrier full[kAtOnce], empty[kAtOnce];

  __device__ static uint32_t phase(int tile) { return static_cast<uint32_t>(tile / kAtOnce) & 1; }

  // readers: warps that multiply a tile.
  __device__ void init(int readers) {
    for (int tile = 0; tile < kAtOnce; ++tile) {
      full[tile].init(32);
      empty[tile].init(static_cast<uint32_t>(readers));
    }
  }
};

// Columns of a call, those of them that are taken, and the blocks in the ring in which x's follow.
struct ColumnCount {
  int all = 0, taken = 0, blocks = 0;

  ColumnCount() = default;

  // Behind the wait for earlier kernels.
  __device__ ColumnCount(const OutlierKernelArgs& args, int most)
      : all(*args.outliers.count), taken(min(all, most)), blocks((taken + kOutlierBlock - 1) / kOutlierBlock) {}
};

template <class Tile>
class ColumnTaker {
  static constexpr int kRows = (Tile::kChannels + 31) / 32;  // of a lane
  using Shared = typename Tile::Shared;
  const OutlierKernelArgs& args_;
  Shared& shared_;
  const uint8_t* ring_;  // its weights
  int lane_;
  ColumnCount count_;

 public:
  // Behind the wait for earlier kernels. ring: the weights of its first stage.
  __device__ ColumnTaker(const OutlierKernelArgs& args, Shared& shared, const uint8_t* ring, int lane)
      : args_(args), shared_(shared), ring_(ring), lane_(lane), count_(args, Tile::Columns::kTaken) {
    for (int i = lane; i < count_.taken; i += 32) {
      shared.columns.list[i] = static_cast<uint32_t>(args.outliers.columns[i]);
    }
    if (lane == 0) shared.columns.list[count_.taken] = UINT_MAX;
    fill_up();
    __syncwarp();
  }

  // Those of the tile-th tile of this block of threads, k_blocks stages from the ring's position `at` on; m0: its first
  // token, whose scales come along.
  template <class Ring>
  __device__ void take(Ring& at, int k_blocks, int tile, int m0) {
    const int place = tile % Tile::Columns::kAtOnce;
    if (count_.taken > 0) {
      shared_.columns.empty[place].wait(Tile::Columns::phase(tile) ^ 1);
      for (int i = lane_; i < Tile::Columns::kTokens; i += 32) {
        shared_.columns.scales[place][i] = scale_at(args_.epilogue.x_scale, min(m0 + i, args_.output.m - 1));
      }
    }
    uint8_t* const taken = shared_.columns.taken[place];
    if (args_.outliers.type == DType::kFloat16) {
      take_weights<__half>(at, k_blocks, taken);
    } else {
      take_weights<__nv_bfloat16>(at, k_blocks, taken);
    }
    for (int block = 0; block < count_.blocks; ++block, at.next()) {  // of x
      shared_.full[at.stage].wait(at.phase);
      release(at.stage);
    }
    shared_.columns.full[place].arrive();
  }

 private:
  // As consumers do, at every block whose producer writes to the stage.
  __device__ void release(int stage) const {
    __syncwarp();
    if (lane_ < args_.cluster) shared_.empty[stage].arrive(static_cast<uint32_t>(lane_));
  }

  // Where a byte of this lane's first row lies in rows of 128 bytes in TMA's swizzle; its other rows are 32 rows
  // further each, which the swizzle does not tell apart.
  __device__ uint32_t offset(uint32_t byte) const {
    const auto lane = static_cast<uint32_t>(lane_);
    return lane * 128 + ((byte & 0x70) ^ lane % 8 * 16) + byte % 16;
  }
  __device__ bool has_row(int j) const { return Tile::kChannels % 32 == 0 || lane_ + j * 32 < Tile::kChannels; }
  __device__ uint8_t* place_of(uint8_t* taken, uint32_t i) const {
    return taken + i / 8 * (Tile::kChannels * 16) + static_cast<uint32_t>(lane_) * 16 + i % 8 * 2;
  }

  // Zeros behind the last column, up to a whole step of a product.
  __device__ void fill_up() {
    for (auto& taken : shared_.columns.taken) {
      for (auto i = static_cast<uint32_t>(count_.taken); i % 16 != 0; ++i) {
        uint8_t* const to = place_of(taken, i);
        for (int j = 0; j < kRows; ++j) {
          if (has_row(j)) *reinterpret_cast<uint16_t*>(to + j * 32 * 16) = 0;
        }
      }
    }
  }

  template <class T, class Ring>
  __device__ void take_weights(Ring& at, int k_blocks, uint8_t* taken) {
    uint32_t i = 0;
    uint32_t column = shared_.columns.list[0];
#pragma unroll 1
    for (uint32_t end = kBlockK; end <= static_cast<uint32_t>(k_blocks * kBlockK); end += kBlockK, at.next()) {
      shared_.full[at.stage].wait(at.phase);
#pragma unroll 1
      while (column < end) {
        const uint32_t next = shared_.columns.list[i + 1];
        const uint8_t* const from = ring_ + at.stage * Tile::kStageBytes + offset(column % kBlockK);
        int8_t values[kRows];
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          if (has_row(j)) values[j] = static_cast<int8_t>(from[j * 32 * 128]);
        }
        uint8_t* const to = place_of(taken, i);
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          if (has_row(j)) *reinterpret_cast<T*>(to + j * 32 * 16) = T(static_cast<float>(values[j]));
        }
        column = next;
        ++i;
      }
      release(at.stage);
    }
  }
};

}  // namespace octofuse::wgmma
