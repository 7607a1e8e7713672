// Copies of gathered rows by clusters of blocks: compute capability 9.0 alone.
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/parallel.h"

namespace octofuse::peers {

// False where the build holds no such kernel, or the row is a norm's.
bool run_clustered(const GatherRowsArgs& args, int device, cudaStream_t stream);

}  // namespace octofuse::peers
