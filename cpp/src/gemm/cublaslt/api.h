// libcublasLt, loaded at run time: the module then imports anywhere, and uses the very library that torch has loaded.
#pragma once

#include <cublasLt.h>

#include <string>

namespace octofuse::cublaslt {

struct Api {
  // clang-format off
#define OCTOFUSE_CUBLASLT_FUNCTIONS(F) \
  F(cublasLtCreate) \
  F(cublasLtGetVersion) \
  F(cublasLtMatmul) \
  F(cublasLtMatmulAlgoGetHeuristic) \
  F(cublasLtMatmulDescCreate) \
  F(cublasLtMatmulDescDestroy) \
  F(cublasLtMatmulDescSetAttribute) \
  F(cublasLtMatmulPreferenceCreate) \
  F(cublasLtMatmulPreferenceDestroy) \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatrixLayoutCreate) \
  F(cublasLtMatrixLayoutDestroy) \
  F(cublasLtMatrixLayoutSetAttribute) \
  F(cublasLtMatrixTransform) \
  F(cublasLtMatrixTransformDescCreate) \
  F(cublasLtMatrixTransformDescDestroy)
// clang-format on
#define OCTOFUSE_DECLARE(name) decltype(&::name) name = nullptr;
  OCTOFUSE_CUBLASLT_FUNCTIONS(OCTOFUSE_DECLARE)
#undef OCTOFUSE_DECLARE
  std::string why_not;  // empty if loaded
  std::string path;     // the file behind it

  bool loaded() const { return why_not.empty(); }
};

// Loads on first use; never throws.
const Api& api();

// Throws RuntimeError naming the call for any other status than success.
void check(cublasStatus_t status, const char* call);

}  // namespace octofuse::cublaslt
