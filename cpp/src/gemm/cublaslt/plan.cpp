#include "gemm/cublaslt/plan.h"

#include <array>
#include <mutex>

namespace octofuse::cublaslt {

constexpr int kMaxAlgorithms = 16;

cublasLtHandle_t handle_for(int device) {
  static std::array<cublasLtHandle_t, 64> handles{};
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles.at(static_cast<size_t>(device));
  if (handle == nullptr) check(api().cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

cublasStatus_t find_algorithms(Plan& plan, int device) {
  const MatmulPreference preference = make_preference(kMaxWorkspace);
  plan.algorithms.resize(kMaxAlgorithms);
  int found = 0;
  const cublasStatus_t status = api().cublasLtMatmulAlgoGetHeuristic(
      handle_for(device), plan.desc.get(), plan.a.get(), plan.b.get(), plan.d.get(), plan.d.get(), preference.get(),
      kMaxAlgorithms, plan.algorithms.data(), &found);
  plan.algorithms.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<size_t>(found) : 0);
  return status;
}

void launch(const Plan& plan, size_t algorithm, float factor, const void* a, const void* b, void* d, void* workspace,
            int device, cudaStream_t stream) {
  const int32_t one = 1;
  const int32_t zero = 0;
  const float float_zero = 0.0F;
  const void* alpha = plan.raw ? static_cast<const void*>(&one) : &factor;
  const void* beta = plan.raw ? static_cast<const void*>(&zero) : &float_zero;
  const cublasLtMatmulHeuristicResult_t& choice = plan.algorithms.at(algorithm);
  check(api().cublasLtMatmul(handle_for(device), plan.desc.get(), alpha, a, plan.a.get(), b, plan.b.get(), beta, d,
                             plan.d.get(), d, plan.d.get(), &choice.algo, workspace, choice.workspaceSize, stream),
        "cublasLtMatmul");
}

}  // namespace octofuse::cublaslt
