#include "gemm/wgmma/kernel_info.cuh"

namespace octofuse::wgmma {

OCTOFUSE_WGMMA_NARROW_TILES(OCTOFUSE_OUTLIER_KERNEL_INFO)
OCTOFUSE_WGMMA_BROAD_TILES(OCTOFUSE_OUTLIER_KERNEL_INFO)

}  // namespace octofuse::wgmma
