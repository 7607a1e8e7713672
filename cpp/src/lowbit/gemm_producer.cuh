// What a block of gemm_kernel.cuh works on, and its producer warps, which copy that into shared memory by TMA.
#pragma once

#include "device/chain.cuh"
#include "lowbit/gemm_args.cuh"

namespace octofuse::lowbit {

// The first token of a block. The last block starts early enough to be full, so it may repeat tokens of the one before,
// and both write the same bits: TMA takes longer over rows outside x than over rows that exist.
template <class Traits>
__device__ int first_token(const GemmArgs& args) {
  return max(0, min(static_cast<int>(blockIdx.z) * Traits::kTokens, args.m - Traits::kTokens));
}

// The k-blocks of `count` neighbouring K slices of a group, from its slice `slice` on.
template <class Traits>
struct KRange {
  int first, end;

  __device__ KRange(const GemmArgs& args, int group, int slice, int count) {
    const int at = static_cast<int>(blockIdx.y) * Traits::kSlices + group * Traits::kSlicesOfGroup + slice;
    first = start_of(args, at);
    end = start_of(args, at + count);
  }

 private:
  __device__ static int start_of(const GemmArgs& args, int slice) {
    return slice * args.slice_blocks + min(slice, args.longer_slices);
  }
};

// One lane copies a group's weights, its tokens, or both: to issue the copies of a k-block is no short work beside its
// product, so several lanes of different warps share it.
template <class Traits>
class Producer {
  const GemmArgs& args_;
  Barriers& barriers_;
  char* ring_;
  const KRange<Traits> range_;
  int first_slot_, stages_, stage_, tile_, block_;
  uint32_t bytes_;  // of a k-block

 public:
  __device__ Producer(const GemmArgs& args, Barriers& barriers, char* ring, int group)
      : args_(args),
        barriers_(barriers),
        ring_(ring),
        range_(args, group, 0, Traits::kSlicesOfGroup),
        first_slot_(group * args.layout.stages),
        stages_(args.layout.stages),
        stage_(args.layout.stage),
        tile_(args.layout.tile / 8),
        block_(static_cast<int>(blockIdx.x)) {
    const int scales = args.groups.segments * Traits::kChannels;
    bytes_ = static_cast<uint32_t>(Traits::kRuns * args.tokens_read * kTokenRun + Traits::kRowTiles * args.layout.tile +
                                   (args.has_scales ? args.planes * scales * 2 : 0) + (args.has_zeros ? scales : 0));
  }

  __device__ void init() const {
#pragma unroll 1
    for (int i = 0; i < stages_; ++i) {
      barriers_.full[first_slot_ + i].init(1);
      barriers_.empty[first_slot_ + i].init(Traits::kGroupThreads);
    }
    cutlass::arch::fence_barrier_init();
  }

  // Fills every stage once with what nothing in flight writes: before earlier kernels have ended, where the weights are
  // promised to be constant. K-block by k-block, so that the first one can be multiplied while the others arrive.
  __device__ void start(bool weights, bool tokens) const {
    if (!args_.constant_weight) wait_for_predecessors();
    int slot = first_slot_;
#pragma unroll 1
    for (int k_block = range_.first; k_block < ahead(); ++k_block, ++slot) {
      if (weights) copy_weights(k_block, slot);
      if (tokens && !args_.chained) copy_tokens(k_block, slot);
    }
  }

  // The tokens of these stages in a chain, and then the other k-blocks, as stages come free.
  __device__ void run(bool weights, bool tokens) const {
    wait_for_predecessors();
    int slot = first_slot_;
    if (tokens && args_.chained) {
#pragma unroll 1
      for (int k_block = range_.first; k_block < ahead(); ++k_block) copy_tokens(k_block, slot++);
    }
    slot = first_slot_;
    uint32_t phase = 0;  // of the round in which the stage was last filled
#pragma unroll 1
    for (int k_block = range_.first + stages_; k_block < range_.end; ++k_block) {
      barriers_.empty[slot].wait(phase);
      if (weights) copy_weights(k_block, slot);
      if (tokens) copy_tokens(k_block, slot);
      if (++slot < first_slot_ + stages_) continue;
      slot = first_slot_;
      phase ^= 1;
    }
  }

 private:
  __device__ int ahead() const { return min(range_.end, range_.first + stages_); }

  __device__ void copy(const CUtensorMap& map, int slot, int offset, int column, int row) const {
    constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&barriers_.full[slot]), kNormal,
                                 ring_ + slot * stage_ + offset, column, row);
  }

  __device__ void copy_weights(int k_block, int slot) const {
    barriers_.full[slot].arrive_and_expect_tx(bytes_);
    copy(args_.codes, slot, args_.layout.codes, k_block * tile_, block_ * Traits::kRowTiles);
    const int group = args_.groups.of(k_block, 0);
    if (args_.has_scales)
      copy(args_.scales, slot, args_.layout.scales, block_ * Traits::kChannels, group * args_.planes);
    if (args_.has_zeros) copy(args_.zeros, slot, args_.layout.zeros, block_ * Traits::kChannels, group);
  }

  __device__ void copy_tokens(int k_block, int slot) const {
    const int token = first_token<Traits>(args_);
#pragma unroll
    for (int run = 0; run < Traits::kRuns; ++run) {
      copy(args_.x, slot, run * Traits::kTokenBytes, k_block * kBlockK + run * (kBlockK / Traits::kRuns), token);
    }
  }
};

}  // namespace octofuse::lowbit
