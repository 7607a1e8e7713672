// Many tokens in fp16 or bf16 (gemm_many_kernel.cuh).
#include "lowbit/gemm_many_of_type.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

ManyShape shape_of(const LowbitArgs& args, bool splits_k) {
  return {args.m, args.n, k_blocks_of(args.k), tile_set_of(args.format, args.bits), splits_k};
}

}  // namespace

GemmKernel many_kernel_of_half(const LowbitArgs& args, const ManyShape& shape) {
  return many_kernel_for<DType::kFloat16, false>(args, shape);
}

void run_gemm_many(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  if (has_integers(args)) return run_gemm_many_integer(args, device, stream, allocate);
  const ManyShape shape = shape_of(args, false);
  const auto kernel_of_type = args.type == DType::kFloat16 ? many_kernel_of_half : many_kernel_of_bfloat16;
  launch_gemm_many(args, kernel_of_type(args, shape), shape, device, stream, allocate);
}

void run_gemm_split(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  const ManyShape shape = shape_of(args, true);
  const auto kernel_of_type = args.type == DType::kFloat16 ? split_kernel_of_half : split_kernel_of_bfloat16;
  launch_gemm_many(args, kernel_of_type(args, shape), shape, device, stream, allocate);
}

}  // namespace octofuse::lowbit
