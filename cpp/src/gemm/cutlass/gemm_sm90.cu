#include "gemm/cutlass/gemm_sm90.cuh"

namespace octofuse::sm90 {

void run(const GemmArgs& args, int device, cudaStream_t stream) {
  Kernel<Tile128x128x128Pingpong2x1, cutlass::half_t>::run(args, device, stream);
}

}  // namespace octofuse::sm90
