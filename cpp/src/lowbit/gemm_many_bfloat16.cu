// The kernels of gemm_many in bf16 (gemm_many_kernel.cuh).
#include "lowbit/gemm_many_of_type.cuh"

namespace octofuse::lowbit {

GemmKernel many_kernel_of_bfloat16(const LowbitArgs& args, const ManyShape& shape) {
  return many_kernel_for<DType::kBFloat16, false>(args, shape);
}

}  // namespace octofuse::lowbit
