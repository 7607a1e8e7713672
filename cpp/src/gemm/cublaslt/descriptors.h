// Ownership of cublasLt's opaque types.
#pragma once

#include <memory>
#include <type_traits>

#include "gemm/cublaslt/api.h"

namespace octofuse::cublaslt {

template <auto kDestroy>
struct Destroy {
  template <class T>
  void operator()(T* object) const {
    (api().*kDestroy)(object);
  }
};

using MatmulDesc =
    std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>, Destroy<&Api::cublasLtMatmulDescDestroy>>;
using MatrixLayout =
    std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>, Destroy<&Api::cublasLtMatrixLayoutDestroy>>;
using MatmulPreference =
    std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, Destroy<&Api::cublasLtMatmulPreferenceDestroy>>;

using TransformDesc = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixTransformDesc_t>,
                                      Destroy<&Api::cublasLtMatrixTransformDescDestroy>>;

// float8 operands, fp32 output; `fast`: the tensor cores keep the sums.
inline MatmulDesc make_float8_desc(bool fast) {
  cublasLtMatmulDesc_t desc = nullptr;
  check(api().cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  MatmulDesc made(desc);
  const int8_t value = fast ? 1 : 0;
  check(api().cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &value, sizeof(value)),
        "cublasLtMatmulDescSetAttribute");
  return made;
}

// int8 operands; `raw`: int32 output, else int8 with an fp32 factor.
inline MatmulDesc make_matmul_desc(bool raw) {
  cublasLtMatmulDesc_t desc = nullptr;
  check(api().cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32I, raw ? CUDA_R_32I : CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  return MatmulDesc(desc);
}

// CUBLASLT_MATMUL_DESC_TRANSA or _TRANSB.
inline void transpose(std::remove_pointer_t<cublasLtMatmulDesc_t>& desc, cublasLtMatmulDescAttributes_t operand) {
  const cublasOperation_t operation = CUBLAS_OP_T;
  check(api().cublasLtMatmulDescSetAttribute(&desc, operand, &operation, sizeof(operation)),
        "cublasLtMatmulDescSetAttribute");
}

// Column-major, as the library's default, or in another order.
inline MatrixLayout make_layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld,
                                cublasLtOrder_t order = CUBLASLT_ORDER_COL) {
  cublasLtMatrixLayout_t raw = nullptr;
  check(api().cublasLtMatrixLayoutCreate(&raw, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld),
        "cublasLtMatrixLayoutCreate");
  MatrixLayout layout(raw);
  if (order != CUBLASLT_ORDER_COL) {
    check(api().cublasLtMatrixLayoutSetAttribute(raw, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof(order)),
          "cublasLtMatrixLayoutSetAttribute");
  }
  return layout;
}

inline MatmulPreference make_preference(size_t workspace) {
  cublasLtMatmulPreference_t raw = nullptr;
  check(api().cublasLtMatmulPreferenceCreate(&raw), "cublasLtMatmulPreferenceCreate");
  MatmulPreference preference(raw);
  check(api().cublasLtMatmulPreferenceSetAttribute(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                   sizeof(workspace)),
        "cublasLtMatmulPreferenceSetAttribute");
  return preference;
}

}  // namespace octofuse::cublaslt
