#include "gemm/wgmma/kernel_info.cuh"

namespace octofuse::wgmma {

OCTOFUSE_WGMMA_FEW_TOKEN_TILES(OCTOFUSE_OUTLIER_KERNEL_INFO)
OCTOFUSE_WGMMA_SWAPPED_TILES(OCTOFUSE_OUTLIER_KERNEL_INFO)

}  // namespace octofuse::wgmma
