// How sums go between the two blocks of a cluster that divide K: each gets the other's of the half of a tile's tokens
// that it finishes. An epilogue takes 16 tokens at a time: where a half is no multiple of that, both finish the few in
// the middle, and write the same bits.
#pragma once

#include "lowbit/gemm_many_producer.cuh"

namespace octofuse::lowbit {

constexpr int finished_tokens(int of_tile) { return (of_tile / 2 + 15) / 16 * 16; }

// The half of a tile's tokens that a block finishes: the first ones, or the last ones.
template <class Traits>
struct HalfOf : Traits {
  static constexpr int kTokens = finished_tokens(Traits::kTokens);
  static constexpr int kSums = kTokens / 2;
};

template <class Traits>
class Exchange {
  using Sum = typename Traits::Sum;
  static constexpr int kSums = HalfOf<Traits>::kSums;
  static constexpr int kSecond = Traits::kSums - kSums;  // the second half's first sum
  ManyBarriers& barriers_;
  char* inbox_;  // [4 sums][thread]
  uint32_t rank_;
  uint32_t phase_ = 0;

 public:
  __device__ Exchange(ManyBarriers& barriers, char* inbox)
      : barriers_(barriers), inbox_(inbox), rank_(static_cast<uint32_t>(blockIdx.x % kSharing)) {}

  // Block 0 finishes the first half of the tokens, block 1 the second. own: that half's sums over all of K.
  __device__ void run(const Sum (&sums)[Traits::kSums], Sum (&own)[kSums]) {
    if (threadIdx.x == 0) barriers_.sums_full.arrive_and_expect_tx(Traits::kExchange);
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
        const Sum second = sums[kSecond + i + j];
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

}  // namespace octofuse::lowbit
