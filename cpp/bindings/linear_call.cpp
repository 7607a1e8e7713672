#include "linear_call.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "octofuse/cpu.h"
#include "octofuse/error.h"

namespace octofuse {
namespace {

// See linear_call.h.
double onednn_products = std::numeric_limits<double>::infinity();

// |x - x_zero| is at most 255 and |w| at most 128: beyond this K the corrected accumulator could leave int32.
constexpr int64_t kMaxAsymmetricK = 65793;

void check_operands(const TensorView& x, const TensorView& w, std::initializer_list<DType> x_types) {
  expect_dtype(x, x_types);
  expect_dtype(w, {DType::kInt8, DType::kE4M3});
  expect_known_device(x);
  expect_same_device(w, x);
  if (x.ndim() < 1) refuse<ValueError>("x", "at least one dimension, [..., K]", "shape " + x.shape_text());
  if (w.ndim() != 2) refuse<ValueError>("w", "two dimensions, [N, K]", "shape " + w.shape_text());
  const int64_t k = x.size(x.ndim() - 1);
  if (w.size(1) != k) {
    refuse<ValueError>("w", "shape [N, " + std::to_string(k) + "] (x has K = " + std::to_string(k) + ")",
                       w.shape_text());
  }
  if (k < 1) refuse<ValueError>("x", "K >= 1", "shape " + x.shape_text());
  if (w.dtype == DType::kInt8 && k > kMaxK) {
    refuse<ValueError>("x", "K <= 131071, so that int32 cannot overflow", "K = " + std::to_string(k));
  }
  if (k > kMaxExtent - 128) refuse<ValueError>("x", "K < 2^31 - 128", "K = " + std::to_string(k));
  if (w.size(0) < 1) refuse<ValueError>("w", "N >= 1", "shape " + w.shape_text());
  if (w.size(0) > kMaxExtent) refuse<ValueError>("w", "N < 2^31", "shape " + w.shape_text());
  if (x.rows() > kMaxExtent) refuse<ValueError>("x", "fewer than 2^31 rows", "shape " + x.shape_text());
}

}  // namespace

LinearCall checked_operands(py::handle x_object, py::handle w_object, std::initializer_list<DType> x_types) {
  LinearCall call{TensorView(x_object, "x"), TensorView(w_object, "w"), {}, {}, {}, {}, {}, {}};
  check_operands(call.x, call.w, x_types);
  GemmArgs& args = call.args;
  args.m = call.x.rows();
  args.k = call.x.size(call.x.ndim() - 1);
  args.n = call.w.size(0);
  args.x = call.x.data<const int8_t>();
  args.ldx = call.x.row_stride();
  args.w = call.w.data<const int8_t>();
  args.w_type = call.w.dtype;
  args.x_type = is_float8(call.x.dtype) ? call.x.dtype : args.w_type;  // of floats: what they are quantised to
  const bool pair =
      is_float8(args.x_type) == is_float8(args.w_type) && (call.x.dtype != DType::kInt8 || args.w_type == DType::kInt8);
  if (!pair) {
    refuse<TypeError>(
        "w", call.x.dtype == DType::kInt8 ? "dtype int8 beside x in int8" : "dtype float8_e4m3fn beside x in float8",
        call.w.dtype_text());
  }
  args.ldw = call.w.row_stride();
  call.out_shape.assign(call.x.dl.shape, call.x.dl.shape + call.x.ndim() - 1);
  call.out_shape.push_back(args.n);
  return call;
}

namespace {

// x_scale or w_scale of blocks: fp32 [rows, columns], any strides.
BlockScales parse_blocks(py::handle object, const char* name, int64_t rows, int64_t columns, const TensorView& x) {
  const std::string shape = text_of({rows, columns});
  if (PyFloat_Check(object.ptr()) != 0) refuse<TypeError>(name, "a tensor " + shape + " of blocks' scales", "float");
  const TensorView tensor(object, name);
  expect_dtype(tensor, {DType::kFloat32});
  expect_same_device(tensor, x);
  if (tensor.ndim() != 2 || tensor.size(0) != rows || tensor.size(1) != columns) {
    refuse<ValueError>(name, "shape " + shape + ", a scale of every block", tensor.shape_text());
  }
  return {tensor.data<const float>(), tensor.stride(0), tensor.stride(1)};
}

// Whether w_scale has one for each block of 128 x 128, and not for each channel or one for all.
bool has_blocks(const LinearCall& call, py::handle w_scale) {
  if (call.args.w_type == DType::kInt8 || PyFloat_Check(w_scale.ptr()) != 0 || PyLong_Check(w_scale.ptr()) != 0) {
    return false;
  }
  const TensorView tensor(w_scale, "w_scale");
  return tensor.ndim() == 2 && tensor.numel() > 1 && !(tensor.size(0) == call.args.n && tensor.size(1) == 1);
}

}  // namespace

bool parse_block_scales(LinearCall& call, py::handle x_scale, py::handle w_scale) {
  if (!has_blocks(call, w_scale)) return false;
  GemmArgs& args = call.args;
  const int64_t columns = scale_blocks(args.k);
  args.w_blocks = parse_blocks(w_scale, "w_scale", scale_blocks(args.n), columns, call.x);
  if (!x_scale.is_none()) args.x_blocks = parse_blocks(x_scale, "x_scale", args.m, columns, call.x);
  if (args.fast_accumulate) refuse<ValueError>("fast_accumulate", "False beside scales of blocks", "True");
  return true;
}

void parse_bias(LinearCall& call, py::handle object) {
  if (object.is_none()) return;
  call.bias.emplace(object, "bias");
  const TensorView& bias = *call.bias;
  expect_dtype(bias, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  expect_same_device(bias, call.x);
  if (bias.ndim() != 1 || bias.size(0) != call.args.n) {
    refuse<ValueError>("bias", "shape [" + std::to_string(call.args.n) + "]", bias.shape_text());
  }
  if (!bias.is_contiguous())
    refuse<ValueError>("bias", "a contiguous tensor", "stride " + std::to_string(bias.stride(0)));
  call.args.epilogue.bias = bias.data();
  call.args.epilogue.bias_type = bias.dtype;
}

void parse_residual(LinearCall& call, py::handle object) {
  if (object.is_none()) return;
  call.residual.emplace(object, "residual");
  const TensorView& residual = *call.residual;
  expect_dtype(residual, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  expect_same_device(residual, call.x);
  const bool same_shape = residual.ndim() == static_cast<int>(call.out_shape.size()) &&
                          std::equal(call.out_shape.begin(), call.out_shape.end(), residual.dl.shape);
  if (!same_shape) {
    refuse<ValueError>("residual", "the output's shape " + text_of(call.out_shape), residual.shape_text());
  }
  call.args.epilogue.residual = residual.data();
  call.args.epilogue.residual_type = residual.dtype;
  call.args.epilogue.residual_ld = residual.row_stride();
}

void parse_zero_point(LinearCall& call, py::handle zero, py::handle sums) {
  if (zero.is_none() && sums.is_none()) return;
  if (call.args.w_type != DType::kInt8) {
    refuse<ValueError>(zero.is_none() ? "w_sum" : "x_zero_point", "None beside float8", "one");
  }
  if (zero.is_none()) refuse<ValueError>("x_zero_point", "an int or tensor beside w_sum", "None");
  if (sums.is_none()) {
    refuse<ValueError>("w_sum", "int32 [N], the sums of w's rows, beside x_zero_point (octofuse.weight_sums(w))",
                       "None");
  }
  EpilogueArgs& epilogue = call.args.epilogue;
  if (call.args.k > kMaxAsymmetricK) {
    refuse<ValueError>("x", "K <= 65793 with a zero point, so that int32 cannot overflow",
                       "K = " + std::to_string(call.args.k));
  }
  epilogue.x_zero = parse_int_view(zero, "x_zero_point", call.args.m, call.x, call.x_zero);
  call.w_sum.emplace(sums, "w_sum");
  expect_dtype(*call.w_sum, {DType::kInt32});
  expect_same_device(*call.w_sum, call.x);
  if (call.w_sum->ndim() != 1 || call.w_sum->size(0) != call.args.n || !call.w_sum->is_contiguous()) {
    refuse<ValueError>("w_sum", "a contiguous tensor of shape [" + std::to_string(call.args.n) + "]",
                       call.w_sum->layout_text());
  }
  epilogue.w_sum = call.w_sum->data<const int32_t>();
}

void parse_epilogue(LinearCall& call, py::handle w_scale, py::handle bias, py::handle activation, py::handle residual) {
  if (call.args.w_blocks.data == nullptr) {
    call.args.epilogue.w_scale = parse_scale(w_scale, "w_scale", call.args.n, call.x);
  }
  parse_bias(call, bias);
  call.args.epilogue.activation = parse_activation(activation);
  parse_residual(call, residual);
}

DType parse_output(LinearCall& call, py::handle out_dtype, py::handle out_scale) {
  if (out_scale.is_none()) {
    return parse_dtype(out_dtype, "out_dtype", {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  }
  call.args.epilogue.out_scale = parse_scale(out_scale, "out_scale", -1, call.x);
  if (call.args.w_type == DType::kInt8) return DType::kInt8;
  return parse_dtype(out_dtype, "out_dtype", {DType::kE4M3, DType::kInt8});
}

bool left_to_onednn(const GemmArgs& args) {
  const double products = static_cast<double>(args.m) * static_cast<double>(args.n) * static_cast<double>(args.k);
  if (args.w_type != DType::kInt8) return false;
  return products >= onednn_products && products >= onednn_products * cpu::max_threads();
}

void prefer_onednn(double products) { onednn_products = products; }

GemmProblem problem_of(const LinearCall& call) {
  const GemmArgs& args = call.args;
  GemmProblem problem;
  problem.m = args.x_rows();
  problem.n = args.n;
  problem.k = args.k;
  problem.out = args.out_type;
  problem.raw = is_raw(args);
  problem.ldo = args.ldo;
  problem.arithmetic = arithmetic_of(args);
  problem.block_scales = args.w_blocks.data != nullptr;
  problem.outliers = args.outliers.kind();
  problem.out_aligned = reinterpret_cast<uintptr_t>(args.out) % 16 == 0;
  const Activation activation = args.epilogue.activation;
  problem.double_activation =
      args.out_type == DType::kFloat32 && activation != Activation::kNone && activation != Activation::kRelu;
  return problem;
}

void read_tuning_once(int device) {
  static std::array<bool, 64> asked{};  // under the GIL
  if (std::exchange(asked.at(static_cast<size_t>(device)), true)) return;
  py::module_::import("octofuse.ops.tuning").attr("load")(device);
}

}  // namespace octofuse
