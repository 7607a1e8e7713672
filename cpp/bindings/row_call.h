// What the passes over rows share: their arguments, checked one by one. Every function throws TypeError or ValueError
// that names the argument.
#pragma once

#include <string>
#include <vector>

#include "dlpack_tensor.h"
#include "octofuse/row_pass.h"

namespace octofuse {

inline constexpr std::initializer_list<DType> kFloats = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

std::vector<int64_t> shape_of(const TensorView& tensor);

// x [..., K] in floating point, of a size that kernels can take.
RowPassArgs checked_rows(const TensorView& x);
// norm: "layer_norm" or "rms_norm"; weight and bias [K] or None.
void parse_norm(const std::string& norm, py::handle weight, py::handle bias, py::handle eps, const TensorView& x,
                RowPassArgs& args);
// What is added to x before its norm, or None.
void parse_added(py::handle residual, const TensorView& x, RowPassArgs& args);

}  // namespace octofuse
