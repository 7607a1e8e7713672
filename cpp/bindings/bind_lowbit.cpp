// Linears with weights of 1 to 8 bits. What the engine "dequantized" takes is checked here and computed in Python
// (None).
#include <pybind11/stl.h>

#include <cmath>
#include <optional>

#include "arguments.h"
#include "call.h"
#include "cpu_call.h"
#include "module.h"
#include "octofuse/cpu.h"
#include "octofuse/device.h"
#include "octofuse/error.h"
#include "octofuse/lowbit.h"
#include "row_call.h"

namespace octofuse {
namespace {

// A weight as it was given, checked. The views keep alive what `args` points into.
struct LowbitWeight {
  TensorView packed, scale;
  std::optional<TensorView> zero, group_scale;
  LowbitArgs args;
};

LowbitFormat parse_kind(const std::string& kind, int bits) {
  if (bits < 1 || bits > 8) refuse<ValueError>("bits", "1 to 8", std::to_string(bits));
  if (kind == "planes") return LowbitFormat::kPlanes;
  if (kind == "codebook") {
    if (bits != 4) refuse<ValueError>("bits", "4 beside a codebook", std::to_string(bits));
    return LowbitFormat::kCodebook;
  }
  if (kind == "float8") {
    if (bits != 8) refuse<ValueError>("bits", "8 of float8", std::to_string(bits));
    return LowbitFormat::kFloat8;
  }
  if (kind == "two_level") {
    if (bits != 4) refuse<ValueError>("bits", "4 of two levels", std::to_string(bits));
    return LowbitFormat::kTwoLevel;
  }
  return kind == "sparse12" ? LowbitFormat::kSparse12 : LowbitFormat::kUniform;
}

Levels parse_levels(py::handle given) {
  Levels levels{};
  const auto values = given.is_none() ? std::vector<double>() : given.cast<std::vector<double>>();
  if (values.size() != levels.size()) refuse<ValueError>("levels", "16 numbers", std::to_string(values.size()));
  for (size_t i = 0; i < levels.size(); ++i) {
    constexpr double kLargest = 65504.0;  // of fp16
    if (!(std::abs(values[i]) <= kLargest)) {
      refuse<ValueError>("levels", "numbers from -65504 to 65504", std::to_string(values[i]));
    }
    levels[i] = static_cast<float>(values[i]);
  }
  return levels;
}

// Contiguous, on the packed words' device.
void expect_beside(const TensorView& tensor, const std::vector<int64_t>& shape, const TensorView& packed) {
  expect_same_device(tensor, packed);
  if (shape_of(tensor) != shape || !tensor.is_contiguous()) {
    refuse<ValueError>(tensor.name, "a contiguous tensor of shape " + text_of(shape), tensor.layout_text());
  }
}

// Of all groups: given, or the middle of the codes, which leaves int8 values from -127 on.
int twice_zero_of(py::handle zero_point, int bits) {
  const int codes = 1 << bits;
  if (zero_point.is_none()) return bits == 8 ? codes : codes - 1;
  const auto zero = zero_point.cast<int64_t>();
  if (zero < 0 || zero >= codes) refuse<ValueError>("zero", "0 to " + std::to_string(codes - 1), std::to_string(zero));
  return static_cast<int>(2 * zero);
}

// A tensor of integers, `kind` and bits of which are `text`.
void check_integers(py::handle given, const char* name, int kind, int bits, const char* text,
                    const std::vector<int64_t>& shape, const TensorView& packed, std::optional<TensorView>& view) {
  view.emplace(given, name);
  if (view->dl.dtype.code != kind || view->dl.dtype.bits != bits) {
    refuse<TypeError>(name, std::string("dtype ") + text, view->dtype_text());
  }
  expect_beside(*view, shape, packed);
}

// scale is called "alpha" for planes: [groups, planes, N].
LowbitWeight checked_weight(py::handle packed, py::handle scale, py::handle zero, py::handle zero_point,
                            const std::string& kind, int bits, py::handle group, py::handle levels,
                            py::handle group_scale, int64_t k) {
  LowbitArgs args;
  args.format = parse_kind(kind, bits);
  if (args.format == LowbitFormat::kCodebook) args.levels = parse_levels(levels);
  args.bits = bits;
  const bool planes = args.format == LowbitFormat::kPlanes;
  LowbitWeight weight{TensorView(packed, "packed"), TensorView(scale, planes ? "alpha" : "scale"), {}, {}, args};
  const int64_t columns = group.is_none() ? k : group.cast<int64_t>();
  if (columns < 1) refuse<ValueError>("group", "None or at least 1", std::to_string(columns));
  const int64_t groups = (k + columns - 1) / columns;
  expect_dtype(weight.scale, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  expect_known_device(weight.packed);
  const int64_t n = weight.scale.ndim() > 0 ? weight.scale.size(weight.scale.ndim() - 1) : 0;
  if (n < 1) refuse<ValueError>(weight.scale.name, "N >= 1 values of each group", "shape " + weight.scale.shape_text());
  const bool has_levels = args.format == LowbitFormat::kTwoLevel;
  const int64_t scales = has_levels ? 1 : groups;  // of a channel
  expect_beside(weight.scale, planes ? std::vector<int64_t>{scales, bits, n} : std::vector<int64_t>{scales, n},
                weight.packed);
  expect_dtype(weight.packed, {DType::kInt32});
  const int64_t words = (args.format == LowbitFormat::kSparse12 ? 4 : bits) * ((k + 127) / 128) * 4;
  expect_beside(weight.packed, {(n + 15) / 16 * 16, words}, weight.packed);
  if (has_levels) {
    check_integers(group_scale, "group_scale", kDLInt, 16, "int16", {groups, n}, weight.packed, weight.group_scale);
    weight.args.group_scale = weight.group_scale->data<const uint16_t>();
  } else if (!zero.is_none()) {
    check_integers(zero, "zero", kDLUInt, 8, "uint8", {groups, n}, weight.packed, weight.zero);
    weight.args.zero = weight.zero->data<const uint8_t>();
  } else if (args.format == LowbitFormat::kUniform) {
    weight.args.twice_zero = twice_zero_of(zero_point, bits);
  }
  weight.args.n = static_cast<int>(n);
  weight.args.k = static_cast<int>(k);
  weight.args.group = columns >= k ? 0 : static_cast<int>(columns);
  weight.args.type = weight.args.out_type = weight.scale.dtype;
  weight.args.packed = weight.packed.data<const uint32_t>();
  weight.args.scale = weight.scale.data();
  return weight;
}

// A call as it was given, checked.
struct LowbitCall {
  TensorView x;
  LowbitWeight weight;
  std::optional<TensorView> bias, residual;
  RowPassArgs rows;
  std::vector<int64_t> out_shape;
  LowbitProblem problem;
};

void check_activations(const TensorView& x) {
  expect_dtype(x, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8});
  expect_known_device(x);
  if (x.ndim() < 1) refuse<ValueError>("x", "at least one dimension, [..., K]", "shape []");
  const int64_t k = x.size(x.ndim() - 1);
  if (k < 1 || k > kMaxK) refuse<ValueError>("x", "K from 1 to 131071", "shape " + x.shape_text());
  if (x.rows() > kMaxExtent) refuse<ValueError>("x", "fewer than 2^31 rows", "shape " + x.shape_text());
}

// A bias or residual of this shape, or nothing.
void parse_addend(py::handle object, const char* name, const std::vector<int64_t>& shape, const TensorView& x,
                  std::optional<TensorView>& view) {
  if (object.is_none()) return;
  view.emplace(object, name);
  expect_dtype(*view, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  expect_same_device(*view, x);
  if (shape_of(*view) != shape) refuse<ValueError>(name, "shape " + text_of(shape), view->shape_text());
}

void parse_epilogue(LowbitCall& call, const LowbitFields& given) {
  LowbitArgs& args = call.weight.args;
  args.epilogue.activation = parse_activation(given.activation);
  args.gated = given.gated.cast<bool>();
  if (args.gated) {
    if (args.n % 2 != 0) refuse<ValueError>("gated", "False for an odd N", "True, N = " + std::to_string(args.n));
    if (args.epilogue.activation == Activation::kNone) refuse<ValueError>("activation", "one beside gated", "None");
    if (!given.residual.is_none()) refuse<ValueError>("residual", "None beside gated", "one");
    call.out_shape.back() = args.n / 2;
  }
  parse_addend(given.bias, "bias", {args.n}, call.x, call.bias);
  parse_addend(given.residual, "residual", call.out_shape, call.x, call.residual);
  if (!given.x_scale.is_none()) args.epilogue.x_scale = parse_scale(given.x_scale, "x_scale", args.m, call.x);
  if (!given.out_scale.is_none()) {
    args.epilogue.out_scale = parse_scale(given.out_scale, "out_scale", -1, call.x);
    args.out_type = DType::kInt8;
  }
  if (call.bias.has_value()) {
    if (!call.bias->is_contiguous()) {
      refuse<ValueError>("bias", "a contiguous tensor", "stride " + std::to_string(call.bias->stride(0)));
    }
    args.epilogue.bias = call.bias->data();
    args.epilogue.bias_type = call.bias->dtype;
  }
  if (call.residual.has_value()) {
    args.epilogue.residual = call.residual->data();
    args.epilogue.residual_ld = call.residual->row_stride();
    args.epilogue.residual_type = call.residual->dtype;
  }
}

bool has_levels(const LowbitCall& call) { return call.weight.args.format == LowbitFormat::kTwoLevel; }

// What no CUDA kernel at all takes, by name; nullptr if nothing stands against one.
const char* why_unserved(const LowbitCall& call, bool has_offset) {
  const DType type = call.weight.scale.dtype;
  const auto other = [&](const std::optional<TensorView>& view) { return view.has_value() && view->dtype != type; };
  if (call.x.on_cpu()) return "needs tensors on cuda";
  if (has_levels(call) && call.x.dtype != DType::kInt8) return "kernels take int8 x beside two levels";
  if (has_offset) return "kernels know no offset";
  if (type == DType::kFloat32) return "kernels take float16 and bfloat16 scales, got float32";
  if (call.x.dtype != DType::kInt8 && call.x.dtype != type) return "x must have the scale's dtype, or be int8";
  if (other(call.bias)) return "bias must have the scale's dtype";
  if (other(call.residual)) return "residual must have the scale's dtype";
  return nullptr;
}

const char* why_not_cpu(const LowbitCall& call, bool has_offset) {
  if (!call.x.on_cpu()) return "needs tensors on the CPU";
  if (has_offset) return "kernels know no offset";
  if (has_levels(call) && call.x.dtype != DType::kInt8) return "it takes int8 x beside two levels";
  return cpu::takes_group(call.weight.args.group) ? nullptr : "it takes groups of whole multiples of 32 columns";
}

LowbitCall checked_call(const LowbitFields& given) {
  const TensorView x(given.x, "x");
  check_activations(x);
  const int64_t k = x.size(x.ndim() - 1);
  LowbitCall call{x,
                  checked_weight(given.packed, given.scale, given.zero, given.zero_point, parse_str(given.kind, "kind"),
                                 given.bits.cast<int>(), given.group, given.levels, given.group_scale, k),
                  {},
                  {},
                  {},
                  shape_of(x),
                  {}};
  LowbitArgs& args = call.weight.args;
  expect_same_device(call.weight.packed, x);
  call.out_shape.back() = args.n;
  args.m = static_cast<int>(x.rows());
  args.ldx = x.row_stride();
  args.x = x.data();
  args.x_is_int8 = x.dtype == DType::kInt8;
  if (!args.x_is_int8) args.out_type = x.dtype;
  call.rows.type = x.dtype;  // with a norm, checked_rows() says all of it
  parse_epilogue(call, given);
  if (!given.norm.is_none()) {
    if (args.x_is_int8) refuse<ValueError>("norm", "None for an int8 x", "'" + parse_str(given.norm, "norm") + "'");
    call.rows = checked_rows(x);
    const NormArguments norm{given.norm_weight, given.norm_bias, given.eps, "norm_weight", "norm_bias"};
    parse_norm(parse_str(given.norm, "norm"), norm, x, call.rows);
  }
  call.problem = problem_of(args);
  const bool has_offset = !given.offset.is_none();
  if (const char* reason = why_unserved(call, has_offset)) call.problem.unserved = reason;
  call.problem.why_not_cpu = why_not_cpu(call, has_offset);
  return call;
}

Capability capability_of(const TensorView& x) { return x.on_cpu() ? Capability() : device_capability(x.device()); }

py::object lowbit_linear_op(const py::tuple& fields) {
  const LowbitFields given(fields);
  LowbitCall call = checked_call(given);
  LowbitArgs& args = call.weight.args;
  const LowbitEngine engine = select_lowbit(call.problem, capability_of(call.x), parse_str(given.engine, "engine"));
  if (engine == LowbitEngine::kDequantized && (args.m > 0 || call.problem.unserved != nullptr)) return py::none();
  if (engine == LowbitEngine::kCpu && args.gated) return py::none();
  TensorFactory factory(call.x.dl.device);
  py::object result = factory.make(call.out_shape, args.out_type, &args.out);
  if (args.m == 0) return result;
  if (engine == LowbitEngine::kCpu) {
    const CpuCall on_cpu;
    cpu::lowbit_linear(call.rows, args);
    return result;
  }
  args.constant_weight = given.constant_weight.cast<bool>();
  lowbit_linear(call.rows, args, engine, call.x.device(), factory.current_stream(),
                [&factory](size_t bytes) { return factory.scratch(bytes); });
  return result;
}

py::dict explain_op(const py::tuple& fields) {
  const LowbitFields given(fields);
  const LowbitCall call = checked_call(given);
  const LowbitDecision decision =
      explain_lowbit(call.problem, capability_of(call.x), parse_str(given.engine, "engine"));
  py::dict result;
  result["chosen"] = name_of(decision.chosen);
  result["why"] = decision.why;
  result["declined"] = decision.declined;
  result["is_integer"] = call.problem.is_integer;
  return result;
}

// The choice for a device that need not be here; group 0: a row.
py::dict select_op(const std::string& kind, int bits, int64_t m, int64_t n, int64_t k, int64_t group, bool has_zeros,
                   const std::string& engine, int compute_capability, int sm_count, int shared_memory,
                   bool is_integer) {
  LowbitProblem problem;
  problem.format = parse_kind(kind, bits);
  problem.bits = bits;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.group = group >= k ? 0 : group;
  problem.has_zeros = has_zeros;
  problem.is_integer = is_integer;
  Capability capability = capability_for(compute_capability, sm_count);
  capability.shared_memory = shared_memory;
  const LowbitDecision decision = explain_lowbit(problem, capability, engine);
  py::dict result;
  result["chosen"] = name_of(decision.chosen);
  result["why"] = decision.why;
  result["declined"] = decision.declined;
  const LowbitTile tile = tile_of(problem, decision.chosen);
  if (tile.tokens > 0) {
    result["tile"] = py::make_tuple(tile.tokens, tile.channels, tile.split);
    result["shares"] = tile.shares;
  }
  return result;
}

py::object lowbit_dequantize_op(py::handle packed, py::handle scale, py::handle zero, py::handle zero_point,
                                const std::string& kind, int bits, py::handle group, py::handle levels,
                                py::handle group_scale, int64_t k) {
  const LowbitWeight weight =
      checked_weight(packed, scale, zero, zero_point, kind, bits, group, levels, group_scale, k);
  const bool served = !weight.packed.on_cpu() && weight.scale.dtype != DType::kFloat32 &&
                      problem_of(weight.args).unserved == nullptr &&
                      device_capability(weight.packed.device()).kernels_mma;
  if (!served) return py::none();
  const TensorFactory factory(weight.packed.dl.device);
  void* w = nullptr;
  py::object result = factory.make({weight.args.n, k}, weight.args.type, &w);
  lowbit_dequantize(weight.args, w, weight.packed.device(), factory.current_stream());
  return result;
}

}  // namespace

void bind_lowbit(py::module_& module) {
  module.def("lowbit_linear", &lowbit_linear_op, py::arg("call"));
  module.def("lowbit_explain", &explain_op, py::arg("call"));
  module.def("lowbit_select", &select_op, py::arg("kind"), py::arg("bits"), py::arg("m"), py::arg("n"), py::arg("k"),
             py::arg("group"), py::arg("has_zeros"), py::arg("engine"), py::arg("compute_capability"),
             py::arg("sm_count"), py::arg("shared_memory"), py::arg("is_integer") = false);
  module.def("lowbit_dequantize", &lowbit_dequantize_op);
}

}  // namespace octofuse
