// gemm_many's and gemm_split's kernels of one type, each in a file of its own: they take minutes to compile.
#pragma once

#include "lowbit/gemm_many_kernel.cuh"

namespace octofuse::lowbit {

GemmKernel many_kernel_of_half(const LowbitArgs& args, const ManyShape& shape);
GemmKernel many_kernel_of_bfloat16(const LowbitArgs& args, const ManyShape& shape);

template <DType kType>
GemmKernel many_kernel_for(const LowbitArgs& args, const ManyShape& shape) {
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

}  // namespace octofuse::lowbit
