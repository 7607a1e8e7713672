// Passes over gathered rows by clusters of blocks: compute capability 9.0 alone.
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/parallel.h"

namespace octofuse::peers {

// Of a row: a norm has one pack of a thread, a copy three.
constexpr int64_t most_clustered_columns(bool norm) { return (norm ? 1 : 3) * 8 * 256 * 8; }

// False where the build or the device has no such kernel.
bool run_clustered(const GatherRowsArgs& args, int device, cudaStream_t stream);

}  // namespace octofuse::peers
