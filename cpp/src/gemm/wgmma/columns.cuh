// LLM.int8() of many tokens: a weight's columns that are multiplied by outliers of x are taken out of the ring as they
// pass, by two warps that do nothing else. In memory their bytes lie K apart, and an SM gets no more than one of them
// in some five cycles (cpp/README.md).
#pragma once

#include <climits>

#include "device/wgmma.cuh"
#include "gemm/wgmma/launch.h"

namespace octofuse::wgmma {

constexpr int kTakers = 2;  // warps; every second stage of the ring is one's

// What these warps hand to those that multiply: of one tile kTaken columns at most of kChannels channels, in steps of
// 16, [kChannels][16] bytes each. Steps go round in their slots, so that the next tile's find room as soon as the first
// ones of this tile have been multiplied.
template <int kChannels, int kTaken_>
struct Columns {
  static constexpr int kTaken = kTaken_;
  static constexpr uint32_t kSlots = kTaken / 16;
  static_assert(kTaken % 16 == 0 && kTaken <= kMostGathered);
  alignas(128) uint8_t taken[kSlots][kChannels * 16];
  // Two warpgroups take turns, and with a short K one may wait for its tile before the other's has been taken: a
  // barrier's phase would not tell these two apart, so each turn has its own.
  EmptyBarrier full[2];
  EmptyBarrier empty[kSlots];

  // readers: threads that multiply a tile. Each tells of its own reads: that a warp has met before one of its lanes
  // tells of all, racecheck does not see.
  __device__ void init(int readers) {
    for (EmptyBarrier& barrier : full) barrier.init(32 * kTakers);
    for (EmptyBarrier& barrier : empty) barrier.init(static_cast<uint32_t>(readers));
  }
  __device__ void wait_full(int tile) { full[tile % 2].wait(static_cast<uint32_t>(tile / 2) & 1); }

  // step: of all of this block's tiles, one behind the other.
  __device__ const uint8_t* at(uint32_t step) const { return taken[step % kSlots]; }
  __device__ void release(uint32_t step) { empty[step % kSlots].arrive(); }
  __device__ void wait_empty(uint32_t step) { empty[step % kSlots].wait((step / kSlots & 1) ^ 1); }

  // Where a step's column-th byte of a channel lies: a lane's four columns of an operand of mma are one word.
  __device__ static uint32_t offset(uint32_t channel, uint32_t column) {
    return channel * 16 + column % 8 / 2 * 4 + column / 8 * 2 + column % 2;
  }
};

// Columns of a call, those of them that are taken, their steps, and the blocks in the ring in which x's follow.
struct ColumnCount {
  int all = 0, taken = 0, steps = 0, blocks = 0;

  ColumnCount() = default;

  // Behind the wait for earlier kernels.
  __device__ ColumnCount(const OutlierKernelArgs& args, int most)
      : all(*args.outliers.count),
        taken(min(all, most)),
        steps((taken + 15) / 16),
        blocks((taken + kOutlierBlock - 1) / kOutlierBlock) {}
};

template <class Tile>
class ColumnTaker {
  using Shared = typename Tile::Shared;
  static constexpr int kRows = (Tile::kChannels + 31) / 32;  // of a lane
  static constexpr int kLists = (Tile::Columns::kTaken + 31) / 32;
  const OutlierKernelArgs& args_;
  Shared& shared_;
  const uint8_t* ring_;  // its weights
  int warp_;
  uint32_t lane_;
  ColumnCount count_;
  uint32_t list_[kLists];  // a lane's columns: number lane + 32 * i. Unsigned: division by shifts alone
  uint32_t first_ = 0;     // step of the tile
  uint32_t free_ = 0;      // steps whose slots were empty

 public:
  // Behind the wait for earlier kernels. ring: the weights of its first stage. thread: of kTakers warps.
  __device__ ColumnTaker(const OutlierKernelArgs& args, Shared& shared, const uint8_t* ring, int thread)
      : args_(args),
        shared_(shared),
        ring_(ring),
        warp_(thread / 32),
        lane_(static_cast<uint32_t>(thread) % 32),
        count_(args, Tile::Columns::kTaken) {
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      const int number = thread % 32 + i * 32;
      list_[i] = number < count_.taken ? static_cast<uint32_t>(args.outliers.columns[number]) : UINT_MAX;
    }
  }

