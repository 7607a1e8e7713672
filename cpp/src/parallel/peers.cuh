// How a kernel sends to the inboxes of other ranks and reads its own: each four bytes of data lie beside the number of
// the call in one write of eight, and a reader waits until what it reads bears that number. So nothing but the data
// travels, once, and no flag has to be seen behind it.
//
// A bulk gather has no room for numbers: there a flag for each span is written behind it.
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

__device__ inline void raise(uint32_t* flag, uint32_t call) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
}

// Or of the next call: who raises it for that has sent this one's data, which lie in the other half. Nobody is further.
__device__ inline void await_flag(const uint32_t* flag, uint32_t call, uint64_t limit) {
  const uint64_t start = nanoseconds();
  for (uint32_t raised = call - 1; raised - call > 1;) {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
    if (nanoseconds() - start > limit) __trap();
  }
}

__device__ inline bool bears(const Line& line, uint32_t call) {
  return static_cast<uint32_t>(line.low >> 32) == call && static_cast<uint32_t>(line.high >> 32) == call;
}

// The units that bear the number of this call, where `from` is not null; they are asked for together, since one load
// after the other would take as long as all of them. A rank that never sends must not keep the others for ever.
template <int kCount>
__device__ inline void await_all(const Line* const (&from)[kCount], uint2 (&units)[kCount], uint32_t call,
                                 uint64_t limit) {
  uint64_t start = 0;
  for (uint32_t tries = 0;; ++tries) {
    Line lines[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (from[i] != nullptr) lines[i] = received(from[i]);
    }
    bool there = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) there = there && (from[i] == nullptr || bears(lines[i], call));
    if (there) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (from[i] != nullptr) units[i] = {static_cast<uint32_t>(lines[i].low), static_cast<uint32_t>(lines[i].high)};
      }
      return;
    }
    if (tries % 1024 == 1023) {
      const uint64_t now = nanoseconds();
      if (start == 0) start = now;
      if (now - start > limit) __trap();
    }
  }
}

// The counters that a block of the call has for itself; the last block has the rest too. The blocks of a cluster, which
// lie along y, share theirs.
__device__ inline uint32_t counters_of_block() { return kCallCounters / gridDim.x; }

// One call, as a block sees it.
struct Call {
  const Peers& peers;
  uint32_t number;

  // Once earlier kernels have finished.
  __device__ explicit Call(const Peers& peers)
      : peers(peers), number(peers.calls[blockIdx.x * counters_of_block()] + 1) {}

  // Where rank `to` finds what rank `from` has sent.
  __device__ Line* inbox(int to, int from) const {
    const int64_t of_rank = peers.capacity / kGatherUnit;
    return static_cast<Line*>(peers.inboxes[to]) + (number % 2 * peers.ranks + from) * of_rank;
  }

  // The same of a bulk gather, and the flags that `from` raises there, one for each span.
  __device__ uint4* bulk(int to, int from) const {
    char* const behind = static_cast<char*>(peers.inboxes[to]) + 4 * peers.ranks * peers.capacity;
    return reinterpret_cast<uint4*>(behind + (number % 2 * peers.ranks + from) * peers.bulk);
  }
  __device__ uint32_t* flags(int to, int from) const {
    char* const behind = static_cast<char*>(peers.inboxes[to]) + 2 * peers.ranks * (2 * peers.capacity + peers.bulk);
    return reinterpret_cast<uint32_t*>(behind) + from * (peers.bulk / kBulkSpan);
  }

  __device__ void send_to_all(int64_t at, uint2 unit) const {
    for (int r = 0; r < peers.ranks; ++r) {
      if (r != peers.rank) send(inbox(r, peers.rank) + at, unit, number);
    }
  }

  template <int kCount>
  __device__ void await_all(const Line* const (&from)[kCount], uint2 (&units)[kCount]) const {
    peers::await_all(from, units, number, peers.limit);
  }
};

// At a block's end, by all threads: they have read the counter. It writes those that no other block reads or writes.
__device__ inline void count(const Peers& peers, uint32_t number) {
  __syncthreads();
  const uint32_t first = blockIdx.x * counters_of_block();
  const uint32_t end = blockIdx.x + 1 == gridDim.x ? kCallCounters : first + counters_of_block();
  for (uint32_t i = first + threadIdx.x; i < end; i += blockDim.x) peers.calls[i] = number;
}

}  // namespace octofuse::peers
