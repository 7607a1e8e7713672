// Instructions that CUDA C++ has no name for: asynchronous copies to shared memory, matrices from registers to it, and
// barriers of a part of a block.
#pragma once

#include <cstdint>

namespace octofuse {

constexpr uint32_t kFullWarp = 0xFFFFFFFFU;

// A number that the compiler takes to be each thread's own: one that it knows to be the same for all goes into a
// uniform register, from which every LOP3 with a literal has to move it first.
__device__ inline uint32_t own_copy(uint32_t value) {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return value + (lane >> 5);
}

// ---- cp.async ----

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory.
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}

// The same if `copies`, without a branch.
__device__ inline void copy_async_if(bool copies, uint32_t to, const void* from) {
  asm volatile("{\n.reg .pred copies;\nsetp.ne.b32 copies, %2, 0;\n@copies cp.async.cg.shared.global [%0], [%1], 16;\n}"
               :
               : "r"(to), "l"(from), "r"(static_cast<int>(copies))
               : "memory");
}

// The same through L1: for what other warps of the block ask for too.
__device__ inline void copy_async_near_if(bool copies, uint32_t to, const void* from) {
  asm volatile("{\n.reg .pred copies;\nsetp.ne.b32 copies, %2, 0;\n@copies cp.async.ca.shared.global [%0], [%1], 16;\n}"
               :
               : "r"(to), "l"(from), "r"(static_cast<int>(copies))
               : "memory");
}

// 16 bytes of which the first `bytes` are read, and the others become zero.
__device__ inline void copy_async_or_zero(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

// 4 bytes if `copies`, else zero.
__device__ inline void copy_async_four(void* to, const void* from, bool copies) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(copies ? 4 : 0)
               : "memory");
}

// Ends a group of this thread's copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of this thread's copies but those of its kPending youngest groups.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// Waits for all of this thread's copies, those of the group that is still open too.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- stmatrix ----

// Four matrices of 8 x 8 elements of 16 bits, each lane with its part of all as mma's results have it, to shared
// memory; lane i gives the address of row i % 8 of matrix i / 8, 16 bytes.
__device__ inline void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- named barriers ----

// A block has 16; number 0 is that of __syncthreads(), and CUTLASS's NamedBarrier counts from 8 on. One kernel uses one
// of these sets.
constexpr int kRowBarrier = 1;       // rows/: and the next six: the threads that share a row
constexpr int kStreamBarrier = 8;    // gemm/skinny/: the streaming warps
constexpr int kConsumerBarrier = 1;  // lowbit/gemm_kernel.cuh, gemm_stream.cuh: the warps that multiply
constexpr int kProducerBarrier = 2;  // lowbit/gemm_kernel.cuh: the warps that copy

// Waits for kThreads threads, whole warps, of which this is one. The number is an immediate: for one that is computed
// the compiler would reserve all 16 barriers.
template <int kBarrier, int kThreads>
__device__ inline void barrier_sync() {
  asm volatile("bar.sync %0, %1;" : : "n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace octofuse
