// The sm_90a instructions that the kernels use, where CuTe has no wrapper of the right shape.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmma's N in steps of 16 and 8, not the powers of two alone
#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include <cstdint>
#include <utility>

namespace octofuse::wgmma {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// d[64, kCols] (+)= a[64, 32] * b[kCols, 32]^T: 8-bit operands from shared memory, sums in this warpgroup's registers.
// Instructions by the type of the sums and those of a and b.
struct S32S8S8;
struct F32E4M3E4M3;
struct F32E5M2E4M3;
struct F32E4M3E5M2;

template <class Instruction>
struct SumsOf {
  using Register = float;  // CuTe's wrappers take int32 as uint32
  using Sum = float;
};
template <>
struct SumsOf<S32S8S8> {
  using Register = uint32_t;
  using Sum = int32_t;
};

template <class Instruction, int kCols>
struct Mma;

// `...`: template arguments of CuTe's wrapper, for those that have some.
#define OCTOFUSE_WGMMA_OF(Instruction, N, ...)                                                                  \
  template <>                                                                                                   \
  struct Mma<Instruction, N> {                                                                                  \
    using Register = SumsOf<Instruction>::Register;                                                             \
    template <size_t... i>                                                                                      \
    __device__ static void call(uint64_t a, uint64_t b, Register (&d)[N / 2], cute::SM90::GMMA::ScaleOut scale, \
                                std::index_sequence<i...>) {                                                    \
      cute::SM90::GMMA::MMA_64x##N##x32_##Instruction##_SS_TN __VA_ARGS__::fma(a, b, d[i]..., scale);           \
    }                                                                                                           \
    __device__ static void run(uint64_t a, uint64_t b, Register (&d)[N / 2], bool accumulate) {                 \
      using cute::SM90::GMMA::ScaleOut;                                                                         \
      call(a, b, d, accumulate ? ScaleOut::One : ScaleOut::Zero, std::make_index_sequence<N / 2>());            \
    }                                                                                                           \
  }
#define OCTOFUSE_WGMMA(N)                \
  OCTOFUSE_WGMMA_OF(S32S8S8, N);         \
  OCTOFUSE_WGMMA_OF(F32E4M3E4M3, N, <>); \
  OCTOFUSE_WGMMA_OF(F32E5M2E4M3, N, <>); \
  OCTOFUSE_WGMMA_OF(F32E4M3E5M2, N, <>)
OCTOFUSE_WGMMA(16);
OCTOFUSE_WGMMA(32);
OCTOFUSE_WGMMA(48);
OCTOFUSE_WGMMA(64);
OCTOFUSE_WGMMA(80);
OCTOFUSE_WGMMA(96);
OCTOFUSE_WGMMA(112);
OCTOFUSE_WGMMA(128);
OCTOFUSE_WGMMA(144);
OCTOFUSE_WGMMA(160);
OCTOFUSE_WGMMA(192);
OCTOFUSE_WGMMA(224);
OCTOFUSE_WGMMA(240);
OCTOFUSE_WGMMA(256);
OCTOFUSE_WGMMA_OF(F32E4M3E4M3, 56, <>);  // of int8 there is no such width
#undef OCTOFUSE_WGMMA
#undef OCTOFUSE_WGMMA_OF

// wgmma's view of a K-major operand tile whose rows are 128 bytes in TMA's 128-byte swizzle (PTX ISA, "matrix
// descriptor"): address / 16, the distance of two groups of 8 rows (1024 bytes) / 16, and the swizzle's code. A step of
// 32 bytes along K adds 2.
__device__ inline uint32_t low_descriptor(const void* tile) {
  return ((cute::cast_smem_ptr_to_uint(tile) & 0x3FFFF) >> 4) | 1U << 16;
}
__device__ inline uint64_t descriptor_of(uint32_t low) {
  return uint64_t{low} | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

// This thread's warpgroup, in a form that the compiler knows to be the same for a whole warp: descriptors derived from
// it stay in uniform registers, and wgmmas follow each other without a round trip through vector registers.
__device__ inline int warpgroup_of(int thread) { return __shfl_sync(0xFFFFFFFFU, thread / 128, 0); }
// Likewise its warp. Where a warp's one lane copies, behind warp_of() and cute::elect_one_sync(), ptxas knows that it
// is one; behind a comparison of threadIdx.x it puts a loop over lanes around every instruction of the copy engine.
__device__ inline int warp_of(int thread) { return __shfl_sync(0xFFFFFFFFU, thread / 32, 0); }

// 16 bytes of another block of the cluster, at the shared address that they have in this one.
__device__ inline int4 load_from_block(uint32_t local, uint32_t rank) {
  const uint32_t remote = cute::set_block_rank(local, rank);
  int4 v;
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(remote)
               : "memory");
  return v;
}

}  // namespace octofuse::wgmma
