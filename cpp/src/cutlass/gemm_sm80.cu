#include "cutlass/gemm_sm80.cuh"

namespace octofuse::sm80 {

// The order is select.cpp's table.
void run(int tile, const GemmArgs& args, int device, cudaStream_t stream) {
  switch (tile) {
    case 0:
      return Kernel<128, 128, 64, 64, 64, 4>::run(args, device, stream);
    default:
      return Kernel<64, 64, 64, 32, 32, 5>::run(args, device, stream);
  }
}

}  // namespace octofuse::sm80
