// What the kernels for few tokens share: 8 warps of a block stream weights, each thread loading straight into the
// registers that it multiplies from (gemv_shared.cu: into shared memory), and a ninth, the vector warp, loads the
// tile's scales meanwhile. Measured on an H200 and left out: the ninth rehearsing the epilogue as the wgmma kernel's
// does (the others then wait for it: 0.4 us at 1 x 768 x 768), and no ninth, for the registers' sake (0.3 us slower in
// a chain at 1 x 2304 x 768).
#pragma once

#include "device/chain.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"
#include "epilogue/tile.cuh"
#include "gemm/skinny/one_token.h"
#include "octofuse/row_pass.h"

namespace octofuse::skinny {

constexpr int kStreamThreads = 32 * kStreamWarps;  // and the vector warp's first thread
constexpr int kThreads = kStreamThreads + 32;

__device__ inline void sync_streams() { barrier_sync<kStreamBarrier, kStreamThreads>(); }

struct KernelArgs {
  const int8_t* x;
  const int8_t* w;
  int64_t ldx, ldw;
  int k;
  int log_k_warps;    // how many of the streaming warps share K: a group
  int warp_channels;  // of such a group
  int log_channels;   // of a block, rounded up
  EpilogueArgs epilogue;
  TileOutput output;
  bool constant_weight;
  const float* factors = nullptr;  // of one token's outliers as digits: gemv.cu alone
};

inline KernelArgs kernel_args(const GemmArgs& args, bool chained) {
  const bool constant = chained && args.constant_weight;
  return {args.x, args.w,        args.ldx,        args.ldw, static_cast<int>(args.k), 0, 1,
          0,      args.epilogue, output_of(args), constant, args.outliers.factors};
}

// One token: int8 (type) as `gemm` has it, or in floating point, as `rows` describes it; per_token: it finds its own
// scale.
struct TokenArgs {
  KernelArgs gemm;
  DType type = DType::kInt8;
  RowPassArgs rows;
  bool per_token = false;
};

__device__ inline uint4 load_or_zero(const int8_t* address, bool inside) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (inside) v = *reinterpret_cast<const uint4*>(address);  // never __ldg: see scale_at
  return v;
}

// Weights: their lines leave L2 first (ReadOnce says why), and take none of L1. With a window of addresses instead,
// which changes L2 alone, a step of the Llama 8B took 575 us for 8 of its blocks instead of 545.
__device__ inline uint4 load_once_or_zero(const int8_t* address, bool inside) {
  uint4 v = make_uint4(0, 0, 0, 0);
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if (inside) {  // volatile: it stays behind the wait for earlier kernels
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address), "l"(policy));
  }
  return v;
}

// gemv_registers.cu: one token and few weights.
void run_registers(TokenArgs args, int device, bool chained, cudaStream_t stream);

// gemv.cu: `tile` is below kGemvTiles.
void run_gemv(int tile, KernelArgs args, int device, bool chained, cudaStream_t stream);

}  // namespace octofuse::skinny
