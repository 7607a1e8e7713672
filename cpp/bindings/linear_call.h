// What the linear ops share: their arguments, checked one by one. Every function throws TypeError or ValueError that
// names the argument.
#pragma once

#include <optional>
#include <vector>

#include "arguments.h"
#include "octofuse/gemm.h"

namespace octofuse {

// Everything a linear op was given, checked. The views keep the shape memory that `args` points into alive.
struct LinearCall {
  TensorView x, w;
  std::optional<TensorView> bias, residual, w_sum, x_zero;
  GemmArgs args;
  std::vector<int64_t> out_shape;
};

// x [..., K] and w [N, K], int8 or float8 (x: one of x_types) on one device, of sizes that kernels can take.
LinearCall checked_operands(py::handle x, py::handle w, std::initializer_list<DType> x_types = {DType::kInt8});
// Scales of blocks, if w_scale has those; x_scale: None where they are found later. Comes before parse_epilogue().
bool parse_block_scales(LinearCall& call, py::handle x_scale, py::handle w_scale);
void parse_bias(LinearCall& call, py::handle object);
// w_scale, bias, activation and residual.
void parse_epilogue(LinearCall& call, py::handle w_scale, py::handle bias, py::handle activation, py::handle residual);
// The type of the output: int8 where there is a scale for it, of float8 operands what out_dtype says, int8 or e4m3.
DType parse_output(LinearCall& call, py::handle out_dtype, py::handle out_scale);
void parse_residual(LinearCall& call, py::handle object);
// Asymmetric activations: x stands for x - x_zero, and the sums of w's rows take the zero point out of the product.
void parse_zero_point(LinearCall& call, py::handle zero, py::handle sums);

// Whether "auto" leaves this call on CPU tensors to oneDNN, which Python calls.
bool left_to_onednn(const GemmArgs& args);
// Products (M * N * K) for each thread from which it does; at first never.
void prefer_onednn(double products);

GemmProblem problem_of(const LinearCall& call);
// The first call on a device reads what `octofuse tune` measured there before. The reader reports its own failures.
void read_tuning_once(int device);

}  // namespace octofuse
