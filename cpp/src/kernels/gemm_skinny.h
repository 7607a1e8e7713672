// Few tokens against many weights: mma.sync with both operands straight from global memory into registers.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/skinny_tiles.h"
#include "octofuse/gemm.h"

namespace octofuse::skinny {

// `tile` is an index into kTiles; args.m is at most its tokens.
void run(int tile, const GemmArgs& args, int device, cudaStream_t stream);

}  // namespace octofuse::skinny
