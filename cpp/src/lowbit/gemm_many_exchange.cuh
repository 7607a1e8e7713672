// How sums go from block to block: between the two of a cluster that divide K, each of which gets the other's of the
// half of a tile's tokens that it finishes; and from a cluster that has the first part of a tile to the one that has
// the rest.
#pragma once

#include "lowbit/gemm_many_producer.cuh"

namespace octofuse::lowbit {

// Half of the tokens of a tile.
template <class Traits>
struct HalfOf : Traits {
  static constexpr int kTokens = Traits::kTokens / 2;
  static constexpr int kSums = Traits::kSums / 2;
};

// Bytes of the other block's sums.
template <class Traits>
constexpr int exchange_bytes_of() {
  return Traits::kSplitsK ? HalfOf<Traits>::kSums * Traits::kConsumers * 4 : 0;
}

template <class Traits>
class Exchange {
  using Sum = typename Traits::Sum;
  static constexpr int kSums = HalfOf<Traits>::kSums;
  ManyBarriers& barriers_;
  char* inbox_;  // [4 sums][thread]
  uint32_t rank_;
  uint32_t phase_ = 0;

 public:
  __device__ Exchange(ManyBarriers& barriers, char* inbox)
      : barriers_(barriers), inbox_(inbox), rank_(static_cast<uint32_t>(blockIdx.x % kSharing)) {}

  // Block 0 finishes the first half of the tokens, block 1 the second. own: that half's sums over all of K.
  __device__ void run(const Sum (&sums)[2 * kSums], Sum (&own)[kSums]) {
    if (threadIdx.x == 0) barriers_.sums_full.arrive_and_expect_tx(kSums * Traits::kConsumers * 4);
    barriers_.sums_empty.wait(phase_ ^ 1);
    const uint32_t other = rank_ ^ 1;
    const uint32_t to = cute::set_block_rank(shared_address(inbox_) + threadIdx.x * 16, other);
    const uint32_t barrier = cute::set_block_rank(shared_address(&barriers_.sums_full), other);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      uint32_t bits[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Sum first = sums[i + j];  // by value: registers have no addresses
        const Sum second = sums[kSums + i + j];
        own[i + j] = rank_ == 0 ? first : second;
        const Sum others = rank_ == 0 ? second : first;
        bits[j] = reinterpret_cast<const uint32_t&>(others);
      }
      send(to + i / 4 * (Traits::kConsumers * 16), bits, barrier);
    }
    barriers_.sums_full.wait(phase_);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const char* const from = inbox_ + i / 4 * (Traits::kConsumers * 16) + threadIdx.x * 16;
      const uint4 got = *reinterpret_cast<const uint4*>(from);
      const uint32_t bits[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i + j] = add(own[i + j], reinterpret_cast<const Sum&>(bits[j]));
    }
    phase_ ^= 1;
  }

  // Behind the outputs, which have taken what was read: an arrival does not wait for reads.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barriers_.sums_empty.arrive(rank_ ^ 1);
  }

 private:
  // 16 bytes to the other block, whose barrier counts them.
  __device__ static void send(uint32_t to, const uint32_t (&bits)[4], uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(to), "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "r"(barrier)
                 : "memory");
  }
};

// A warp of one cluster writes its sums to memory and marks them, the same warp of the next cluster waits for the mark
// and goes on from them. A mark is a number of 64 bits by chance that no other call has, so nothing has to be cleared
// before; the reader clears it, for a graph that runs the same call again.
template <class Traits>
class Handover {
  using Sum = typename Traits::Sum;
  static constexpr int kWarps = Traits::kConsumers / 32;
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
    __syncwarp();
    if (gives && part == Traits::kChannelParts - 1 && threadIdx.x % 32 == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(args_.marks + own()), "l"(args_.mark) : "memory");
    }
  }

  // takes: else sums stay as they are.
  __device__ void take(bool takes, Sum (&sums)[Traits::kSums], int part = 0) const {
    const int giver = own() - kSharing * kWarps;
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
    uint64_t seen = 0;
    while (seen != args_.mark) {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(mark) : "memory");
    }
    __syncwarp();
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
