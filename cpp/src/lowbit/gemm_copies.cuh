// What producers copy into a stage, by TMA.
#pragma once

#include "device/chain.cuh"
#include "lowbit/gemm_ring.cuh"

namespace octofuse::lowbit {

__device__ inline void copy_box(const CUtensorMap& map, FullBarrier& full, char* to, int column, int row) {
  constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kNormal, to, column, row);
}

// A tile's weights of a k-block. full: the barrier that counts their bytes.
template <class Traits>
__device__ inline void copy_weights(const GemmArgs& args, FullBarrier& full, char* to, int k_block, int channel_tile) {
  const StageLayout& layout = args.layout;
  const int scales = args.groups.segments * Traits::kChannels;
  const int channel = channel_tile * Traits::kChannels;
  const int group = args.groups.of(k_block, 0);
  full.arrive_and_expect_tx(static_cast<uint32_t>(Traits::kRowTiles * layout.tile +
                                                  (args.has_scales ? args.planes * scales * 2 : 0) +
                                                  (args.has_zeros ? scales : 0)));
  copy_box(args.codes, full, to + layout.codes, k_block * (layout.tile / 8), channel_tile * Traits::kRowTiles);
  if (args.has_scales) copy_box(args.scales, full, to + layout.scales, channel, group * args.planes);
  if (args.has_zeros) copy_box(args.zeros, full, to + layout.zeros, channel, group);
}

// Tokens of a k-block, from `token` on, into a stage.
template <class Traits>
__device__ inline void copy_tokens_to(const GemmArgs& args, char* stage, int k_block, int token) {
  FullBarrier& full = full_of(stage);
  full.arrive_and_expect_tx(static_cast<uint32_t>(Traits::kRuns * args.tokens_read * kTokenRun));
#pragma unroll
  for (int run = 0; run < Traits::kRuns; ++run) {
    const int column = k_block * kBlockK + run * (kBlockK / Traits::kRuns);
    copy_box(args.x, full, stage + run * Traits::kTokenBytes, column, token);
  }
}

}  // namespace octofuse::lowbit
