#include "arguments.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "octofuse/error.h"

namespace octofuse {
namespace {

std::string join(std::initializer_list<DType> types) {
  std::string text;
  for (const DType type : types) text += (text.empty() ? "" : " or ") + std::string(name_of(type));
  return text;
}

using TorchDTypes = std::array<std::pair<PyObject*, DType>, 7>;

// torch's own objects for dtypes: there is one of each, so a pointer tells them apart. Never destroyed, since the
// interpreter may be gone before this module is.
const TorchDTypes& torch_dtypes() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<TorchDTypes> storage;
  return storage
      .call_once_and_store_result([] {
        const py::module_ torch = py::module_::import("torch");
        TorchDTypes found;
        size_t next = 0;
        for (const DType type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8, DType::kInt32,
                                 DType::kE4M3, DType::kE5M2}) {
          found.at(next++) = {py::object(torch.attr(name_of(type))).release().ptr(), type};
        }
        return found;
      })
      .get_stored();
}

// The bytes that a tensor spans, as addresses.
std::pair<uintptr_t, uintptr_t> span_of(const TensorView& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data());
  int64_t last = 0;
  for (int i = 0; i < tensor.ndim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + static_cast<uintptr_t>((last + 1) * tensor.dl.dtype.bits / 8)};
}

}  // namespace

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void expect_dtype(const TensorView& tensor, std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), tensor.dtype) != allowed.end()) return;
  refuse<TypeError>(tensor.name, "dtype " + join(allowed), tensor.dtype_text());
}

void expect_known_device(const TensorView& tensor) {
  if (tensor.on_cpu()) return;
  if (tensor.dl.device.device_type != kDLCUDA) {
    refuse<ValueError>(tensor.name, "a tensor on cpu or cuda", tensor.device_text());
  }
  if (tensor.device() >= 64) refuse<ValueError>(tensor.name, "a device index below 64", tensor.device_text());
  if (*built_architectures() == '\0') {
    throw RuntimeError(std::string(tensor.name) + ": is on " + tensor.device_text() +
                       ", but this octofuse was built for the CPU only; reinstall it with OCTOFUSE_CUDA=ON");
  }
}

void expect_same_device(const TensorView& tensor, const TensorView& reference) {
  if (tensor.dl.device.device_type == reference.dl.device.device_type && tensor.device() == reference.device()) return;
  refuse<ValueError>(tensor.name, "a tensor on " + reference.device_text() + " like " + reference.name,
                     tensor.device_text());
}

std::string parse_str(py::handle object, const char* name) {
  if (!py::isinstance<py::str>(object)) {
    refuse<TypeError>(name, "str", std::string(Py_TYPE(object.ptr())->tp_name));
  }
  return object.cast<std::string>();
}

DType parse_dtype(py::handle object, const char* argument, std::initializer_list<DType> allowed) {
  for (const auto& [dtype, type] : torch_dtypes()) {
    if (dtype != object.ptr()) continue;
    if (std::find(allowed.begin(), allowed.end(), type) != allowed.end()) return type;
    refuse<ValueError>(argument, "torch dtype " + join(allowed), name_of(type));
  }
  const std::string text = py::str(object);
  if (text.rfind("torch.", 0) != 0) {
    refuse<TypeError>(argument, "torch.dtype", std::string(Py_TYPE(object.ptr())->tp_name));
  }
  refuse<ValueError>(argument, "torch dtype " + join(allowed), text.substr(6));
}

DType parse_dtype_name(const std::string& name, const char* argument, std::initializer_list<DType> allowed) {
  for (const DType type : allowed) {
    if (name == name_of(type)) return type;
  }
  refuse<ValueError>(argument, "torch dtype " + join(allowed), name);
}

Activation parse_activation(py::handle object) {
  if (object.is_none()) return Activation::kNone;
  if (!py::isinstance<py::str>(object)) {
    refuse<TypeError>("activation", "str or None", std::string(Py_TYPE(object.ptr())->tp_name));
  }
  const auto given = object.cast<std::string>();
#define OCTOFUSE_ACTIVATION(id, name) \
  if (given == name) return Activation::k##id;
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
  refuse<ValueError>("activation", "None, " + activation_names(), "'" + given + "'");
}

