#include "cutlass/gemm_sm90.cuh"

namespace octofuse::sm90 {

void run_f32(const GemmArgs& args, int device, cudaStream_t stream) {
  Kernel<Tile128x128x128Pingpong2x1, float>::run(args, device, stream);
}

}  // namespace octofuse::sm90
