// Values on their way between blocks of one kernel: each 4 bytes travel with a tag, in one 8-byte word of global
// memory, so that a reader knows from the word itself that it is the one it waits for. No barrier, no fence, no
// counter.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octofuse::messages {

__device__ inline void send(uint64_t* to, uint32_t value, uint32_t tag) {
  const uint64_t word = static_cast<uint64_t>(tag) << 32 | value;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(word) : "memory");
}

__device__ inline bool look(const uint64_t* from, uint32_t tag, uint32_t& first, uint32_t& second) {
  uint64_t a;
  uint64_t b;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
  first = static_cast<uint32_t>(a);
  second = static_cast<uint32_t>(b);
  return static_cast<uint32_t>(a >> 32) == tag && static_cast<uint32_t>(b >> 32) == tag;
}

// Waits for four words, which start at a multiple of 16 bytes.
__device__ inline uint4 receive(const uint64_t* from, uint32_t tag) {
  uint4 values;
  bool low;
  bool high;
  do {
    low = look(from, tag, values.x, values.y);
    high = look(from + 2, tag, values.z, values.w);
  } while (!low || !high);
  return values;
}

// receive() of the first `count` of up to 3 groups of words, `stride` apart, all at once.
__device__ inline void receive_strided(const uint64_t* from, int stride, int count, uint32_t tag, uint4 (&values)[3]) {
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i >= count) break;
      const uint64_t* const at = from + i * stride;
      const bool low = look(at, tag, values[i].x, values[i].y);
      const bool high = look(at + 2, tag, values[i].z, values[i].w);
      all = all && low && high;
    }
  } while (!all);
}

__device__ inline uint32_t receive_one(const uint64_t* from, uint32_t tag) {
  uint64_t word;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  } while (static_cast<uint32_t>(word >> 32) != tag);
  return static_cast<uint32_t>(word);
}

// Each lane's value of 1 or 2 bytes, `bits`, joined with its neighbours' to words; the first lane of every four or two
// sends them. `to` is the word of this lane's value. Called by whole warps.
template <int kBytes>
__device__ inline void send_joined(uint64_t* to, uint32_t bits, uint32_t tag, bool inside) {
  constexpr int kJoined = 4 / kBytes;
#pragma unroll
  for (int step = 1; step < kJoined; step *= 2) {
    bits |= __shfl_down_sync(0xFFFFFFFFU, bits, step) << (8 * kBytes * step);
  }
  if (inside && threadIdx.x % kJoined == 0) send(to, bits, tag);
}

}  // namespace octofuse::messages
