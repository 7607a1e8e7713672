#include "gemm/wgmma/kernel_info.cuh"

namespace octofuse::wgmma {

OCTOFUSE_WGMMA_DIGIT_TILES(OCTOFUSE_DIGIT_KERNEL_INFO)

}  // namespace octofuse::wgmma
