// Argument checks shared by the ops. Each one throws TypeError or ValueError that names the argument, before any
// launch.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dlpack_tensor.h"
#include "octofuse/gemm.h"

namespace octofuse {

// "[2, 3]"
std::string text_of(const std::vector<int64_t>& shape);

void expect_dtype(const TensorView& tensor, std::initializer_list<DType> allowed);
void expect_same_device(const TensorView& tensor, const TensorView& reference);
// cpu or cuda; anything else (and cuda in a CPU-only build) is refused.
void expect_known_device(const TensorView& tensor);

// A torch dtype; `allowed`, by the names that torch prints.
DType parse_dtype(py::handle dtype, const char* argument, std::initializer_list<DType> allowed);
// The same by its name, as selection and tuning know it.
DType parse_dtype_name(const std::string& name, const char* argument, std::initializer_list<DType> allowed);
// None or a name of activations.def.
Activation parse_activation(py::handle name);
// "'relu', 'gelu', 'gelu_tanh' or 'silu'"
std::string activation_names();
// A field that Python has checked: None is a TypeError like any other wrong type.
std::string parse_str(py::handle object, const char* name);

// A Python number, or an fp32 tensor with one element or, if `count` > 0, `count` of them ([count] or [count, 1]).
ScaleView parse_scale(py::handle object, const char* name, int64_t count, const TensorView& reference);

// A Python int in [-128, 127], or an int32 tensor with one element or `count` of them, which `keep` then holds.
IntView parse_int_view(py::handle object, const char* name, int64_t count, const TensorView& reference,
                       std::optional<TensorView>& keep);

// The caller's `out`, checked against the wanted shape and dtype and against overlap with `inputs`.
TensorView parse_out(py::handle object, const std::vector<int64_t>& shape, DType dtype, const TensorView& reference,
                     std::initializer_list<const TensorView*> inputs);

}  // namespace octofuse
