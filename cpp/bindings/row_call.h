// What the passes over rows share: their arguments, checked one by one. Every function throws TypeError or ValueError
// that names the argument.
#pragma once

#include <string>
#include <vector>

#include "call.h"
#include "dlpack_tensor.h"
#include "octofuse/row_pass.h"

namespace octofuse {

inline constexpr std::initializer_list<DType> kFloats = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

std::vector<int64_t> shape_of(const TensorView& tensor);

// x [..., K] in floating point, of a size that kernels can take.
RowPassArgs checked_rows(const TensorView& x);
// What a norm is given, weight and bias [K] or None, and what the caller calls these.
struct NormArguments {
  py::handle weight, bias, eps;
  const char* weight_name;
  const char* bias_name;
};
// norm: "layer_norm" or "rms_norm".
void parse_norm(const std::string& norm, const NormArguments& given, const TensorView& x, RowPassArgs& args);
// What is added to x before its norm, or None.
void parse_added(py::handle residual, const TensorView& x, RowPassArgs& args);

// The rest of a RowsCall: a norm or an activation, an order, and what the result is quantised to. args.cols are the
// result's behind it; `residual` is left to parse_added().
void parse_rows(const RowsFields& given, const TensorView& x, RowPassArgs& args);
// The results of a RowsCall, which `args` then writes to: [y or q] + [scales, if they are found here: [rows, 1], or of
// blocks [blocks, rows]] + [x + residual, if there is one].
py::list make_row_results(const RowsFields& given, const TensorView& x, const TensorFactory& factory,
                          RowPassArgs& args);

}  // namespace octofuse
