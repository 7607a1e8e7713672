// Quantisation ops. CPU tensors are checked here and computed in Python (None).
#include "arguments.h"
#include "module.h"
#include "octofuse/error.h"
#include "octofuse/quantize.h"

namespace octofuse {
namespace {

constexpr std::initializer_list<DType> kFloats = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

QuantizeArgs checked(const TensorView& x) {
  expect_dtype(x, kFloats);
  expect_known_device(x);
  if (x.ndim() < 1) refuse<ValueError>("x", "at least one dimension", "shape " + x.shape_text());
  if (x.size(x.ndim() - 1) < 1) refuse<ValueError>("x", "a last dimension of at least 1", "shape " + x.shape_text());
  if (x.rows() > kMaxExtent) refuse<ValueError>("x", "fewer than 2^31 rows", "shape " + x.shape_text());
  QuantizeArgs args;
  args.rows = x.rows();
  args.cols = x.size(x.ndim() - 1);
  args.x = x.data();
  args.ldx = x.row_stride();
  args.x_type = x.dtype;
  return args;
}

std::vector<int64_t> shape_of(const TensorView& tensor) { return {tensor.dl.shape, tensor.dl.shape + tensor.ndim()}; }

py::object per_tensor(py::handle x_object, py::handle scale) {
  const TensorView x(x_object, "x");
  QuantizeArgs args = checked(x);
  args.scale = parse_scale(scale, "scale", -1, x);
  if (x.on_cpu()) return py::none();
  const TensorFactory factory(x.dl.device);
  void* q = nullptr;
  py::object result = factory.make(shape_of(x), DType::kInt8, &q);
  args.q = static_cast<int8_t*>(q);
  quantize_per_tensor(args, x.device(), factory.current_stream());
  return result;
}

py::object per_token(py::handle x_object) {
  const TensorView x(x_object, "x");
  QuantizeArgs args = checked(x);
  if (x.on_cpu()) return py::none();
  const TensorFactory factory(x.dl.device);
  void* q = nullptr;
  void* scales = nullptr;
  py::object result = factory.make(shape_of(x), DType::kInt8, &q);
  py::object result_scales = factory.make({args.rows, 1}, DType::kFloat32, &scales);
  args.q = static_cast<int8_t*>(q);
  args.scales = static_cast<float*>(scales);
  quantize_per_token(args, x.device(), factory.current_stream());
  return py::make_tuple(result, result_scales);
}

py::object dequantize(py::handle q_object, py::handle scale, const std::string& out_dtype) {
  const TensorView q(q_object, "q");
  expect_dtype(q, {DType::kInt8, DType::kInt32});
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
  if (q.on_cpu()) return py::none();
  const TensorFactory factory(q.dl.device);
  py::object result = factory.make(shape_of(q), args.out_type, &args.out);
  apply_epilogue(args, q.device(), factory.current_stream());
  return result;
}

}  // namespace

void bind_quantize(py::module_& module) {
  module.def("quantize_per_tensor", &per_tensor, py::arg("x"), py::arg("scale"));
  module.def("quantize_per_token", &per_token, py::arg("x"));
  module.def("dequantize", &dequantize, py::arg("q"), py::arg("scale"), py::arg("out_dtype"));
}

}  // namespace octofuse
