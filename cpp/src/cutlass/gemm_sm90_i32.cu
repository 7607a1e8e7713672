#include "cutlass/gemm_sm90.cuh"

namespace octofuse::sm90 {

void run_i32(int tile, const GemmArgs& args, int device, cudaStream_t stream) {
  switch (tile) {
    case 0:
      return Kernel<Tile128x128x128Pingpong2x1, int32_t>::run(args, device, stream);
    default:
      return Kernel<Tile64x128x128Pingpong1x1, int32_t>::run(args, device, stream);
  }
}

}  // namespace octofuse::sm90
