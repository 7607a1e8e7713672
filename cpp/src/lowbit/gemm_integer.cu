// More than 4 tokens in int8 (gemm_kernel.cuh, gemm_stream.cuh), whose sums are exact: K is cut as the number of tokens
// has it.
#include "lowbit/gemm_kernel.cuh"
#include "lowbit/gemm_stream.cuh"
#include "lowbit/integer_shape.h"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {

void run_gemm_integer(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  const IntegerTile tile = integer_choice(problem_of(args), false).tile;
  GemmKernel kernel{};
  with_integer_format(args, [&](auto format) {
    using Format = decltype(format);
    for_each_integer_tile<Format::kFormat, Format::kBits, false>([&](auto place) {
      constexpr IntegerTile kTile = kIntegerTiles[place.value];
      if (tile.kernel != kTile.kernel || tile.tokens != kTile.tokens || tile.channels != kTile.channels) return;
      constexpr auto kFormat = Format::kFormat;
      constexpr int kBits = Format::kBits;
      if constexpr (kTile.streams()) {
        kernel = stream_kernel_of<StreamTraits<kFormat, kBits, DType::kInt8, kTile.tokens>>();
      } else {
        kernel = gemm_kernel_of<GemmTraits<kFormat, kBits, DType::kInt8, kTile.tokens, kTile.channels>>();
      }
    });
  });
  if (tile.streams()) return launch_gemm_stream(args, kernel, device, stream, allocate);
  launch_gemm(args, kernel, tile.split, device, stream);
}

}  // namespace octofuse::lowbit
