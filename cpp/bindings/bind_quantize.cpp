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

// op: "copy", "layer_norm", "rms_norm", "activation", "gated_activation" or "reorder"; returns make_row_results().
py::object rows(const py::tuple& fields) {
  const RowsFields given(fields);
  const TensorView x(given.x, "x");
  RowPassArgs args = checked_rows(x);
  parse_rows(given, x, args);
  if (args.norm != Norm::kNone) parse_added(given.residual, x, args);
  const TensorFactory factory(x.dl.device);
  py::list results = make_row_results(given, x, factory, args);
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
