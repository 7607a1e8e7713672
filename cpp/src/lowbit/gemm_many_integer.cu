// Many tokens in int8 (gemm_many_kernel.cuh), and few beside many channels.
#include "lowbit/gemm_many_kernel.cuh"
#include "lowbit/integer_shape.h"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {

void run_gemm_many_integer(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  const ManyShape shape = integer_many_shape(problem_of(args));
  GemmKernel kernel{};
  with_integer_format(args, [&](auto format) {
    using Format = decltype(format);
    for_each_integer_tile<Format::kFormat, Format::kBits, true>([&](auto place) {
      constexpr IntegerTile kTile = kIntegerTiles[place.value];
      constexpr bool kSplitsK = kTile.split > 1;
      if (shape.tokens != kTile.tokens || shape.channels != kTile.channels || shape.splits_k != kSplitsK) return;
      using Traits = ManyTraits<Format::kFormat, Format::kBits, DType::kInt8, kTile.tokens, kTile.channels, kSplitsK>;
      kernel = many_kernel_of<Traits>();
    });
  });
  launch_gemm_many(args, kernel, shape, device, stream, allocate);
}

}  // namespace octofuse::lowbit
