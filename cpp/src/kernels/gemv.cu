// The dp4a kernels for tokens that are int8 already.
#include "kernels/gemv.cuh"

namespace octofuse::skinny {
namespace {

struct GivenTokens {
  const KernelArgs& args;

  __device__ void prefetch(int) {}
  __device__ void prepare(int) {}
  __device__ const int8_t* data() const { return args.x; }
  __device__ int64_t ld() const { return args.ldx; }
  __device__ float scale(int, float given) const { return given; }
};

template <int kTokens, int kRows>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kTokens, kRows>)
    gemv(const __grid_constant__ KernelArgs args) {
  GivenTokens input{args};
  gemv_tile<kTokens, kRows>(args, input);
}

}  // namespace

void run_gemv(int tile, KernelArgs args, int sm_count, bool chained, cudaStream_t stream) {
  static const void* const kernels[] = {
#define OCTOFUSE_KERNEL(tokens, rows) reinterpret_cast<const void*>(gemv<tokens, rows>),
      OCTOFUSE_GEMV_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
  };
  const unsigned blocks = gemv_blocks(tile, sm_count, args);
  launch_kernel("skinny", kernels[tile], dim3(blocks), dim3(kThreads), 0, dim3(1), chained, &args, stream);
}

}  // namespace octofuse::skinny
