// Many tokens in fp16 or bf16 (gemm_many_kernel.cuh).
#include "lowbit/gemm_many_kernel.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

template <DType kType>
GemmKernel kernel_for(const LowbitArgs& args, const ManyShape& shape) {
  GemmKernel kernel{};
  with_format(args, [&](auto format) {
    using Format = decltype(format);
    const auto of = [&](auto tokens, auto channels, auto splits_k) {
      kernel = many_kernel_of<
          ManyTraits<Format::kFormat, Format::kBits, kType, tokens.value, channels.value, splits_k.value>>();
    };
    constexpr auto k128 = std::integral_constant<int, 128>();
    constexpr auto k192 = std::integral_constant<int, 192>();
    constexpr auto k256 = std::integral_constant<int, 256>();
    if (shape.splits_k) {
      constexpr std::true_type kSplit;
      if (shape.channels == 192) return of(k128, k192, kSplit);
      if (shape.tokens == 192) return of(k192, k128, kSplit);
      return of(k128, k128, kSplit);
    }
    constexpr std::false_type kWhole;
    if (shape.channels == 256) return of(k128, k256, kWhole);
    if (shape.channels == 192) return of(k128, k192, kWhole);
    if (shape.tokens == 128) return of(k128, k128, kWhole);
    if (shape.tokens == 192) return of(k192, k128, kWhole);
    of(k256, k128, kWhole);
  });
  return kernel;
}

void run(const LowbitArgs& args, const ManyShape& shape, int device, cudaStream_t stream, const Allocator& allocate) {
  const bool is_half = args.type == DType::kFloat16;
  const GemmKernel kernel =
      is_half ? kernel_for<DType::kFloat16>(args, shape) : kernel_for<DType::kBFloat16>(args, shape);
  launch_gemm_many(args, kernel, shape, device, stream, allocate);
}

}  // namespace

void run_gemm_many(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  if (has_integers(args)) return run_gemm_many_integer(args, device, stream, allocate);
  run(args, ManyShape(args.m, args.n, k_blocks_of(args.k)), device, stream, allocate);
}

void run_gemm_split(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  run(args, ManyShape::split(args.m, args.n, k_blocks_of(args.k)), device, stream, allocate);
}

}  // namespace octofuse::lowbit
