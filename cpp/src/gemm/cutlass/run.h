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
// x and w in COL32: ldx and ldw are 32 * M and 32 * N, and K a multiple of 32.
void run_col32(const GemmArgs& args, int device, cudaStream_t stream);
}  // namespace sm80

}  // namespace octofuse
