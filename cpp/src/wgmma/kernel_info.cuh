// Compiles one kernel and describes it to the host.
#pragma once

#include "wgmma/kernel.cuh"
#include "wgmma/tiles.h"

namespace octofuse::wgmma {

#define OCTOFUSE_KERNEL_INFO(warpgroups, cols, swap)                                                   \
  template <>                                                                                          \
  KernelInfo kernel_info<warpgroups, cols, swap>() {                                                   \
    using T = Tile<warpgroups, cols, swap>;                                                            \
    return {reinterpret_cast<const void*>(gemm_wgmma<T>), T::kThreads, T::kFixedBytes, T::kStageBytes, \
            T::kEpilogueBytes};                                                                        \
  }

}  // namespace octofuse::wgmma
