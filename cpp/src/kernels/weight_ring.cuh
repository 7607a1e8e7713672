// Weights on their way through a ring in shared memory. One thread copies slice after slice, each of them contiguous in
// global memory, as far ahead as the ring has room; the others wait for a slice, read it, and release it.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include <cstdint>

namespace octofuse::weight_ring {

constexpr int kBytes = 192 << 10;
constexpr int kPiece = 16 << 10;  // of a copy, at most
constexpr int kSlots = 8;         // slices on their way at once, at most

using Full = cutlass::arch::ClusterTransactionBarrier;
using Released = cutlass::arch::ClusterBarrier;

struct Barriers {
  uint64_t full[kSlots];
  uint64_t released[kSlots];

  __device__ void init() {
    for (int i = 0; i < kSlots; ++i) {
      Full::init(full + i, 1);
      Released::init(released + i, 1);
    }
    cutlass::arch::fence_barrier_init();
  }
};

// Slice `i` of `count` is bytes(i) bytes from source(i) on, at most kBytes, all multiples of 16.
template <class Bytes, class Source>
__device__ void produce(int count, Bytes bytes, Source source, char* ring, Barriers& barriers) {
  int tail = 0;  // the first slice that is not released
  int used = 0;
  int at = 0;
  const auto release_one = [&] {
    Released::wait(barriers.released + tail % kSlots, tail / kSlots % 2);
    used -= bytes(tail++);
  };
#pragma unroll 1
  for (int slice = 0; slice < count; ++slice) {
    if (slice - tail == kSlots) release_one();
    uint64_t* const full = barriers.full + slice % kSlots;
    const int all = bytes(slice);
    const int8_t* const from = source(slice);
    Full::arrive_and_expect_tx(full, all);
#pragma unroll 1
    for (int done = 0; done < all;) {
      const int piece = min(min(kPiece, all - done), kBytes - at);
      while (used + piece > kBytes) release_one();
      cute::SM90_BULK_COPY_G2S::copy(from + done, full, ring + at, piece);
      used += piece;
      done += piece;
      at = at + piece == kBytes ? 0 : at + piece;
    }
  }
}

// A place in the ring, or in the one that would follow it.
__device__ inline int wrapped(int at) {
  return static_cast<int>(min(static_cast<uint32_t>(at), static_cast<uint32_t>(at) - kBytes));
}

// Slice `i` is there.
__device__ inline void wait(uint32_t i, Barriers& barriers) { Full::wait(barriers.full + i % kSlots, i / kSlots % 2); }

// Called by one thread: nobody reads slice `i` any more.
__device__ inline void release(uint32_t i, Barriers& barriers) { Released::arrive(barriers.released + i % kSlots); }

}  // namespace octofuse::weight_ring
