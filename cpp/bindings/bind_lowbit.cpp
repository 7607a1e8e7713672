// Linears with weights of 1 to 8 bits. What no kernel takes is checked here and computed in Python (None).
#include <optional>

#include "arguments.h"
#include "module.h"
#include "octofuse/device.h"
#include "octofuse/error.h"
#include "octofuse/lowbit.h"
#include "row_call.h"

namespace octofuse {
namespace {

// A weight as it was given, checked. The views keep alive what `args` points into.
struct LowbitWeight {
  TensorView packed, scale;
  std::optional<TensorView> zero;
  LowbitArgs args;
};

LowbitFormat parse_kind(const std::string& kind, int bits) {
  if (bits < 1 || bits > 8) refuse<ValueError>("bits", "1 to 8", std::to_string(bits));
  if (kind == "planes") return LowbitFormat::kPlanes;
  return kind == "sparse12" ? LowbitFormat::kSparse12 : LowbitFormat::kUniform;
}

// Contiguous, on the packed words' device.
void expect_beside(const TensorView& tensor, const std::vector<int64_t>& shape, const TensorView& packed) {
  expect_same_device(tensor, packed);
  if (shape_of(tensor) != shape || !tensor.is_contiguous()) {
    refuse<ValueError>(tensor.name, "a contiguous tensor of shape " + text_of(shape), tensor.shape_text());
  }
}

// scale is called "alpha" for planes: [groups, planes, N].
LowbitWeight checked_weight(py::handle packed, py::handle scale, py::handle zero, const std::string& kind, int bits,
                            py::handle group, int64_t k) {
  LowbitArgs args;
  args.format = parse_kind(kind, bits);
  args.bits = bits;
  const bool planes = args.format == LowbitFormat::kPlanes;
  LowbitWeight weight{TensorView(packed, "packed"), TensorView(scale, planes ? "alpha" : "scale"), {}, args};
  const int64_t columns = group.is_none() ? k : group.cast<int64_t>();
  if (columns < 1) refuse<ValueError>("group", "None or at least 1", std::to_string(columns));
  const int64_t groups = (k + columns - 1) / columns;
  expect_dtype(weight.scale, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  expect_known_device(weight.packed);
  const int64_t n = weight.scale.ndim() > 0 ? weight.scale.size(weight.scale.ndim() - 1) : 0;
  if (n < 1) refuse<ValueError>(weight.scale.name, "N >= 1 values of each group", "shape " + weight.scale.shape_text());
  expect_beside(weight.scale, planes ? std::vector<int64_t>{groups, bits, n} : std::vector<int64_t>{groups, n},
                weight.packed);
  expect_dtype(weight.packed, {DType::kInt32});
  const int64_t words = (args.format == LowbitFormat::kSparse12 ? 4 : bits) * ((k + 127) / 128) * 4;
  expect_beside(weight.packed, {(n + 15) / 16 * 16, words}, weight.packed);
  if (!zero.is_none()) {
    weight.zero.emplace(zero, "zero");
    if (weight.zero->dl.dtype.code != kDLUInt || weight.zero->dl.dtype.bits != 8) {
      refuse<TypeError>("zero", "dtype uint8", weight.zero->dtype_text());
    }
    expect_beside(*weight.zero, {groups, n}, weight.packed);
    weight.args.zero = weight.zero->data<const uint8_t>();
  }
  weight.args.n = static_cast<int>(n);
  weight.args.k = static_cast<int>(k);
  weight.args.group = columns >= k ? 0 : static_cast<int>(columns);
  weight.args.type = weight.scale.dtype;
  weight.args.packed = weight.packed.data<const uint32_t>();
  weight.args.scale = weight.scale.data();
  return weight;
}

// What every kernel here asks of a weight.
bool has_kernels(const LowbitWeight& weight) {
  return !weight.packed.on_cpu() && weight.scale.dtype != DType::kFloat32 && takes_group(weight.args.group) &&
         reinterpret_cast<uintptr_t>(weight.packed.data()) % 16 == 0;
}

py::object lowbit_linear_op(py::handle x_object, py::handle x_scale, py::handle packed, py::handle scale,
                            py::handle zero, py::handle bias_object, const std::string& kind, int bits,
                            py::handle group, py::handle activation, py::handle residual_object, bool constant_weight) {
  const TensorView x(x_object, "x");
  expect_dtype(x, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8});
  expect_known_device(x);
  if (x.ndim() < 1) refuse<ValueError>("x", "at least one dimension, [..., K]", "shape []");
  const int64_t k = x.size(x.ndim() - 1);
  if (k < 1 || k > kMaxK) refuse<ValueError>("x", "K from 1 to 131071", "shape " + x.shape_text());
  if (x.rows() > kMaxExtent) refuse<ValueError>("x", "fewer than 2^31 rows", "shape " + x.shape_text());
  LowbitWeight weight = checked_weight(packed, scale, zero, kind, bits, group, k);
  expect_same_device(weight.packed, x);
  LowbitArgs& args = weight.args;
  args.activation = parse_activation(activation);
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = args.n;
  std::optional<TensorView> bias;
  std::optional<TensorView> residual;
  args.x_is_int8 = x.dtype == DType::kInt8;
  bool halves = args.x_is_int8 || x.dtype == args.type;
  const auto parse = [&](py::handle object, const char* name, const std::vector<int64_t>& want,
                         std::optional<TensorView>& view) {
    if (object.is_none()) return;
    view.emplace(object, name);
    expect_dtype(*view, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
    expect_same_device(*view, x);
    if (shape_of(*view) != want) refuse<ValueError>(name, "shape " + text_of(want), view->shape_text());
    halves = halves && view->dtype == args.type;
  };
  parse(bias_object, "bias", {args.n}, bias);
  parse(residual_object, "residual", shape, residual);
  args.m = static_cast<int>(x.rows());
  args.ldx = x.row_stride();
  if (!x_scale.is_none()) args.x_scale = parse_scale(x_scale, "x_scale", args.m, x);
  if (bias.has_value()) {
    if (!bias->is_contiguous())
      refuse<ValueError>("bias", "a contiguous tensor", "stride " + std::to_string(bias->stride(0)));
    args.bias = bias->data();
  }
  if (residual.has_value()) {
    args.residual = residual->data();
    args.residual_ld = residual->row_stride();
  }
  if (!halves || !has_kernels(weight)) return py::none();
  const int device = x.device();
  args.x = x.data();
  if (args.m > 0 && !takes_lowbit(args, device)) return py::none();
  TensorFactory factory(x.dl.device);
  py::object result = factory.make(shape, args.type, &args.out);
  if (args.m == 0) return result;
  args.constant_weight = constant_weight;
  lowbit_linear(args, device, factory.current_stream());
  return result;
}

py::object lowbit_dequantize_op(py::handle packed, py::handle scale, py::handle zero, const std::string& kind, int bits,
                                py::handle group, int64_t k) {
  const LowbitWeight weight = checked_weight(packed, scale, zero, kind, bits, group, k);
  if (!has_kernels(weight) || !device_capability(weight.packed.device()).kernels_mma) return py::none();
  const TensorFactory factory(weight.packed.dl.device);
  void* w = nullptr;
  py::object result = factory.make({weight.args.n, k}, weight.args.type, &w);
  lowbit_dequantize(weight.args, w, weight.packed.device(), factory.current_stream());
  return result;
}

}  // namespace

void bind_lowbit(py::module_& module) {
  module.def("lowbit_linear", &lowbit_linear_op, py::arg("x"), py::arg("x_scale"), py::arg("packed"), py::arg("scale"),
             py::arg("zero"), py::arg("bias"), py::arg("kind"), py::arg("bits"), py::arg("group"),
             py::arg("activation"), py::arg("residual"), py::arg("constant_weight"));
  module.def("lowbit_dequantize", &lowbit_dequantize_op);
}

}  // namespace octofuse
