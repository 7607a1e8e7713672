// Ownership of cublasLt's opaque types.
#pragma once

#include <memory>
#include <type_traits>

#include "cublaslt/api.h"

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

inline MatmulDesc make_matmul_desc(cublasComputeType_t compute, cudaDataType_t scale, bool transpose_a) {
  cublasLtMatmulDesc_t raw = nullptr;
  check(api().cublasLtMatmulDescCreate(&raw, compute, scale), "cublasLtMatmulDescCreate");
  MatmulDesc desc(raw);
  const cublasOperation_t operation = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  check(api().cublasLtMatmulDescSetAttribute(raw, CUBLASLT_MATMUL_DESC_TRANSA, &operation, sizeof(operation)),
        "cublasLtMatmulDescSetAttribute");
  return desc;
}

// Column-major, as the library's default.
inline MatrixLayout make_layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld) {
  cublasLtMatrixLayout_t raw = nullptr;
  check(api().cublasLtMatrixLayoutCreate(&raw, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld),
        "cublasLtMatrixLayoutCreate");
  return MatrixLayout(raw);
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
