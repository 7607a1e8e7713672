// The CPU engine: the same structs as the kernels', on tensors in host memory. Kernels are compiled once for every
// instruction set (cpu/kernels.cpp) and chosen when the module is first used.
//
// Integers are exact, every step of the formula is one rounding, and sums in floating point have an order that depends
// on K alone. So neither the instruction set nor the number of threads nor the other tokens change a bit.
#pragma once

#include <string>
#include <vector>

#include "octofuse/epilogue_pass.h"
#include "octofuse/gemm.h"
#include "octofuse/lowbit.h"
#include "octofuse/row_pass.h"

namespace octofuse::cpu {

// An instruction set that this build has kernels for, and why this machine cannot run them (empty if it can).
struct Isa {
  const char* name;
  std::string why_not;
};
// The best first.
std::vector<Isa> isas();
// The one in use: the best that can run here, or the one that OCTOFUSE_CPU_ISA names.
const char* isa();
// Uses another one from now on. Throws ValueError for a name that is unknown or cannot run here.
void use_isa(const std::string& name);

// Upper bound of threads in a call: what torch.set_num_threads() set.
int max_threads();
// Cores that are worth a thread now: those of this process less what others have used lately, but at least half of
// them. All, where the system does not tell. Looks a few times a second; otherwise costs some nanoseconds.
int free_cores();

void linear(const GemmArgs& args);
// x and x_scale of `args` are filled in here; per_token: every row finds its own scale, else all have rows.scale.
void row_linear(const RowPassArgs& rows, bool per_token, GemmArgs args);
void row_pass(const RowPassArgs& args);
void dequantize(const DequantizeArgs& args);
// out = linear(norm(x)); rows.norm may be none. `rows` describes x, unless that is int8. Groups: see takes_group().
void lowbit_linear(const RowPassArgs& rows, const LowbitArgs& args);
// Groups that the low-bit kernels can follow: whole multiples of 32 columns, or 0 for a row.
constexpr bool takes_group(int64_t group) { return group % 32 == 0; }

}  // namespace octofuse::cpu
