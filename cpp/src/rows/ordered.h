// Rows whose columns leave in another order (RowPassArgs::order).
#pragma once

#include <cuda_runtime_api.h>

#include "octofuse/row_pass.h"

namespace octofuse::rows {

constexpr int kMostShared = 40960;  // bytes, beside a kernel's own, what needs no opt-in

// `wide`: as is_wide() in pass.cu has it.
void run_ordered(const RowPassArgs& args, bool wide, bool chained, cudaStream_t stream);

}  // namespace octofuse::rows
