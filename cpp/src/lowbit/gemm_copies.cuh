// What producers copy into a stage, by TMA.
#pragma once

#include "device/chain.cuh"
#include "lowbit/gemm_ring.cuh"

namespace octofuse::lowbit {

__device__ inline void copy_box(const CUtensorMap& map, FullBarrier& full, char* to, int column, int row) {
  constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kNormal, to, column, row);
}

// A tile's weights of stage `at` of K. full: the barrier that counts their bytes.
template <class Traits>
__device__ inline void copy_weights(const GemmArgs& args, FullBarrier& full, char* to, int at, int channel_tile) {
  constexpr int kStages = Traits::kStagesOfBlock;
  const StageLayout& layout = args.layout;
  const bool begins = at % kStages == 0;  // a k-block
  const bool has_codes = begins || Traits::kCodesByRun;
  const bool has_groups = begins || args.groups.segments > 1;  // else the consumers keep what they read
  const bool has_scales = args.has_scales && has_groups;
  const bool has_zeros = args.has_zeros && has_groups;
  const int scales = args.groups.segments * Traits::kChannels;
  full.arrive_and_expect_tx(static_cast<uint32_t>((has_codes ? Traits::kRowTiles * layout.tile : 0) +
                                                  (has_scales ? args.planes * scales * 2 : 0) +
                                                  (has_zeros ? scales : 0)));
  const int channel = channel_tile * Traits::kChannels;
  const int group = args.groups.of(at / kStages, 0);
  const int column = (Traits::kCodesByRun ? at : at / kStages) * (layout.tile / 8);
  if (has_codes) copy_box(args.codes, full, to + layout.codes, column, channel_tile * Traits::kRowTiles);
  if (has_scales) copy_box(args.scales, full, to + layout.scales, channel, group * args.planes);
  if (has_zeros) copy_box(args.zeros, full, to + layout.zeros, channel, group);
}

// Tokens of stage `at` of K, from `token` on.
template <class Traits>
__device__ inline void copy_tokens_to(const GemmArgs& args, char* stage, int at, int token) {
  constexpr int kRuns = Traits::kRuns / Traits::kStagesOfBlock;
  FullBarrier& full = full_of(stage);
  full.arrive_and_expect_tx(static_cast<uint32_t>(kRuns * args.tokens_read * kTokenRun));
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    const int column = (at * kRuns + run) * (kBlockK / Traits::kRuns);
    copy_box(args.x, full, stage + run * Traits::kTokenBytes, column, token);
  }
}

}  // namespace octofuse::lowbit
