// The entry points of the CUTLASS kernels: sm_90a for fp16 output, mma.sync for all of them.
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/gemm.h"

namespace octofuse {

namespace sm90 {
void run(const GemmArgs& args, int device, cudaStream_t stream);
}  // namespace sm90

namespace sm80 {
void run(int tile, const GemmArgs& args, int device, cudaStream_t stream);
}  // namespace sm80

}  // namespace octofuse
