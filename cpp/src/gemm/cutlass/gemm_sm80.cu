#include "gemm/cutlass/gemm_sm80.cuh"
#include "gemm/cutlass/tiles_sm80.h"

namespace octofuse::sm80 {

void run(int tile, const GemmArgs& args, int device, cudaStream_t stream) {
  using Run = void (*)(const GemmArgs&, int, cudaStream_t);
  static constexpr Run kRuns[] = {
#define OCTOFUSE_RUN(m, n, k, warp_m, warp_n, stages, efficiency) \
  &run_tile<Tile<m, n, k, warp_m, warp_n, stages, false>>,
      OCTOFUSE_SM80_TILES(OCTOFUSE_RUN)
#undef OCTOFUSE_RUN
  };
  kRuns[tile](args, device, stream);
}

void run_col32(const GemmArgs& args, int device, cudaStream_t stream) {
  const bool few = args.m * args.n < int64_t{128} * 128 * device_capability(device).sm_count;
  if (few) return run_tile<Tile<64, 64, 64, 32, 32, 5, true>>(args, device, stream);
  run_tile<Tile<128, 128, 64, 64, 64, 4, true>>(args, device, stream);
}

}  // namespace octofuse::sm80
