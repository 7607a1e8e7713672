// A ring of stages, each a k-block's tokens and weights or those of half of one, as both sides go through it. gemm_many
// has one where enough stages fit (ManyTraits), else a ring of weights and one of tokens (TwoRings in
// gemm_many_products.cuh).
#pragma once

#include "lowbit/gemm_args.cuh"

namespace octofuse::lowbit {

// A stage's barriers stand in the 16 bytes in front of it, so that one number, which grows from stage to stage, finds
// all of it: a k-block of 4 bits takes 75 instructions of a warp, with two rings, found by slots, 87. (With one barrier
// for weights and one for tokens it takes 88, and tiles 1 to 13 % longer.)
__device__ inline FullBarrier& full_of(char* stage) { return *reinterpret_cast<FullBarrier*>(stage - 16); }
__device__ inline EmptyBarrier& empty_of(char* stage) { return *reinterpret_cast<EmptyBarrier*>(stage - 8); }

// A place in the ring, in bytes from its first stage on, and the phase of its barriers.
struct RingPlace {
  int end, stage, at = 0;
  uint32_t phase = 0;

  __device__ explicit RingPlace(const StageLayout& layout) : end(layout.stages * layout.stage), stage(layout.stage) {}

  __device__ void next() {
    at = at + stage < end ? at + stage : 0;
    phase ^= at == 0 ? 1U : 0U;
  }
};

// consumers: arrivals that empty a stage.
__device__ inline void init_ring(char* ring, RingPlace place, uint32_t consumers) {
#pragma unroll 1
  for (; place.phase == 0; place.next()) {
    full_of(ring + place.at).init(2);  // who copies weights, and who copies tokens
    empty_of(ring + place.at).init(consumers);
  }
  cutlass::arch::fence_barrier_init();
}

// A way through a ring whose barriers stand elsewhere, by the number of a stage.
struct RingPosition {
  int end, slot = 0;
  uint32_t phase = 0;

  __device__ explicit RingPosition(int stages) : end(stages) {}

  __device__ void next() {
    slot = slot + 1 < end ? slot + 1 : 0;
    phase ^= slot == 0 ? 1U : 0U;
  }
};

// A consumer's way. A stage is a number of bytes from the first one on.
template <class Traits>
class OneRing {
  char* ring_;
  RingPlace place_;

 public:
  __device__ OneRing(char* ring, const StageLayout& layout) : ring_(ring), place_(layout) {}

  // The next stage, once it is full.
  __device__ int take() {
    const int stage = place_.at;
    full_of(ring_ + stage).wait(place_.phase);
    place_.next();
    return stage;
  }
  __device__ const char* memory(int stage) const { return ring_ + stage; }
  __device__ uint64_t tokens(int stage) const {
    return wgmma::descriptor_of(wgmma::low_descriptor(ring_) + static_cast<uint32_t>(stage) / 16);
  }
  // Behind the stage's products: to start these, all warps of the warpgroup had read their codes. So one thread of a
  // warpgroup tells each block that writes to the stage. -1: none. Predicated: behind a branch ptxas takes nothing for
  // the same in all threads, and moves descriptors from vector registers.
  __device__ void release(int stage) const {
    const uint32_t thread = threadIdx.x % 128;
    const int tells = stage >= 0 && thread < Traits::kWriters ? 1 : 0;
    const uint32_t barrier = shared_address(ring_ + stage - 8);
    if constexpr (Traits::kWriters == 1) {
      asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
                   :
                   : "r"(barrier), "r"(tells)
                   : "memory");
    } else {
      asm volatile(
          "{ .reg .pred p; .reg .b32 remote; setp.ne.s32 p, %1, 0; mapa.shared::cluster.u32 remote, %0, %2;"
          "  @p mbarrier.arrive.shared::cluster.b64 _, [remote]; }"
          :
          : "r"(barrier), "r"(tells), "r"(thread % Traits::kWriters)
          : "memory");
    }
  }
};

}  // namespace octofuse::lowbit
