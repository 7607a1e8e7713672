// Plan once, run many.
//
// The library thinks in column-major matrices. Our row-major out [M, N] with row stride ldo is, read by columns, the
// matrix out^T [N, M] with leading dimension ldo, and
//     out^T = w x^T.
// w [N, K] row-major is, by columns, w^T [K, N] with leading dimension ldw: the library's A, transposed (A^T = w).
// x [M, K] row-major is, by columns, x^T [K, M] with leading dimension ldx: the library's B, as it is.
// So A is the weight, B the activation, and the library's (m, n, k) are our (N, M, K). This is the only place that
// swaps.
#include "gemm/cublaslt/matmul.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "gemm/cublaslt/plan.h"
#include "octofuse/error.h"

namespace octofuse::cublaslt {
namespace {

constexpr size_t kMaxPlans = 4096;

using Key = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, DType, Arithmetic>;

Key key_of(const GemmArgs& args, int device) {
  return {device, args.m, args.n, args.k, args.ldx, args.ldw, args.ldo, args.out_type, arithmetic_of(args)};
}

cudaDataType_t operand_type(DType type) {
  return type == DType::kE4M3 ? CUDA_R_8F_E4M3 : type == DType::kE5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8I;
}

std::shared_ptr<Plan> make_plan(const GemmArgs& args, int device) {
  auto plan = std::make_shared<Plan>();
  const bool raw = plan->raw = args.out_type == DType::kInt32;
  const bool floats = is_float8(args.x_type);
  plan->desc = floats ? make_float8_desc(arithmetic_of(args) == Arithmetic::kFloat8Fast) : make_matmul_desc(raw);
  transpose(*plan->desc, CUBLASLT_MATMUL_DESC_TRANSA);
  plan->a = make_layout(operand_type(args.w_type), args.k, args.n, args.ldw);
  plan->b = make_layout(operand_type(args.x_type), args.k, args.m, args.ldx);
  plan->d = make_layout(floats ? CUDA_R_32F : raw ? CUDA_R_32I : CUDA_R_8I, args.n, args.m, args.ldo);
  const cublasStatus_t status = find_algorithms(*plan, device);
  if (plan->algorithms.empty()) {
    throw RuntimeError("cublaslt: no algorithm for M=" + std::to_string(args.m) + ", N=" + std::to_string(args.n) +
                       ", K=" + std::to_string(args.k) + " (status " + std::to_string(static_cast<int>(status)) + ")");
  }
  return plan;
}

struct PlanCache {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Plan>> plans;

  std::shared_ptr<Plan> get(const GemmArgs& args, int device) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Plan>& plan = plans[key_of(args, device)];
    if (plan == nullptr) {
      std::shared_ptr<Plan> made = make_plan(args, device);
      // A server that sees every M once must not grow for ever; planning again costs microseconds.
      if (plans.size() > kMaxPlans) plans.clear();
      return plans[key_of(args, device)] = made;
    }
    return plan;
  }
};

PlanCache& cache() {
  static PlanCache plans;
  return plans;
}

void launch(const Plan& plan, size_t algorithm, const GemmArgs& args, int device, cudaStream_t stream,
            void* workspace) {
  const float factor = is_float8(args.x_type) ? 1.0F : args.epilogue.w_scale.value;
  launch(plan, algorithm, factor, args.w, args.x, args.out, workspace, device, stream);
}

// A CUDA event that lives as long as this object, also where timing throws.
class Event {
 public:
  Event() {
    if (cudaEventCreate(&event_) != cudaSuccess) throw RuntimeError("cublaslt: cudaEventCreate failed");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

double median_time(const Plan& plan, size_t algorithm, const GemmArgs& args, int device, cudaStream_t stream,
                   void* workspace, const Event& begin, const Event& end) {
  constexpr int kRepeats = 15;
  std::vector<float> times;
  for (int i = 0; i < kRepeats + 3; ++i) {
    cudaEventRecord(begin, stream);
    launch(plan, algorithm, args, device, stream, workspace);
    cudaEventRecord(end, stream);
    if (cudaEventSynchronize(end) != cudaSuccess) throw RuntimeError("cublaslt: tuning failed on the device");
    float milliseconds = 0.0F;
    cudaEventElapsedTime(&milliseconds, begin, end);
    if (i >= 3) times.push_back(milliseconds * 1000.0F);
  }
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return static_cast<double>(times[kRepeats / 2]);
}

}  // namespace

void matmul(const GemmArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  const std::shared_ptr<Plan> plan = cache().get(args, device);
  const size_t bytes = plan->algorithms.at(plan->chosen).workspaceSize;
  launch(*plan, plan->chosen, args, device, stream, bytes > 0 ? allocate(bytes) : nullptr);
}

std::vector<std::pair<int, double>> tune(const GemmArgs& args, int device, cudaStream_t stream,
                                         const Allocator& allocate) {
  const std::shared_ptr<Plan> plan = make_plan(args, device);
  void* workspace = allocate(kMaxWorkspace);
  const Event begin;
  const Event end;
  std::vector<std::pair<int, double>> times;
  for (size_t i = 0; i < plan->algorithms.size(); ++i) {
    times.emplace_back(static_cast<int>(i), median_time(*plan, i, args, device, stream, workspace, begin, end));
    if (times.back().second < times.at(plan->chosen).second) plan->chosen = i;
  }
  const std::lock_guard<std::mutex> lock(cache().mutex);
  cache().plans[key_of(args, device)] = plan;
  return times;
}

bool prefer(const GemmArgs& args, int device, int algorithm) {
  const std::shared_ptr<Plan> plan = make_plan(args, device);
  if (algorithm < 0 || static_cast<size_t>(algorithm) >= plan->algorithms.size()) return false;
  plan->chosen = static_cast<size_t>(algorithm);
  const std::lock_guard<std::mutex> lock(cache().mutex);
  cache().plans[key_of(args, device)] = plan;
  return true;
}

}  // namespace octofuse::cublaslt
