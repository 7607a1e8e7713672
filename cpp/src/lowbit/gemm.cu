// More than 4 tokens in fp16 or bf16 (gemm_kernel.cuh).
#include "lowbit/gemm_kernel.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

GemmKernel kernel_for(const LowbitArgs& args, const GemmShape& shape) {
  GemmKernel kernel{};
  with_format(args, [&](auto format) {
    using Format = decltype(format);
    constexpr auto kFormat = Format::kFormat;
    constexpr int kBits = Format::kBits;
    with_shape<has_every_block(kFormat, kBits)>(shape, [&](auto tokens, auto channels) {
      kernel = args.type == DType::kFloat16
                   ? gemm_kernel_of<GemmTraits<kFormat, kBits, DType::kFloat16, tokens.value, channels.value>>()
                   : gemm_kernel_of<GemmTraits<kFormat, kBits, DType::kBFloat16, tokens.value, channels.value>>();
    });
  });
  return kernel;
}

}  // namespace

void run_gemm(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  if (has_integers(args)) return run_gemm_integer(args, device, stream, allocate);
  if (streams(problem_of(args))) return run_gemm_stream(args, device, stream, allocate);
  const GemmShape shape(problem_of(args));
  launch_gemm(args, kernel_for(args, shape), shape.split, device, stream);
}

}  // namespace octofuse::lowbit
