// The textbook kernel: 16x16 tiles through shared memory, one thread an output, one fused epilogue.
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/gemm.h"

namespace octofuse {

void run_naive(const GemmArgs& args, cudaStream_t stream);

}  // namespace octofuse
