#include "cutlass/gemm_sm90.cuh"

namespace octofuse::sm90 {

void run_bf16(const GemmArgs& args, int device, cudaStream_t stream) {
  Kernel<Tile128x128x128Pingpong2x1, cutlass::bfloat16_t>::run(args, device, stream);
}

}  // namespace octofuse::sm90
