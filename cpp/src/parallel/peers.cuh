// How a kernel sends to the inboxes of other ranks and reads its own: each four bytes of data lie beside the number of
// the call in one write of eight, and a reader waits until what it reads bears that number. So nothing but the data
// travels, once, and no flag has to be seen behind it.
//
// Two calls in a row use two halves of an inbox. A rank that is at its call n + 2 has the others' parts of call n + 1,
// which they sent after they had read all of call n: so the half of call n is free.
#pragma once

#include <cuda_runtime.h>

#include "octofuse/parallel.h"

namespace octofuse::peers {

struct Line {  // a unit and its call, twice
  uint64_t low, high;
};
static_assert(sizeof(Line) == 2 * kGatherUnit);

__device__ inline void send(Line* to, uint2 unit, uint32_t call) {
  const uint64_t number = static_cast<uint64_t>(call) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(number | unit.x), "l"(number | unit.y)
               : "memory");
}

__device__ inline Line received(const Line* from) {
  Line line;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(line.low), "=l"(line.high) : "l"(from) : "memory");
  return line;
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The unit that bears the number of this call; a rank that never sends it must not keep the others for ever.
__device__ inline uint2 awaited(const Line* from, uint32_t call, uint64_t limit) {
  uint64_t start = 0;
  for (uint32_t tries = 0;; ++tries) {
    const Line line = received(from);
    if (static_cast<uint32_t>(line.low >> 32) == call && static_cast<uint32_t>(line.high >> 32) == call) {
      return {static_cast<uint32_t>(line.low), static_cast<uint32_t>(line.high)};
    }
    if (tries % 1024 == 1023) {
      const uint64_t now = nanoseconds();
      if (start == 0) start = now;
      if (now - start > limit) __trap();
    }
  }
}

// One call, as a block sees it.
struct Call {
  const Peers& peers;
  uint32_t number;

  // Once earlier kernels have finished.
  __device__ explicit Call(const Peers& peers) : peers(peers), number(peers.calls[blockIdx.x] + 1) {}

  // Where rank `to` finds what rank `from` has sent.
  __device__ Line* inbox(int to, int from) const {
    const int64_t of_rank = peers.capacity / kGatherUnit;
    return static_cast<Line*>(peers.inboxes[to]) + (number % 2 * peers.ranks + from) * of_rank;
  }

  __device__ void send_to_all(int64_t at, uint2 unit) const {
    for (int r = 0; r < peers.ranks; ++r) {
      if (r != peers.rank) send(inbox(r, peers.rank) + at, unit, number);
    }
  }

  __device__ uint2 from(int rank, int64_t at) const {
    return awaited(inbox(peers.rank, rank) + at, number, peers.limit);
  }
};

// At a block's end, by all threads: they have read the counter. It writes those that no other block reads or writes.
__device__ inline void count(const Peers& peers, uint32_t number) {
  __syncthreads();
  for (uint32_t i = blockIdx.x + threadIdx.x * gridDim.x; i < kCallCounters; i += blockDim.x * gridDim.x) {
    peers.calls[i] = number;
  }
}

}  // namespace octofuse::peers
