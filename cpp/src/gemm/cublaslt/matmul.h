// int8 matrix products through cuBLASLt: int32 output, or int8 output with one host factor.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>
#include <vector>

#include "octofuse/gemm.h"

namespace octofuse::cublaslt {

// out = x w^T. args.out_type is kInt32, or kInt8 with the factor in epilogue.w_scale.value. The operands' strides and
// addresses must be multiples of 16 bytes, N and ldo multiples of 4.
void matmul(const GemmArgs& args, int device, cudaStream_t stream, const Allocator& allocate);

// Measures the heuristic's algorithms for this problem and keeps the fastest.
std::vector<std::pair<int, double>> tune(const GemmArgs& args, int device, cudaStream_t stream,
                                         const Allocator& allocate);

// Uses this one of the heuristic's algorithms for the problem from now on; false if there is no such one.
bool prefer(const GemmArgs& args, int device, int algorithm);

}  // namespace octofuse::cublaslt
