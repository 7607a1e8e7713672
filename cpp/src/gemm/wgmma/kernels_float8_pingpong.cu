#include "gemm/wgmma/kernel_info.cuh"

namespace octofuse::wgmma {

OCTOFUSE_WGMMA_FLOAT8_PINGPONG_TILES(OCTOFUSE_KERNEL_INFO)

}  // namespace octofuse::wgmma
