#include "gemm/wgmma/kernel_info.cuh"

namespace octofuse::wgmma {

OCTOFUSE_WGMMA_FLOAT8_TILES(OCTOFUSE_KERNEL_INFO)
OCTOFUSE_WGMMA_E5M2_TILES(OCTOFUSE_KERNEL_INFO)

}  // namespace octofuse::wgmma
