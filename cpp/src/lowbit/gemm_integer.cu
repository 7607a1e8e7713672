// More than 4 tokens in int8 (gemm_kernel.cuh), whose sums are exact: K is cut as the number of tokens has it.
#include "lowbit/gemm_kernel.cuh"
#include "lowbit/integer_shape.h"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {

void run_gemm_integer(const LowbitArgs& args, int device, cudaStream_t stream) {
  const IntegerTile tile = integer_choice(problem_of(args), false).tile;
  GemmKernel kernel{};
  with_integer_format(args, [&](auto format) {
    using Format = decltype(format);
    for_each_integer_tile<Format::kFormat, Format::kBits, false>([&](auto place) {
      constexpr IntegerTile kTile = kIntegerTiles[place.value];
      if (tile.tokens != kTile.tokens || tile.channels != kTile.channels) return;
      kernel = gemm_kernel_of<GemmTraits<Format::kFormat, Format::kBits, DType::kInt8, kTile.tokens, kTile.channels>>();
    });
  });
  launch_gemm(args, kernel, tile.split, device, stream);
}

}  // namespace octofuse::lowbit
