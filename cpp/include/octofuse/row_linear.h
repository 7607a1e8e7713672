// A linear layer on activations in floating point: row_pass() to 8 bits, then run_gemm(). One token of a small layer
// takes one kernel, in which every block quantises for itself; the bits are those of the two.
#pragma once

#include "octofuse/gemm.h"
#include "octofuse/row_pass.h"

namespace octofuse {

// `rows` without an output: with per_token every row finds its own scale, or every block of one where args.w_blocks are
// given, else all have rows.scale. x and its scales in `args` are filled in here; it is quantised to args.x_type.
void run_row_linear(const RowPassArgs& rows, bool per_token, const GemmArgs& args, const GemmProblem& problem,
                    int device, Stream stream, const Allocator& allocate);

}  // namespace octofuse
