#include "row_call.h"

#include <cmath>

#include "arguments.h"
#include "octofuse/error.h"

namespace octofuse {
namespace {

// weight or bias of a norm: [K], contiguous, in fp32 or x's dtype.
const void* parse_affine(py::handle object, const char* name, const char* weight_name, const TensorView& x,
                         RowPassArgs& args) {
  if (object.is_none()) return nullptr;
  const TensorView tensor(object, name);
  expect_dtype(tensor, {DType::kFloat32, x.dtype});
  expect_same_device(tensor, x);
  if (tensor.ndim() != 1 || tensor.size(0) != args.cols || !tensor.is_contiguous()) {
    refuse<ValueError>(name, "a contiguous tensor of shape [" + std::to_string(args.cols) + "]", tensor.shape_text());
  }
  const bool other = args.weight != nullptr;
  if (other && tensor.dtype != args.affine_type) {
    refuse<TypeError>(name, std::string("dtype ") + name_of(args.affine_type) + " like " + weight_name,
                      tensor.dtype_text());
  }
  args.affine_type = tensor.dtype;
  return tensor.data();
}

}  // namespace

std::vector<int64_t> shape_of(const TensorView& tensor) { return {tensor.dl.shape, tensor.dl.shape + tensor.ndim()}; }

RowPassArgs checked_rows(const TensorView& x) {
  expect_dtype(x, kFloats);
  expect_known_device(x);
  if (x.ndim() < 1) refuse<ValueError>("x", "at least one dimension", "shape " + x.shape_text());
  if (x.size(x.ndim() - 1) < 1) refuse<ValueError>("x", "a last dimension of at least 1", "shape " + x.shape_text());
  if (x.rows() > kMaxExtent || x.size(x.ndim() - 1) > kMaxExtent - 8) {
    refuse<ValueError>("x", "fewer than 2^31 rows and columns", "shape " + x.shape_text());
  }
  RowPassArgs args;
  args.rows = x.rows();
  args.cols = x.size(x.ndim() - 1);
  args.x = x.data();
  args.ldx = x.row_stride();
  args.type = x.dtype;
  return args;
}

void parse_norm(const std::string& norm, const NormArguments& given, const TensorView& x, RowPassArgs& args) {
  const py::handle eps = given.eps;
  if (args.cols > kMaxK) refuse<ValueError>("x", "at most 131071 columns", "shape " + x.shape_text());
  args.norm = norm == "layer_norm" ? Norm::kLayer : Norm::kRms;
  if (PyFloat_Check(eps.ptr()) == 0 && (PyLong_Check(eps.ptr()) == 0 || PyBool_Check(eps.ptr()))) {
    refuse<TypeError>("eps", "float", std::string(Py_TYPE(eps.ptr())->tp_name));
  }
  args.eps = eps.cast<float>();
  if (!(args.eps >= 0.0F) || std::isinf(args.eps)) {
    refuse<ValueError>("eps", "a finite number of at least 0", std::to_string(args.eps));
  }
  args.weight = parse_affine(given.weight, given.weight_name, given.weight_name, x, args);
  args.bias = parse_affine(given.bias, given.bias_name, given.weight_name, x, args);
}

void parse_added(py::handle residual, const TensorView& x, RowPassArgs& args) {
  if (residual.is_none()) return;
  const TensorView other(residual, "residual");
  expect_dtype(other, {x.dtype});
  expect_same_device(other, x);
  if (shape_of(other) != shape_of(x)) refuse<ValueError>("residual", "shape " + x.shape_text(), other.shape_text());
  args.residual = other.data();
  args.residual_ld = other.row_stride();
}

namespace {

// int32 [cols], contiguous, or None.
const int32_t* parse_order(py::handle object, const TensorView& x, int64_t cols) {
  if (object.is_none()) return nullptr;
  const TensorView order(object, "order");
  expect_dtype(order, {DType::kInt32});
  expect_same_device(order, x);
  if (order.ndim() != 1 || order.size(0) != cols || !order.is_contiguous()) {
    refuse<ValueError>("order", "a contiguous tensor of shape [" + std::to_string(cols) + "]", order.shape_text());
  }
  return static_cast<const int32_t*>(order.data());
}

}  // namespace

void parse_rows(const RowsFields& given, const TensorView& x, RowPassArgs& args) {
  const std::string op = parse_str(given.op, "op");
  const bool quantize = given.quantize.cast<bool>();
  args.constants = given.constants.cast<bool>();
  if (op == "layer_norm" || op == "rms_norm") {
    parse_norm(op, {given.weight, given.bias, given.eps, "weight", "bias"}, x, args);
  } else if (op != "reorder" && op != "copy") {
    args.activation = parse_activation(given.activation);
    if (args.activation == Activation::kNone) {
      refuse<ValueError>("activation", activation_names(), "None");
    }
    args.gated = op == "gated_activation";
    if (args.gated && args.cols % 2 != 0) {
      refuse<ValueError>("x", "an even last dimension, gates first", "shape " + x.shape_text());
    }
    if (args.gated) args.cols /= 2;
  }
  args.order = parse_order(given.order, x, args.cols);
  if (args.order != nullptr && (quantize || !given.residual.is_none())) {
    refuse<ValueError>("order", "None with a residual or int8 output", "a tensor");
  }
  if (op == "reorder" && args.order == nullptr) refuse<TypeError>("order", "an int32 tensor", "None");
  if (!quantize) return;
  const bool dynamic = given.scale.is_none();
  args.q_type = parse_dtype(given.q_dtype, "dtype", {DType::kInt8, DType::kE4M3, DType::kE5M2});
  args.block_scales = given.q_block.cast<bool>();
  if (args.block_scales && (args.q_type == DType::kInt8 || !dynamic)) {
    refuse<ValueError>("block", dynamic ? "False for int8" : "False beside a scale", "True");
  }
  args.bare_scales = given.of_part.cast<bool>();
  if (!dynamic) args.scale = parse_scale(given.scale, "scale", args.bare_scales ? args.rows : -1, x);
}

py::list make_row_results(const RowsFields& given, const TensorView& x, const TensorFactory& factory,
                          RowPassArgs& args) {
  const bool quantize = given.quantize.cast<bool>();
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = args.cols;
  py::list results;
  void* data = nullptr;
  results.append(factory.make(shape, quantize ? args.q_type : x.dtype, &data));
  if (quantize) {
    args.q = static_cast<int8_t*>(data);
  } else {
    args.y = data;
  }
  if (quantize && given.scale.is_none()) {
    const std::vector<int64_t> blocks = {scale_blocks(args.cols), args.rows};
    results.append(
        factory.make(args.block_scales ? blocks : std::vector<int64_t>{args.rows, 1}, DType::kFloat32, &data));
    args.scales = static_cast<float*>(data);
  }
  // Not by args.residual: an empty tensor has no address.
  if (!given.residual.is_none()) results.append(factory.make(shape, x.dtype, &args.sum));
  return results;
}

}  // namespace octofuse
