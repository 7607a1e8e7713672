// The engines of lowbit.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

// lowbit_gemv_bits.cu: one token against codes of up to 3 bits, and planes; the bits of lowbit_gemv.cu, sooner.
bool takes_gemv_bits(const LowbitArgs& args, int device);
void run_gemv_bits(const LowbitArgs& args, int device, cudaStream_t stream);

// lowbit_gemv.cu: up to 4 tokens that fit into an SM's shared memory beside the stream of weights.
bool takes_gemv(const LowbitArgs& args, int device);
void run_gemv(const LowbitArgs& args, int device, cudaStream_t stream);

// lowbit_gemm.cu, sm_90a: any number of tokens whose rows, and those of the scales, TMA can read.
bool takes_gemm(const LowbitArgs& args);
void run_gemm(const LowbitArgs& args, int device, cudaStream_t stream);

}  // namespace octofuse::lowbit
