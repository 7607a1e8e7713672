#include "gemm/wgmma/kernel_info.cuh"

namespace octofuse::wgmma {

OCTOFUSE_WGMMA_PINGPONG_TILES(OCTOFUSE_OUTLIER_KERNEL_INFO)
OCTOFUSE_WGMMA_COOPERATIVE_TILES(OCTOFUSE_OUTLIER_KERNEL_INFO)

}  // namespace octofuse::wgmma
