// Many tokens in fp16 or bf16 (gemm_many_kernel.cuh).
#include "lowbit/gemm_many_of_type.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

void run(const LowbitArgs& args, const ManyShape& shape, int device, cudaStream_t stream, const Allocator& allocate) {
  const bool is_half = args.type == DType::kFloat16;
  const GemmKernel kernel = is_half ? many_kernel_of_half(args, shape) : many_kernel_of_bfloat16(args, shape);
  launch_gemm_many(args, kernel, shape, device, stream, allocate);
}

}  // namespace

GemmKernel many_kernel_of_half(const LowbitArgs& args, const ManyShape& shape) {
  return many_kernel_for<DType::kFloat16>(args, shape);
}

void run_gemm_many(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  if (has_integers(args)) return run_gemm_many_integer(args, device, stream, allocate);
  run(args, ManyShape(args.m, args.n, k_blocks_of(args.k)), device, stream, allocate);
}

void run_gemm_split(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  run(args, ManyShape::split(args.m, args.n, k_blocks_of(args.k)), device, stream, allocate);
}

}  // namespace octofuse::lowbit
