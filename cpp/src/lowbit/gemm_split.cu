// The kernels of gemm_split in fp16 (gemm_many_kernel.cuh).
#include "lowbit/gemm_many_of_type.cuh"

namespace octofuse::lowbit {

GemmKernel split_kernel_of_half(const LowbitArgs& args, const ManyShape& shape) {
  return many_kernel_for<DType::kFloat16, true>(args, shape);
}

}  // namespace octofuse::lowbit
