#include "cutlass/gemm_sm80.cuh"

namespace octofuse::sm80 {

// The order is that of candidates.cpp.
void run(int tile, const GemmArgs& args, int device, cudaStream_t stream) {
  switch (tile) {
    case 0:
      return run_tile<Tile<128, 128, 64, 64, 64, 4, false>>(args, device, stream);
    case 1:
      return run_tile<Tile<64, 64, 64, 32, 32, 5, false>>(args, device, stream);
    default:
      return run_tile<Tile<256, 128, 64, 64, 64, 3, false>>(args, device, stream);
  }
}

void run_col32(const GemmArgs& args, int device, cudaStream_t stream) {
  const bool few = args.m * args.n < int64_t{128} * 128 * device_capability(device).sm_count;
  if (few) return run_tile<Tile<64, 64, 64, 32, 32, 5, true>>(args, device, stream);
  run_tile<Tile<128, 128, 64, 64, 64, 4, true>>(args, device, stream);
}

}  // namespace octofuse::sm80
