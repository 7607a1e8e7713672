// The entry points of the CUTLASS kernels: one function per output type (sm_90a) and one for all of them (mma.sync).
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/gemm.h"

namespace octofuse {

namespace sm90 {
void run_f16(const GemmArgs& args, int device, cudaStream_t stream);
void run_bf16(const GemmArgs& args, int device, cudaStream_t stream);
void run_f32(const GemmArgs& args, int device, cudaStream_t stream);
void run_i8(const GemmArgs& args, int device, cudaStream_t stream);
void run_i32(const GemmArgs& args, int device, cudaStream_t stream);
}  // namespace sm90

namespace sm80 {
void run(int tile, const GemmArgs& args, int device, cudaStream_t stream);
}  // namespace sm80

}  // namespace octofuse
