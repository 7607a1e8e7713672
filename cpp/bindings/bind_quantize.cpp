// Quantisation and the passes over rows that end in it.
#include "arguments.h"
#include "call.h"
#include "cpu_call.h"
#include "module.h"
#include "octofuse/cpu.h"
#include "octofuse/epilogue_pass.h"
#include "octofuse/error.h"
#include "octofuse/row_pass.h"
#include "row_call.h"

namespace octofuse {
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

// On the tensors' device.
void run_pass(const RowPassArgs& args, const TensorView& x, const TensorFactory& factory) {
  if (!x.on_cpu()) return row_pass(args, x.device(), factory.current_stream());
  const CpuCall on_cpu;
  cpu::row_pass(args);
}

// With one scale for all a contiguous tensor's rows may be cut anywhere: into lengths that fill the device.
void quantize_flat(RowPassArgs args, const TensorView& x, const TensorFactory& factory) {
  constexpr int64_t kLength = 4096;
  const int64_t total = args.rows * args.cols;
  RowPassArgs rest = args;
  args.rows = total / kLength;
  args.cols = args.ldx = kLength;
  run_pass(args, x, factory);
  const int64_t done = args.rows * kLength;
  rest.rows = total > done ? 1 : 0;
  rest.cols = rest.ldx = total - done;
  rest.x = static_cast<const char*>(rest.x) + done * static_cast<int64_t>(size_of(rest.type));
  rest.q += done;
  run_pass(rest, x, factory);
}

py::object per_tensor(py::handle x_object, py::handle scale) {
  const TensorView x(x_object, "x");
  RowPassArgs args = checked_rows(x);
  args.scale = parse_scale(scale, "scale", -1, x);
  const TensorFactory factory(x.dl.device);
  void* q = nullptr;
  py::object result = factory.make(shape_of(x), DType::kInt8, &q);
  args.q = static_cast<int8_t*>(q);
  if (args.ldx == args.cols || args.rows == 1) {
    quantize_flat(args, x, factory);
  } else {
    run_pass(args, x, factory);
  }
  return result;
}

py::object per_token(py::handle x_object) {
  const TensorView x(x_object, "x");
  RowPassArgs args = checked_rows(x);
  const TensorFactory factory(x.dl.device);
  void* q = nullptr;
  void* scales = nullptr;
  py::object result = factory.make(shape_of(x), DType::kInt8, &q);
  py::object result_scales = factory.make({args.rows, 1}, DType::kFloat32, &scales);
  args.q = static_cast<int8_t*>(q);
  args.scales = static_cast<float*>(scales);
  run_pass(args, x, factory);
  return py::make_tuple(result, result_scales);
}

// A norm or an activation of rows that are too long to be put into order on their way: in two passes.
void run_ordered(RowPassArgs args, const TensorView& x, const TensorFactory& factory) {
  if (x.on_cpu() || orders_row(args)) return run_pass(args, x, factory);
  RowPassArgs reorder;
  reorder.rows = args.rows;
  reorder.cols = reorder.ldx = args.cols;
  reorder.type = args.type;
  reorder.y = args.y;
  reorder.order = args.order;
  reorder.constants = args.constants;
  args.order = nullptr;
  const py::object between = factory.make({args.rows, args.cols}, args.type, &args.y);
  reorder.x = args.y;
  run_pass(args, x, factory);
  run_pass(reorder, x, factory);
}

// op: "copy", "layer_norm", "rms_norm", "activation", "gated_activation" or "reorder". Returns [y or q] + [scales, if
// they were found here: [rows, 1], or of blocks [blocks, rows]] + [x + residual, if there is one].
py::object rows(const py::tuple& fields) {
  const RowsFields given(fields);
  const std::string op = parse_str(given.op, "op");
  const py::handle residual = given.residual;
  const py::handle scale = given.scale;
  const bool quantize = given.quantize.cast<bool>();
  const TensorView x(given.x, "x");
  RowPassArgs args = checked_rows(x);
  args.constants = given.constants.cast<bool>();
  std::vector<int64_t> shape = shape_of(x);
  if (op == "layer_norm" || op == "rms_norm") {
    parse_norm(op, {given.weight, given.bias, given.eps, "weight", "bias"}, x, args);
    parse_added(residual, x, args);
  } else if (op != "reorder" && op != "copy") {
    args.activation = parse_activation(given.activation);
    if (args.activation == Activation::kNone) {
      refuse<ValueError>("activation", activation_names(), "None");
    }
    args.gated = op == "gated_activation";
    if (args.gated && args.cols % 2 != 0) {
      refuse<ValueError>("x", "an even last dimension, gates first", "shape " + x.shape_text());
    }
    if (args.gated) shape.back() = args.cols /= 2;
  }
  args.order = parse_order(given.order, x, args.cols);
  if (args.order != nullptr && (quantize || !residual.is_none())) {
    refuse<ValueError>("order", "None with a residual or int8 output", "a tensor");
  }
  if (op == "reorder" && args.order == nullptr) refuse<TypeError>("order", "an int32 tensor", "None");
  const bool dynamic = quantize && scale.is_none();
  if (quantize) {
    args.q_type = parse_dtype(given.q_dtype, "dtype", {DType::kInt8, DType::kE4M3, DType::kE5M2});
    args.block_scales = given.q_block.cast<bool>();
    if (args.block_scales && (args.q_type == DType::kInt8 || !dynamic)) {
      refuse<ValueError>("block", dynamic ? "False for int8" : "False beside a scale", "True");
    }
  }
  if (quantize && !dynamic) args.scale = parse_scale(scale, "scale", -1, x);
  const TensorFactory factory(x.dl.device);
  py::list results;
  void* data = nullptr;
  results.append(factory.make(shape, quantize ? args.q_type : x.dtype, &data));
  if (quantize) {
    args.q = static_cast<int8_t*>(data);
  } else {
    args.y = data;
  }
  if (dynamic) {
    const std::vector<int64_t> blocks = {scale_blocks(args.cols), args.rows};
    results.append(
        factory.make(args.block_scales ? blocks : std::vector<int64_t>{args.rows, 1}, DType::kFloat32, &data));
    args.scales = static_cast<float*>(data);
  }
  // Not by args.residual: an empty tensor has no address.
  if (!residual.is_none()) results.append(factory.make(shape, x.dtype, &args.sum));
  if (args.order == nullptr) {
    run_pass(args, x, factory);
  } else {
    run_ordered(args, x, factory);
  }
  return results;
}

py::object dequantize(py::handle q_object, py::handle scale, py::handle out_dtype) {
  const TensorView q(q_object, "q");
  expect_dtype(q, {DType::kInt8, DType::kInt32, DType::kE4M3, DType::kE5M2});
  expect_known_device(q);
  if (q.ndim() < 1) refuse<ValueError>("q", "at least one dimension", "shape " + q.shape_text());
  if (q.size(q.ndim() - 1) < 1) refuse<ValueError>("q", "a last dimension of at least 1", "shape " + q.shape_text());
  if (q.rows() > kMaxExtent || q.size(q.ndim() - 1) > kMaxExtent - 4) {
    refuse<ValueError>("q", "fewer than 2^31 rows and columns", "shape " + q.shape_text());
  }
  DequantizeArgs args;
  args.rows = q.rows();
  args.cols = q.size(q.ndim() - 1);
  args.q = q.data();
  args.ldq = q.row_stride();
  args.q_type = q.dtype;
  args.epilogue.x_scale = parse_scale(scale, "scale", args.rows, q);
  args.out_type = parse_dtype(out_dtype, "out_dtype", kFloats);
  args.ldo = args.cols;
  const TensorFactory factory(q.dl.device);
  py::object result = factory.make(shape_of(q), args.out_type, &args.out);
  if (q.on_cpu()) {
    const CpuCall on_cpu;
    cpu::dequantize(args);
  } else {
    apply_epilogue(args, q.device(), factory.current_stream());
  }
  return result;
}

}  // namespace

void bind_quantize(py::module_& module) {
  module.def("quantize_per_tensor", &per_tensor, py::arg("x"), py::arg("scale"));
  module.def("quantize_per_token", &per_token, py::arg("x"));
  module.def("rows", &rows, py::arg("call"));
  module.def("dequantize", &dequantize, py::arg("q"), py::arg("scale"), py::arg("out_dtype"));
}

}  // namespace octofuse
