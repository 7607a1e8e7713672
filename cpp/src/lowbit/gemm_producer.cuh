// What a block of gemm_kernel.cuh works on, and its producer warps, which copy that into shared memory by TMA.
#pragma once

#include "lowbit/gemm_copies.cuh"

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

// One lane copies a group's weights, its tokens, or both: to issue the copies of a stage is no short work beside its
// product, so several lanes of different warps share it.
template <class Traits>
class Producer {
  const GemmArgs& args_;
  char* ring_;
  int first_, end_;  // its stages of K

 public:
  // ring: the group's.
  __device__ Producer(const GemmArgs& args, char* ring, int group) : args_(args), ring_(ring) {
    const KRange<Traits> range(args, group, 0, Traits::kSlicesOfGroup);
    first_ = range.first * Traits::kStagesOfBlock;
    end_ = range.end * Traits::kStagesOfBlock;
  }

  __device__ void init() const { init_ring(ring_, RingPlace(args_.layout), Traits::kGroupThreads / 128); }

  // Fills every stage once with what nothing in flight writes: before earlier kernels have ended, where the weights are
  // promised to be constant. Stage by stage, so that the first one can be multiplied while the others arrive.
  __device__ void start(bool has_weights, bool has_tokens) const {
    if (!args_.constant_weight) wait_for_predecessors();
    RingPlace place(args_.layout);
#pragma unroll 1
    for (int at = first_; at < ahead(); ++at, place.next()) {
      if (has_weights) weights(at, place);
      if (has_tokens && !args_.chained) tokens(at, place);
    }
  }

  // The tokens of these stages in a chain, and then the others, as stages come free.
  __device__ void run(bool has_weights, bool has_tokens) const {
    wait_for_predecessors();
    RingPlace place(args_.layout);
    if (has_tokens && args_.chained) {
#pragma unroll 1
      for (int at = first_; at < ahead(); ++at, place.next()) tokens(at, place);
    }
    place = RingPlace(args_.layout);
#pragma unroll 1
    for (int at = ahead(); at < end_; ++at, place.next()) {
      empty_of(ring_ + place.at).wait(place.phase);
      if (has_weights) weights(at, place);
      if (has_tokens) tokens(at, place);
    }
  }

 private:
  __device__ int ahead() const { return min(end_, first_ + args_.layout.stages); }
  __device__ void weights(int at, const RingPlace& place) const {
    char* const stage = ring_ + place.at;
    copy_weights<Traits>(args_, full_of(stage), stage, at, static_cast<int>(blockIdx.x));
  }
  __device__ void tokens(int at, const RingPlace& place) const {
    copy_tokens_to<Traits>(args_, ring_ + place.at, at, first_token<Traits>(args_));
  }
};

}  // namespace octofuse::lowbit
