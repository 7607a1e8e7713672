// gemm_many's and gemm_split's kernels of one type, each in a file of its own: they take minutes to compile.
#pragma once

#include "lowbit/gemm_many_kernel.cuh"

namespace octofuse::lowbit {

GemmKernel many_kernel_of_half(const LowbitArgs& args, const ManyShape& shape);
GemmKernel many_kernel_of_bfloat16(const LowbitArgs& args, const ManyShape& shape);
GemmKernel split_kernel_of_half(const LowbitArgs& args, const ManyShape& shape);
GemmKernel split_kernel_of_bfloat16(const LowbitArgs& args, const ManyShape& shape);

template <DType kType, bool kSplitsK>
GemmKernel many_kernel_for(const LowbitArgs& args, const ManyShape& shape) {
  GemmKernel kernel{};
  with_format(args, [&](auto format) {
    using Format = decltype(format);
    for_each_many_tile<tile_set_of(Format::kFormat, Format::kBits), kSplitsK>([&](auto place) {
      constexpr ManyTile kTile = kManyTiles[place.value];
      if (shape.tokens != kTile.tokens || shape.channels != kTile.channels) return;
      kernel =
          many_kernel_of<ManyTraits<Format::kFormat, Format::kBits, kType, kTile.tokens, kTile.channels, kSplitsK>>();
    });
  });
  return kernel;
}

}  // namespace octofuse::lowbit
