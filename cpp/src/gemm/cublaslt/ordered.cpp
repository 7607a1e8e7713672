// Products and conversions in the orders that cuBLASLt knows beside its own.
//
// Here A is x [M, K] and D the output [M, N], each in the order that they are stored in. B is w^T: a w [N, K] of rows
// is K x N by columns, which the library takes as it is; in any other order it is told of N x K and transposes.
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "gemm/cublaslt/plan.h"
#include "octofuse/error.h"
#include "octofuse/layout.h"

namespace octofuse {
namespace {

using cublaslt::api;
using cublaslt::Plan;

cublasLtOrder_t order_of(const MatrixOrder& order) {
  if (order.name == "ROW") return CUBLASLT_ORDER_ROW;
  if (order.name == "COL") return CUBLASLT_ORDER_COL;
  if (order.name == "COL32") return CUBLASLT_ORDER_COL32;
  if (order.name == "COL4_4R2_8C") return CUBLASLT_ORDER_COL4_4R2_8C;
  if (order.name == "COL32_2R_4R4") return CUBLASLT_ORDER_COL32_2R_4R4;
  refuse<ValueError>("layout", "an order that cuBLASLt knows", order.name);
}

cublaslt::MatrixLayout layout_of(const MatrixOrder& order, cudaDataType_t type, int64_t rows, int64_t cols) {
  const int64_t ld = order.name == "ROW" ? cols : order.padded_rows(rows) * order.tile_cols;
  return cublaslt::make_layout(type, rows, cols, ld, order_of(order));
}

std::shared_ptr<Plan> make_plan(const OrderedGemm& gemm, int device, cublasStatus_t* status) {
  auto plan = std::make_shared<Plan>();
  const GemmArgs& args = gemm.args;
  plan->raw = args.out_type == DType::kInt32;
  plan->desc = cublaslt::make_matmul_desc(plan->raw);
  plan->a = layout_of(gemm.x, CUDA_R_8I, args.m, args.k);
  if (gemm.w.name == "ROW") {
    plan->b = cublaslt::make_layout(CUDA_R_8I, args.k, args.n, args.k);
  } else {
    plan->b = layout_of(gemm.w, CUDA_R_8I, args.n, args.k);
    cublaslt::transpose(*plan->desc, CUBLASLT_MATMUL_DESC_TRANSB);
  }
  plan->d = layout_of(gemm.out, plan->raw ? CUDA_R_32I : CUDA_R_8I, args.m, args.n);
  *status = cublaslt::find_algorithms(*plan, device);
  return plan;
}

// Plans that exist, or what the library said instead.
struct Known {
  std::shared_ptr<Plan> plan;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
};

Known known_plan(const OrderedGemm& gemm, int device) {
  using Key = std::tuple<int, int64_t, int64_t, int64_t, DType, std::string, std::string, std::string>;
  static std::map<Key, Known> plans;
  static std::mutex mutex;
  const GemmArgs& args = gemm.args;
  const std::lock_guard<std::mutex> lock(mutex);
  if (plans.size() > 1024) plans.clear();
  Known& known = plans[{device, args.m, args.n, args.k, args.out_type, gemm.x.name, gemm.w.name, gemm.out.name}];
  if (known.plan == nullptr) known.plan = make_plan(gemm, device, &known.status);
  return known;
}

}  // namespace

int cublaslt_algorithms(const OrderedGemm& gemm, int device) {
  const DeviceGuard guard(device);
  const Known known = known_plan(gemm, device);
  const auto found = static_cast<int>(known.plan->algorithms.size());
  return found > 0 ? found : -static_cast<int>(known.status);
}

void run_gemm_ordered(const OrderedGemm& gemm, int algorithm, int device, Stream stream, const Allocator& allocate) {
  const DeviceGuard guard(device);
  const std::shared_ptr<Plan> plan = known_plan(gemm, device).plan;
  const GemmArgs& args = gemm.args;
  const size_t bytes = plan->algorithms.at(static_cast<size_t>(algorithm)).workspaceSize;
  cublaslt::launch(*plan, static_cast<size_t>(algorithm), args.epilogue.w_scale.value, args.x, args.w, args.out,
                   bytes > 0 ? allocate(bytes) : nullptr, device, static_cast<cudaStream_t>(stream));
}

void convert_layout_cublaslt(const ConvertArgs& args, int device, Stream stream) {
  const DeviceGuard guard(device);
  cublasLtMatrixTransformDesc_t raw = nullptr;
  cublaslt::check(api().cublasLtMatrixTransformDescCreate(&raw, CUDA_R_32F), "cublasLtMatrixTransformDescCreate");
  const cublaslt::TransformDesc desc(raw);
  const auto rows = cublaslt::make_layout(CUDA_R_8I, args.rows, args.cols, args.ld, CUBLASLT_ORDER_ROW);
  const auto tiled = layout_of(args.order, CUDA_R_8I, args.rows, args.cols);
  const float one = 1.0F;
  const float zero = 0.0F;
  const cublasStatus_t status = api().cublasLtMatrixTransform(
      cublaslt::handle_for(device), desc.get(), &one, args.to_layout ? args.matrix : args.laid_out,
      args.to_layout ? rows.get() : tiled.get(), &zero, nullptr, nullptr, args.to_layout ? args.laid_out : args.matrix,
      args.to_layout ? tiled.get() : rows.get(), static_cast<cudaStream_t>(stream));
  if (status != CUBLAS_STATUS_SUCCESS) {
    refuse<ValueError>("engine", "one that can convert to " + args.order.name,
                       "'cublaslt': it declines (status " + std::to_string(static_cast<int>(status)) + ")");
  }
}

}  // namespace octofuse
