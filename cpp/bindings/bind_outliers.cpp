// LLM.int8(): what stands in front of its int8 product. Other devices and dtypes are computed in Python (None).
#include "arguments.h"
#include "module.h"
#include "octofuse/device.h"
#include "octofuse/error.h"
#include "octofuse/outliers.h"

namespace octofuse {
namespace {

void check_weight(const TensorView& w, const TensorView& x, int64_t k) {
  expect_dtype(w, {DType::kInt8});
  expect_same_device(w, x);
  constexpr int64_t kMostChannels = 128 * int64_t{65535};  // of a grid's second dimension
  if (w.ndim() == 2 && w.size(0) > kMostChannels) {
    refuse<ValueError>("w", "N up to 8388480", "shape " + w.shape_text());
  }
  if (w.ndim() != 2 || w.size(1) != k || w.size(0) < 1 || !w.is_contiguous()) {
    refuse<ValueError>("w", "a contiguous tensor of shape [N, " + std::to_string(k) + "]", w.shape_text());
  }
}

// q, scales and the outliers' product; None where no kernel serves.
py::object outlier_product_op(py::handle x_object, py::handle w_object, py::handle w_scale, double threshold) {
  const TensorView x(x_object, "x");
  expect_dtype(x, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  expect_known_device(x);
  if (x.ndim() < 1) refuse<ValueError>("x", "at least one dimension, [..., K]", "shape []");
  OutlierArgs args;
  args.k = x.size(x.ndim() - 1);
  args.m = x.rows();
  if (args.k < 1 || args.k > kMaxK) refuse<ValueError>("x", "K from 1 to 131071", "shape " + x.shape_text());
  if (args.m > kMaxExtent) refuse<ValueError>("x", "fewer than 2^31 rows", "shape " + x.shape_text());
  const TensorView w(w_object, "w");
  check_weight(w, x, args.k);
  args.n = w.size(0);
  args.w_scale = parse_scale(w_scale, "w_scale", args.n, x);
  if (!(static_cast<float>(threshold) > 0.0F))
    refuse<ValueError>("threshold", "more than 0", std::to_string(threshold));
  if (x.on_cpu() || x.dtype == DType::kFloat32 || !device_capability(x.device()).kernels_mma) return py::none();
  args.type = x.dtype;
  args.x = x.data();
  args.ldx = x.row_stride();
  args.threshold = static_cast<float>(threshold);
  args.w = w.data<const int8_t>();
  TensorFactory factory(x.dl.device);
  std::vector<int64_t> shape(x.dl.shape, x.dl.shape + x.ndim());
  void* q = nullptr;
  void* scales = nullptr;
  py::object codes = factory.make(shape, DType::kInt8, &q);
  py::object scale = factory.make({args.m, 1}, DType::kFloat32, &scales);
  shape.back() = args.n;
  py::object product = factory.make(shape, args.type, &args.out);
  args.q = static_cast<int8_t*>(q);
  args.scales = static_cast<float*>(scales);
  outlier_product(args, x.device(), factory.current_stream(),
                  [&factory](size_t bytes) { return factory.scratch(bytes); });
  return py::make_tuple(codes, scale, product);
}

}  // namespace

void bind_outliers(py::module_& module) { module.def("outlier_product", &outlier_product_op); }

}  // namespace octofuse
