// The row pass for a few rows in a captured chain: compute capability 9.0 alone.
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/row_pass.h"

namespace octofuse::rows {

// `args` can be read in vectors, and its constants before earlier kernels have finished. False where no kernel takes
// it.
bool run_few(const RowPassArgs& args, cudaStream_t stream);

}  // namespace octofuse::rows
