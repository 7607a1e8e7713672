// The kernels behind lowbit_linear(); select.cpp says which of them takes a call.
#pragma once

#include <cuda_runtime_api.h>

#include "lowbit/norm.h"
#include "octofuse/gemm.h"
#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

// One token against uniform codes of up to 3 bits, or up to 4 planes: the same bits as run_gemv_int8, in less time.
// norm: in front of the token, or none.
void run_gemv_binary(const LowbitArgs& args, const NormArgs& norm, int device, cudaStream_t stream);

// Up to 4 tokens. Of 2 to 4 run_gemv_several() takes some.
void run_gemv_int8(const LowbitArgs& args, const NormArgs& norm, int device, cudaStream_t stream);

// 3 to 8 beside uniform codes, 2 to 4 beside a codebook's, without a norm or a gate; rows of x start at multiples of 8
// elements. The same bits.
void run_gemv_several(const LowbitArgs& args, int device, cudaStream_t stream);

// sm_90a: up to kMostGemmTokens, whose rows start at multiples of 16 bytes. Of those that streams() says
// run_gemm_stream() takes over.
void run_gemm(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate);
void run_gemm_stream(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate);

// sm_90a: any number of tokens, made for more than 64; rows likewise. The sums are in another order than run_gemm's.
void run_gemm_many(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate);

// The same by pairs of blocks that divide K: again another order. Not of integers.
void run_gemm_split(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate);

// Both for tokens in int8 beside weights that are integers (has_integers()): sums are exact.
void run_gemm_integer(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate);
void run_gemm_many_integer(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate);

// A number that no other call has, by which blocks of one launch know each other's sums. Not 0.
uint64_t next_mark();

}  // namespace octofuse::lowbit