std::string activation_names() {
  const char* const names[] = {
#define OCTOFUSE_ACTIVATION(id, name) name,
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
  };
  std::string text;
  const size_t count = std::size(names);
  for (size_t i = 0; i < count; ++i) {
    text += std::string(i == 0 ? "'" : i + 1 < count ? ", '" : " or '") + names[i] + "'";
  }
  return text;
}

ScaleView parse_scale(py::handle object, const char* name, int64_t count, const TensorView& reference) {
  ScaleView scale;
  const bool is_number =
      PyFloat_Check(object.ptr()) != 0 || (PyLong_Check(object.ptr()) != 0 && !PyBool_Check(object.ptr()));
  if (is_number) {
    scale.value = static_cast<float>(object.cast<double>());
    if (!std::isfinite(scale.value) || scale.value <= 0.0F) {
      char text[32];
      std::snprintf(text, sizeof(text), "%g", static_cast<double>(scale.value));
      refuse<ValueError>(name, "a finite number above 0", text);
    }
    return scale;
  }
  const TensorView tensor(object, name);
  expect_dtype(tensor, {DType::kFloat32});
  expect_same_device(tensor, reference);
  const int64_t numel = tensor.numel();
  const bool vector =
      (tensor.ndim() == 1 || (tensor.ndim() == 2 && tensor.size(1) == 1)) && count >= 0 && numel == count;
  // A scalar may come as [], [1] or [1, 1].
  if (numel == 1 && tensor.ndim() <= 2) {
    scale.data = tensor.data<float>();
    return scale;
  }
  if (!vector) {
    const std::string length = std::to_string(count);
    const std::string also = count >= 0 ? " or " + length + " elements ([" + length + "] or [" + length + ", 1])" : "";
    refuse<ValueError>(name, "one element" + also, "shape " + tensor.shape_text());
  }
  scale.data = tensor.data<float>();
  scale.step = tensor.numel() == 0 ? 1 : tensor.stride(0);
  return scale;
}

IntView parse_int_view(py::handle object, const char* name, int64_t count, const TensorView& reference,
                       std::optional<TensorView>& keep) {
  IntView view;
  if (PyLong_Check(object.ptr()) != 0 && !PyBool_Check(object.ptr())) {
    const auto value = object.cast<int64_t>();
    if (value < -128 || value > 127) refuse<ValueError>(name, "an int in [-128, 127]", std::to_string(value));
    view.value = static_cast<int32_t>(value);
    return view;
  }
  const TensorView& tensor = keep.emplace(object, name);
  expect_dtype(tensor, {DType::kInt32});
  expect_same_device(tensor, reference);
  const int64_t numel = tensor.numel();
  view.data = tensor.data<const int32_t>();
  if (numel == 1 && tensor.ndim() <= 2) return view;
  const bool vector = tensor.ndim() == 1 || (tensor.ndim() == 2 && tensor.size(1) == 1);
  if (!vector || numel != count) {
    const std::string length = std::to_string(count);
    refuse<ValueError>(name, "one element or " + length + " ([" + length + "] or [" + length + ", 1])",
                       "shape " + tensor.shape_text());
  }
  view.step = numel == 0 ? 1 : tensor.stride(0);
  return view;
}

TensorView parse_out(py::handle object, const std::vector<int64_t>& shape, DType dtype, const TensorView& reference,
                     std::initializer_list<const TensorView*> inputs) {
  const TensorView out(object, "out");
  expect_dtype(out, {dtype});
  expect_same_device(out, reference);
  const bool same_shape =
      out.ndim() == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), out.dl.shape);
  if (!same_shape) refuse<ValueError>("out", "shape " + text_of(shape), out.shape_text());
  if (out.rows() > 1 && out.row_stride() < out.size(out.ndim() - 1)) {
    refuse<ValueError>("out", "rows that do not overlap", "row stride " + std::to_string(out.row_stride()));
  }
  out.row_stride();
  if (out.numel() == 0) return out;
  for (const TensorView* input : inputs) {
    if (input == nullptr || input->numel() == 0) continue;
    const auto [begin, end] = span_of(out);
    const auto [other_begin, other_end] = span_of(*input);
    if (begin < other_end && other_begin < end) {
      refuse<ValueError>("out", std::string("memory that does not overlap ") + input->name, "an overlapping view");
    }
  }
  return out;
}

}  // namespace octofuse
