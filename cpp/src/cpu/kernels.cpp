// The CPU's kernels, compiled once for each instruction set: CMake gives OCTOFUSE_CPU_TABLE and OCTOFUSE_CPU_NAME, and
// the compiler's flags do the rest. Everything below stands in unnamed namespaces, so that no two sets share a
// function.
#include "cpu/kernels.h"

#include "cpu/float8.h"
#include "cpu/gemm.h"
#include "cpu/lowbit.h"
#include "cpu/rows.h"

namespace octofuse::cpu {

const Kernels OCTOFUSE_CPU_TABLE = {OCTOFUSE_CPU_NAME, sizeof(Dot::X),   Dot::kStep,      prepare_row,
                                    gemm_block,        row_pass_rows,    dequantize_rows, permute_row,
                                    lowbit_tile,       integers_of_tile, widen_row,       float8_block};

}  // namespace octofuse::cpu
