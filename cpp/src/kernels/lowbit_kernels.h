// The engines of lowbit.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

// lowbit_gemv.cu: up to 4 tokens that fit into an SM's shared memory beside the stream of weights.
bool takes_gemv(const LowbitArgs& args);
void run_gemv(const LowbitArgs& args, int device, cudaStream_t stream);

// Any number of tokens, 64 at a time, the codes read again for each.
// lowbit_wgmma.cu: sm_90a. lowbit_gemm.cu: mma.sync.
size_t wgmma_scratch(const LowbitArgs& args);
void run_wgmma(const LowbitArgs& args, void* scratch, int device, cudaStream_t stream);
size_t gemm_scratch(const LowbitArgs& args);
void run_gemm(const LowbitArgs& args, void* scratch, int device, cudaStream_t stream);

}  // namespace octofuse::lowbit
