// Few tokens against many weights: mma.sync with both operands straight from global memory into registers.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/skinny/tiles.h"
#include "octofuse/gemm.h"
#include "octofuse/row_pass.h"

namespace octofuse::skinny {

// `tile` is an index into kTiles; args.m is at most its tokens.
void run(int tile, const GemmArgs& args, int device, cudaStream_t stream);

// One token in a captured chain, where takes_shared() says so, by one of two kernels (one_token.h).
bool takes_shared(const GemmArgs& args, int device);
void run_shared(const GemmArgs& args, int device, cudaStream_t stream);

// A token in floating point, which `rows` describes, where takes_rows() says so: x of `args` is not read.
// With per_token it finds its own scale, which is kept nowhere.
bool takes_rows(const RowPassArgs& rows, const GemmArgs& args, int device);
void run_rows(const RowPassArgs& rows, bool per_token, const GemmArgs& args, int device, cudaStream_t stream);

}  // namespace octofuse::skinny
