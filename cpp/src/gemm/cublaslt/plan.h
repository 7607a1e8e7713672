// A product described to cuBLASLt, with the algorithms that it offers for it.
#pragma once

#include <vector>

#include "gemm/cublaslt/descriptors.h"

namespace octofuse::cublaslt {

constexpr size_t kMaxWorkspace = 32 << 20;

struct Plan {
  MatmulDesc desc;
  MatrixLayout a, b, d;
  bool raw = true;                                          // int32 output; else int8 with a factor
  std::vector<cublasLtMatmulHeuristicResult_t> algorithms;  // best guess first
  size_t chosen = 0;
};

cublasLtHandle_t handle_for(int device);

// Fills `algorithms`; empty, with the status, where the library has none.
cublasStatus_t find_algorithms(Plan& plan, int device);

// d = a b, for int8 times `factor`.
void launch(const Plan& plan, size_t algorithm, float factor, const void* a, const void* b, void* d, void* workspace,
            int device, cudaStream_t stream);

}  // namespace octofuse::cublaslt
