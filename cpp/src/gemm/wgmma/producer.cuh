// The thread that copies a tile's operands to the ring.
#pragma once

#include "gemm/wgmma/outliers.cuh"

namespace octofuse::wgmma {

// One thread feeds the ring. The tile that reaches beyond the last token reads the tokens that exist and no more: rows
// that the copy engine has to fill with zeros cost it more than rows that it reads. What lies in the ring below them
// gives accumulators that nobody stores.
template <class Tile>
struct Producer {
  static constexpr int kTokenOffset = Tile::kSwap ? Tile::kBytesA : 0;
  static constexpr int kWeightOffset = Tile::kSwap ? 0 : Tile::kBytesA;
  const typename Tile::Args& args;
  const Place& place;
  typename Tile::Shared& shared;
  uint8_t* ring;
  const CUtensorMap& x_map;
  int m0, n0;      // m0: a row of x
  int rows;        // of x, that exist from there on
  uint32_t bytes;  // of a stage

  __device__ Producer(const typename Tile::Args& args, const Place& place, typename Tile::Shared& shared, uint8_t* ring,
                      int m0, int n0)
      : args(args),
        place(place),
        shared(shared),
        ring(ring),
        x_map(args.output.m * Tile::kRowsOfToken - m0 < Tile::kRowsOfX ? args.x_rest_map : args.x_map),
        m0(m0),
        n0(n0),
        rows(args.output.m * Tile::kRowsOfToken - m0),
        bytes(static_cast<uint32_t>(Tile::kChannels + min(Tile::kRowsOfX, rows)) * kBlockK) {}

  __device__ void load(const CUtensorMap& map, int block, int stage, int offset, int row) {
    constexpr uint64_t kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&shared.full[stage]), kNormal,
                                 ring + stage * Tile::kStageBytes + offset, block * kBlockK, row);
  }
  __device__ void load_weights(int i, int stage) {
    if (Tile::kGathered && i >= place.k_count) {
      return shared.full[stage].arrive_and_expect_tx(bytes - Tile::kChannels * kBlockK);
    }
    shared.full[stage].arrive_and_expect_tx(bytes);
    load(args.w_map, place.k_begin + i, stage, kWeightOffset, n0);
  }
  __device__ void load_tokens(int i, int stage) {
    if constexpr (Tile::kGathered) {
      const bool whole = rows >= Tile::kRowsOfX;
      const CUtensorMap& map = whole ? args.x_columns_map : args.x_columns_rest_map;
      if (i >= place.k_count) return load(map, i - place.k_count, stage, kTokenOffset, m0);
    }
    load(x_map, place.k_begin + i, stage, kTokenOffset, m0);
  }
  // Behind the wait for earlier kernels.
  __device__ int blocks() const {
    if constexpr (Tile::kGathered) return place.k_count + ColumnCount(args, Tile::Columns::kTaken).blocks;
    return place.k_count;
  }

  // Before the other warps are let go: the barriers that tell of full stages, each right in front of the copies that it
  // counts, and the first copies. Alone the whole ring is filled here: with the others at work beside it 4096 x 4096
  // took 0.4 to 0.7 us longer on an H200. In a chain what may be read before earlier kernels have finished.
  __device__ void begin() {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&args.w_map));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&x_map));
    if (!args.constant_weight) wait_for_predecessors();
    const int ahead = args.constant_weight ? place.k_count : blocks();
    for (int i = 0; i < args.stages; ++i) {
      shared.full[i].init(1);
      cutlass::arch::fence_barrier_init();
      if (i < ahead) load_weights(i, i);
      if (i < ahead && !args.constant_weight) load_tokens(i, i);
    }
  }

  // The rest of the first stages, and then all others, as stages come free.
  __device__ void go_on() {
    if (args.constant_weight) {
      wait_for_predecessors();
      const int first = min(args.stages, blocks());
      for (int i = 0; i < first; ++i) {
        if (i >= place.k_count) load_weights(i, i);
        load_tokens(i, i);
      }
    }
    launch_dependents();
    uint32_t phase = 0;
    const int end = blocks();
    for (int i = args.stages, stage = 0; i < end; ++i) {
      shared.empty[stage].wait(phase);
      load_weights(i, stage);
      load_tokens(i, stage);
      if (++stage == args.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

}  // namespace octofuse::wgmma
