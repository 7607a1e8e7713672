// LLM.int8() on a GPU. Other devices and dtypes are computed in Python (None).
#include <algorithm>

#include "call.h"
#include "linear_call.h"
#include "module.h"
#include "octofuse/device.h"
#include "octofuse/error.h"
#include "octofuse/outliers.h"

namespace octofuse {
namespace {

void check_weight(const TensorView& w, const TensorView& x, int64_t k) {
  expect_dtype(w, {DType::kInt8});
  expect_same_device(w, x);
  if (w.ndim() != 2 || w.size(1) != k || w.size(0) < 1 || w.size(0) > kMaxExtent || !w.is_contiguous()) {
    refuse<ValueError>("w", "a contiguous tensor of shape [N, " + std::to_string(k) + "]", w.layout_text());
  }
}

// What there is to multiply, checked; `threshold` too.
struct OutlierCall {
  LinearCall linear;
  OutlierArgs args;

  OutlierCall(py::handle x_object, py::handle w_object, double threshold)
      : linear{TensorView(x_object, "x"), TensorView(w_object, "w"), {}, {}, {}, {}, {}, {}} {
    const TensorView& x = linear.x;
    expect_dtype(x, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
    expect_known_device(x);
    if (x.ndim() < 1) refuse<ValueError>("x", "at least one dimension, [..., K]", "shape []");
    args.k = x.size(x.ndim() - 1);
    args.m = x.rows();
    if (args.k < 1 || args.k > kMaxK) refuse<ValueError>("x", "K from 1 to 131071", "shape " + x.shape_text());
    if (args.m > kMaxExtent) refuse<ValueError>("x", "fewer than 2^31 rows", "shape " + x.shape_text());
    check_weight(linear.w, x, args.k);
    args.n = linear.w.size(0);
    if (!(static_cast<float>(threshold) > 0.0F))
      refuse<ValueError>("threshold", "more than 0", std::to_string(threshold));
    args.type = x.dtype;
    args.x = x.data();
    args.ldx = x.row_stride();
    args.threshold = static_cast<float>(threshold);
    args.w = linear.w.data<const int8_t>();
    linear.args.m = args.m;
    linear.args.n = args.n;
    linear.args.k = args.k;
    linear.out_shape.assign(x.dl.shape, x.dl.shape + x.ndim());
    linear.out_shape.back() = args.n;
  }

  // Whether this library has kernels for it.
  bool on_gpu() const {
    const TensorView& x = linear.x;
    return !x.on_cpu() && x.dtype != DType::kFloat32 && device_capability(x.device()).kernels_mma;
  }
};

// q, scales and the outliers' product.
py::object outlier_product_op(py::handle x, py::handle w, py::handle w_scale, double threshold) {
  OutlierCall call(x, w, threshold);
  OutlierArgs& args = call.args;
  const ScaleView scale = parse_scale(w_scale, "w_scale", args.n, call.linear.x);
  if (!call.on_gpu()) return py::none();
  const int device = call.linear.x.device();
  TensorFactory factory(call.linear.x.dl.device);
  std::vector<int64_t> shape = call.linear.out_shape;
  void* out = nullptr;
  py::object product = factory.make(shape, args.type, &out);
  shape.back() = args.k;
  void* q = nullptr;
  void* scales = nullptr;
  py::object codes = factory.make(shape, DType::kInt8, &q);
  py::object scales_of_rows = factory.make({args.m, 1}, DType::kFloat32, &scales);
  args.q = static_cast<int8_t*>(q);
  args.scales = static_cast<float*>(scales);
  if (args.m > 0) {
    const Allocator allocate = [&factory](size_t bytes) { return factory.scratch(bytes); };
    const OutlierColumns columns = gather_outliers(args, device, factory.current_stream(), allocate);
    outlier_product(args, columns, scale, out, device, factory.current_stream());
  }
  return py::make_tuple(codes, scales_of_rows, product);
}

// The whole linear, where the int8 kernels add the outliers' product themselves.
py::object outlier_linear_op(const py::tuple& fields) {
  constexpr int64_t kMost = 4000000;  // rows of either operand that those kernels take
  const OutlierFields given(fields);
  OutlierCall call(given.x, given.w, given.threshold.cast<double>());
  parse_epilogue(call.linear, given.w_scale, given.bias, given.activation, given.residual);
  GemmArgs& gemm = call.linear.args;
  const int device = call.linear.x.device();
  const Outliers kind = call.on_gpu() ? outliers_of_kernels(gemm.m, device) : Outliers::kNone;
  if (kind == Outliers::kNone || std::max(gemm.m, gemm.n) > kMost) return py::none();
  read_tuning_once(device);
  TensorFactory factory(call.linear.x.dl.device);
  const Allocator allocate = [&factory](size_t bytes) { return factory.scratch(bytes); };
  gemm.out_type = call.args.type;
  gemm.ldo = gemm.n;
  py::object result = factory.make(call.linear.out_shape, gemm.out_type, &gemm.out);
  if (gemm.m == 0) return result;
  const int64_t rows = kind == Outliers::kDigits ? kDigitRows * gemm.m : gemm.m;
  call.args.q = static_cast<int8_t*>(allocate(static_cast<size_t>(rows * gemm.k)));
  call.args.scales = static_cast<float*>(allocate(static_cast<size_t>(gemm.m) * sizeof(float)));
  const Stream stream = factory.current_stream();
  const auto find = kind == Outliers::kDigits ? outlier_digits : gather_outliers;
  gemm.outliers = find(call.args, device, stream, allocate);
  gemm.x = call.args.q;
  gemm.w = call.args.w;
  gemm.ldx = gemm.ldw = gemm.k;
  gemm.epilogue.x_scale = {call.args.scales, 1, 1.0F};
  gemm.constant_weight = given.constant_weight.cast<bool>();
  const Candidate& candidate = select(problem_of(call.linear), device_capability(device), "auto");
  run_gemm(candidate, gemm, device, stream, allocate);
  return result;
}

}  // namespace

void bind_outliers(py::module_& module) {
  module.def("outlier_product", &outlier_product_op);
  module.def("outlier_linear", &outlier_linear_op, py::arg("call"));
}

}  // namespace octofuse
