// LLM.int8() of many tokens: a weight's columns that are multiplied by outliers of x are taken out of the ring as they
// pass, by a warp that does nothing else. In memory their bytes lie K apart, and an SM gets no more than one of them in
// some five cycles (cpp/README.md).
#pragma once

#include <climits>

#include "device/wgmma.cuh"
#include "epilogue/formula.cuh"
#include "gemm/wgmma/launch.h"

namespace octofuse::wgmma {

// What that warp hands to those that multiply: kTaken columns at most of kChannels channels, [columns / 16][channels]
// [16], and the scales of kTokens tokens; of one tile at a time.
template <int kTokens_, int kChannels, int kTaken_>
struct Columns {
  static constexpr int kTokens = kTokens_;
  static constexpr int kTaken = kTaken_;
  static_assert(kTaken % 16 == 0 && kTaken <= kMostGathered);
  alignas(128) uint8_t taken[kTaken * kChannels];
  alignas(16) float scales[kTokens];  // of x
  uint32_t list[kTaken + 1];          // the last one is behind all columns
  // Two warpgroups take turns, and with a short K one may wait for its tile before the other's has been taken: a
  // barrier's phase would not tell these two apart, so each turn has its own.
  EmptyBarrier full[2];
  EmptyBarrier empty;

  // readers: warps that multiply a tile.
  __device__ void init(int readers) {
    full[0].init(32);
    full[1].init(32);
    empty.init(static_cast<uint32_t>(readers));
  }
  __device__ void wait_full(int tile) { full[tile % 2].wait(static_cast<uint32_t>(tile / 2) & 1); }
  __device__ void wait_empty(int tile) { empty.wait((static_cast<uint32_t>(tile) & 1) ^ 1); }

  // Where the column-th one lies of a channel's 16 bytes, and these of its step: a lane's four columns of an operand of
  // mma are one word.
  __device__ static uint32_t offset(uint32_t column, uint32_t channel) {
    return (column / 16 * kChannels + channel) * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
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
    if (count_.taken > 0) {
      shared_.columns.wait_empty(tile);
      for (int i = lane_; i < Tile::Columns::kTokens; i += 32) {
        shared_.columns.scales[i] = scale_at(args_.epilogue.x_scale, min(m0 + i, args_.output.m - 1));
      }
    }
    take_weights(at, k_blocks);
    shared_.columns.full[tile % 2].arrive();
    for (int block = 0; block < count_.blocks; ++block, at.next()) {  // of x
      shared_.full[at.stage].wait(at.phase);
      release(at.stage);
    }
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
  // Of this lane's first channel; its others lie 32 * 16 bytes further each.
  __device__ uint8_t* place_of(uint32_t column) const {
    return shared_.columns.taken + Tile::Columns::offset(column, static_cast<uint32_t>(lane_));
  }

  // Zeros behind the last column, up to a whole step of a product.
  __device__ void fill_up() {
    for (auto i = static_cast<uint32_t>(count_.taken); i % 16 != 0; ++i) {
      uint8_t* const to = place_of(i);
      for (int j = 0; j < kRows; ++j) {
        if (has_row(j)) to[j * 32 * 16] = 0;
      }
    }
  }

  template <class Ring>
  __device__ void take_weights(Ring& at, int k_blocks) {
    uint32_t i = 0;
    uint32_t column = shared_.columns.list[0];
#pragma unroll 1
    for (uint32_t end = kBlockK; end <= static_cast<uint32_t>(k_blocks * kBlockK); end += kBlockK, at.next()) {
      shared_.full[at.stage].wait(at.phase);
#pragma unroll 1
      while (column < end) {
        const uint32_t next = shared_.columns.list[i + 1];
        const uint8_t* const from = ring_ + at.stage * Tile::kStageBytes + offset(column % kBlockK);
        uint8_t bytes[kRows];
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          if (has_row(j)) bytes[j] = from[j * 32 * 128];
        }
        uint8_t* const to = place_of(i);
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          if (has_row(j)) to[j * 32 * 16] = bytes[j];
        }
        column = next;
        ++i;
      }
      release(at.stage);
    }
  }
};

}  // namespace octofuse::wgmma
