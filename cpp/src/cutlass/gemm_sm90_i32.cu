#include "cutlass/gemm_sm90.cuh"

namespace octofuse::sm90 {

void run_i32(const GemmArgs& args, int device, cudaStream_t stream) {
  Kernel<Tile128x128x128Pingpong2x1, int32_t>::run(args, device, stream);
}

}  // namespace octofuse::sm90
