// How sums go from a block that has the first part of a tile's K to the one that has the rest.
#pragma once

#include "lowbit/gemm_args.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {

// By what blocks that share tiles hand sums over.
struct HandoverArgs {
  float4* sums;     // [block][warp][part][4 sums][lane]
  uint64_t* marks;  // [block][warp]
  uint64_t mark;    // of this call
};

// Of the warps that multiply and the one that marks: none of these kernels' numbers in device/ptx.cuh.
constexpr int kGivenBarrier = 3;

// A warp of one block writes its sums to memory, another warp marks them, and the first one's counterpart in the block
// that is Traits::kNextBlock further on waits for the mark and goes on from them. A mark is a number of 64 bits by
// chance that no other call has, so nothing has to be cleared before; the reader clears it, for a graph that runs the
// same call again.
template <class Traits>
class Handover {
  using Sum = typename Traits::Sum;
  static constexpr int kWarps = Traits::kConsumers / 32;
  static constexpr int kMeeting = Traits::kConsumers + 32;  // threads
  const HandoverArgs& args_;

 public:
  static constexpr int kBytes = Traits::kSums * Traits::kChannelParts * 4;  // of a thread

  __device__ explicit Handover(const HandoverArgs& args) : args_(args) {}

  // gives: else nothing happens. Without branches around sums, here and in take(): behind one ptxas lets all products
  // run one by one (C7515) or keeps what they need in other registers.
  __device__ void give(bool gives, const Sum (&sums)[Traits::kSums], int part = 0) const {
    float4* const to = place(own(), part);
#pragma unroll
    for (int i = 0; i < Traits::kSums; i += 4) {
      uint32_t bits[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Sum sum = sums[i + j];  // by value: registers have no addresses
        bits[j] = reinterpret_cast<const uint32_t&>(sum);
      }
      asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.cg.v4.u32 [%4], {%0, %1, %2, %3}; }"
                   :
                   : "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "l"(to + i * 8),
                     "r"(static_cast<int>(gives))
                   : "memory");
    }
    if (gives && part == Traits::kChannelParts - 1) {
      __syncwarp();  // a lane or two told the blocks that a stage is free
      asm volatile("bar.arrive %0, %1;" : : "n"(kGivenBarrier), "n"(kMeeting) : "memory");
    }
  }

  // By a warp that does not multiply, once for a block that gives: waits for its sums and marks them. Whoever marks
  // waits until they are in memory, behind all copies that the block has asked for.
  __device__ void mark() const {
    barrier_sync<kGivenBarrier, kMeeting>();
    __threadfence();
    const int warp = static_cast<int>(threadIdx.x) % 32;
    uint64_t* const to = args_.marks + static_cast<int>(blockIdx.x) * kWarps + warp;
    if (warp < kWarps) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(args_.mark) : "memory");
  }

  // takes: else sums stay as they are.
  __device__ void take(bool takes, Sum (&sums)[Traits::kSums], int part = 0) const {
    const int giver = own() - Traits::kNextBlock * kWarps;
    if (takes && part == 0) wait_for(args_.marks + giver);
    const float4* const from = place(giver, part);
#pragma unroll
    for (int i = 0; i < Traits::kSums; i += 4)
      load_if(takes, from + i * 8, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }

 private:
  // A warp's place among all.
  __device__ static int own() { return static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32; }
  __device__ float4* place(int warp, int part) const {
    return args_.sums + (int64_t{warp} * Traits::kChannelParts + part) * (Traits::kSums * 8) + threadIdx.x % 32;
  }
  __device__ void wait_for(uint64_t* mark) const {
    uint64_t seen;
    do {  // all lanes leave together: else ptxas keeps what products need in other registers
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(mark) : "memory");
    } while (__any_sync(0xFFFFFFFFU, seen != args_.mark));
    if (threadIdx.x % 32 == 0) *mark = 0;
  }
  __device__ static void load_if(bool p, const float4* from, float& a, float& b, float& c, float& d) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4]; }"
                 : "+f"(a), "+f"(b), "+f"(c), "+f"(d)
                 : "l"(from), "r"(static_cast<int>(p))
                 : "memory");
  }
  __device__ static void load_if(bool p, const float4* from, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
                 : "l"(from), "r"(static_cast<int>(p))
                 : "memory");
  }
};

}  // namespace octofuse::lowbit