  // Those of the tile-th tile of this block of threads, k_blocks stages from the ring's position `at` on.
  template <class Ring>
  __device__ void take(Ring& at, int k_blocks, int tile) {
    // Once the tile before the last one has been multiplied: else a warp with nothing to take could tell of this tile
    // before the other one has told of that, by the same barrier.
    const auto steps = static_cast<uint32_t>(count_.steps);
    wait_for_slots(first_ + Tile::Columns::kSlots - min(steps, first_));
#pragma unroll 1
    for (int k = 0; k < k_blocks; ++k, at.next()) {
      if (at.stage % kTakers != warp_) continue;
      shared_.full[at.stage].wait(at.phase);
      take_block(static_cast<uint32_t>(k), at.stage);
    }
    wait_for_slots(first_ + steps);  // also those that the other warp alone filled
    shared_.columns.full[tile % 2].arrive();
#pragma unroll 1
    for (int block = 0; block < count_.blocks; ++block, at.next()) {  // of x
      if (at.stage % kTakers != warp_) continue;
      shared_.full[at.stage].wait(at.phase);
      release(at.stage);
    }
    first_ += steps;
  }

 private:
  // As consumers do, at every block whose producer writes to the stage.
  __device__ void release(int stage) const {
    __syncwarp();
    if (lane_ < static_cast<uint32_t>(args_.cluster)) shared_.empty[stage].arrive(lane_);
  }

  // Those of the steps before `end`, one after the other, since phases tell no more than two neighbouring uses of a
  // slot apart.
  __device__ void wait_for_slots(uint32_t end) {
    for (; free_ < end; ++free_) shared_.columns.wait_empty(free_);
  }

  // Where a byte of this lane's first row lies in rows of 128 bytes in TMA's swizzle; its other rows are 32 rows
  // further each, which the swizzle does not tell apart.
  __device__ uint32_t offset(uint32_t byte) const { return lane_ * 128 + ((byte & 0x70) ^ lane_ % 8 * 16) + byte % 16; }
  __device__ bool has_row(uint32_t j) const { return Tile::kChannels % 32 == 0 || lane_ + j * 32 < Tile::kChannels; }

  __device__ void take_block(uint32_t k, int stage) {
    uint32_t here[kLists];  // a bit for each column of the list in this block
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      here[i] = __ballot_sync(kFullWarp, list_[i] / kBlockK == k);
      any |= here[i];
    }
    if (any == 0) return release(stage);
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      uint32_t later = 0;
#pragma unroll
      for (int j = i + 1; j < kLists; ++j) later |= here[j];
#pragma unroll 1
      while (here[i] != 0) {
        const auto bit = static_cast<uint32_t>(__ffs(static_cast<int>(here[i]))) - 1;
        here[i] &= here[i] - 1;
        const uint32_t column = __shfl_sync(kFullWarp, list_[i], static_cast<int>(bit));
        take_column(stage, column % kBlockK, static_cast<uint32_t>(i) * 32 + bit, (here[i] | later) == 0);
      }
    }
  }

  // last: of its stage. It is released once the bytes have been stored, and so have come: with the arrival right behind
  // the loads sums were wrong now and then, as if it had overtaken them.
  __device__ void take_column(int stage, uint32_t byte, uint32_t number, bool last) {
    const uint8_t* const from = ring_ + stage * Tile::kStageBytes + offset(byte);
    uint8_t bytes[kRows];
#pragma unroll
    for (uint32_t j = 0; j < kRows; ++j) {
      if (has_row(j)) bytes[j] = from[j * 32 * 128];
    }
    const uint32_t step = first_ + number / 16;
    wait_for_slots(step + 1);
    uint8_t* const to = shared_.columns.taken[step % Tile::Columns::kSlots] + Tile::Columns::offset(lane_, number % 16);
#pragma unroll
    for (uint32_t j = 0; j < kRows; ++j) {
      if (has_row(j)) to[j * 32 * 16] = bytes[j];
    }
    if (last) release(stage);
  }
};

}  // namespace octofuse::wgmma
