// The linear ops: every check, then select, then one launch. CPU tensors are checked here too and computed in Python.
#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "arguments.h"
#include "module.h"
#include "octofuse/error.h"
#include "octofuse/gemm.h"

namespace octofuse {
namespace {

// Everything a linear op was given, checked. The views keep the shape memory that `args` points into alive.
struct LinearCall {
  TensorView x, w;
  std::optional<TensorView> bias, residual, w_sum, x_zero;
  GemmArgs args;
  bool raw = false;
  std::vector<int64_t> out_shape;
};

void check_operands(const TensorView& x, const TensorView& w) {
  expect_dtype(x, {DType::kInt8});
  expect_dtype(w, {DType::kInt8});
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
  if (k > kMaxK) {
    refuse<ValueError>("x", "K <= 131071, so that int32 cannot overflow", "K = " + std::to_string(k));
  }
  if (w.size(0) < 1) refuse<ValueError>("w", "N >= 1", "shape " + w.shape_text());
  if (w.size(0) > kMaxExtent) refuse<ValueError>("w", "N < 2^31", "shape " + w.shape_text());
  if (x.rows() > kMaxExtent) refuse<ValueError>("x", "fewer than 2^31 rows", "shape " + x.shape_text());
}

LinearCall checked_operands(py::handle x_object, py::handle w_object) {
  LinearCall call{TensorView(x_object, "x"), TensorView(w_object, "w"), {}, {}, {}, {}, {}, false, {}};
  check_operands(call.x, call.w);
  GemmArgs& args = call.args;
  args.m = call.x.rows();
  args.k = call.x.size(call.x.ndim() - 1);
  args.n = call.w.size(0);
  args.x = call.x.data<const int8_t>();
  args.ldx = call.x.row_stride();
  args.w = call.w.data<const int8_t>();
  args.ldw = call.w.row_stride();
  call.out_shape.assign(call.x.dl.shape, call.x.dl.shape + call.x.ndim() - 1);
  call.out_shape.push_back(args.n);
  return call;
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
    std::string shape;
    for (const int64_t extent : call.out_shape) shape += (shape.empty() ? "[" : ", ") + std::to_string(extent);
    refuse<ValueError>("residual", "the output's shape " + shape + "]", residual.shape_text());
  }
  call.args.epilogue.residual = residual.data();
  call.args.epilogue.residual_type = residual.dtype;
  call.args.epilogue.residual_ld = residual.row_stride();
}

// |x - x_zero| is at most 255 and |w| at most 128: beyond this K the corrected accumulator could leave int32.
constexpr int64_t kMaxAsymmetricK = 65793;

// Asymmetric activations: x stands for x - x_zero, and the sums of w's rows take the zero point out of the product.
void parse_zero_point(LinearCall& call, py::handle zero, py::handle sums) {
  if (zero.is_none() && sums.is_none()) return;
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
                       call.w_sum->shape_text());
  }
  epilogue.w_sum = call.w_sum->data<const int32_t>();
}

GemmProblem problem_of(const LinearCall& call) {
  const GemmArgs& args = call.args;
  GemmProblem problem;
  problem.m = args.m;
  problem.n = args.n;
  problem.k = args.k;
  problem.out = args.out_type;
  problem.raw = call.raw;
  problem.ldo = args.ldo;
  problem.out_aligned = reinterpret_cast<uintptr_t>(args.out) % 16 == 0;
  const Activation activation = args.epilogue.activation;
  problem.double_activation =
      args.out_type == DType::kFloat32 && activation != Activation::kNone && activation != Activation::kRelu;
  return problem;
}

// The first call on a device reads what `octofuse tune` measured there before. The reader reports its own failures.
void read_tuning_once(int device) {
  static std::array<bool, 64> asked{};  // under the GIL
  if (std::exchange(asked.at(static_cast<size_t>(device)), true)) return;
  py::module_::import("octofuse.ops.tuning").attr("load")(device);
}

// Finds or makes the output, selects and launches. CPU tensors stop after the checks: None tells Python to compute.
py::object run(LinearCall& call, DType out_type, const std::string& engine, py::handle out_object) {
  GemmArgs& args = call.args;
  args.out_type = out_type;
  args.ldo = args.n;
  std::optional<TensorView> out;
  if (!out_object.is_none()) {
    out.emplace(parse_out(out_object, call.out_shape, out_type, call.x,
                          {&call.x, &call.w, call.bias ? &*call.bias : nullptr, call.w_sum ? &*call.w_sum : nullptr,
                           call.x_zero ? &*call.x_zero : nullptr}));
    args.out = out->data();
    args.ldo = out->row_stride();
    if (call.residual && (call.residual->data() != args.out || args.epilogue.residual_ld != args.ldo ||
                          call.residual->dtype != out_type)) {
      parse_out(out_object, call.out_shape, out_type, call.x, {&*call.residual});
    }
  }
  if (call.x.on_cpu()) return py::none();
  read_tuning_once(call.x.device());
  TensorFactory factory(call.x.dl.device);
  const Candidate& candidate = select(problem_of(call), device_capability(call.x.device()), engine);
  py::object result =
      out ? py::reinterpret_borrow<py::object>(out_object) : factory.make(call.out_shape, out_type, &args.out);
  run_gemm(candidate, args, call.x.device(), factory.current_stream(),
           [&factory](size_t bytes) { return factory.scratch(bytes); });
  return result;
}

py::object linear(py::handle x, py::handle w, py::handle x_scale, py::handle w_scale, py::handle bias,
                  py::handle activation, py::handle residual, const std::string& out_dtype, py::handle out_scale,
                  const std::string& engine, py::handle out, py::handle x_zero_point, py::handle w_sum,
                  bool constant_weight) {
  LinearCall call = checked_operands(x, w);
  call.args.constant_weight = constant_weight;
  EpilogueArgs& epilogue = call.args.epilogue;
  epilogue.x_scale = parse_scale(x_scale, "x_scale", call.args.m, call.x);
  epilogue.w_scale = parse_scale(w_scale, "w_scale", call.args.n, call.x);
  parse_bias(call, bias);
  epilogue.activation = parse_activation(activation);
  parse_residual(call, residual);
  parse_zero_point(call, x_zero_point, w_sum);
  if (!out_scale.is_none()) {
    epilogue.out_scale = parse_scale(out_scale, "out_scale", -1, call.x);
    return run(call, DType::kInt8, engine, out);
  }
  const DType out_type = parse_dtype(out_dtype, "out_dtype", {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  return run(call, out_type, engine, out);
}

// int32 accumulators, or with `alpha` their requantisation clamp(rne(float(acc) * alpha), -128, 127).
py::object matmul(py::handle x, py::handle w, py::handle alpha, const std::string& engine, py::handle out) {
  LinearCall call = checked_operands(x, w);
  call.raw = true;
  if (alpha.is_none()) return run(call, DType::kInt32, engine, out);
  if (PyFloat_Check(alpha.ptr()) == 0) {
    refuse<TypeError>("alpha", "float", std::string(Py_TYPE(alpha.ptr())->tp_name));
  }
  const ScaleView factor = parse_scale(alpha, "alpha", -1, call.x);
  call.args.epilogue.w_scale = factor;
  call.args.epilogue.clamp_low = -128;
  return run(call, DType::kInt8, engine, out);
}

std::vector<std::pair<int, double>> tune(py::handle x, py::handle w, bool int8_output) {
  LinearCall call = checked_operands(x, w);
  if (call.x.on_cpu()) refuse<ValueError>("x", "a tensor on cuda", call.x.device_text());
  call.raw = true;
  call.args.out_type = int8_output ? DType::kInt8 : DType::kInt32;
  call.args.epilogue.clamp_low = -128;
  call.args.ldo = call.args.n;
  if (call.args.m < 1) refuse<ValueError>("x", "at least one row", "shape " + call.x.shape_text());
  select(problem_of(call), device_capability(call.x.device()), "cublaslt");  // refuses with the reason
  TensorFactory factory(call.x.dl.device);
  const Allocator allocate = [&factory](size_t bytes) { return factory.scratch(bytes); };
  call.args.out = allocate(static_cast<size_t>(call.args.m * call.args.n) * size_of(call.args.out_type));
  return tune_cublaslt(call.args, call.x.device(), factory.current_stream(), allocate);
}

DType parse_output(const std::string& out_dtype) {
  return parse_dtype(out_dtype, "out_dtype",
                     {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8, DType::kInt32});
}

GemmProblem problem_of(int64_t m, int64_t n, int64_t k, const std::string& out_dtype, bool raw,
                       bool double_activation) {
  GemmProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.out = parse_output(out_dtype);
  problem.raw = raw;
  problem.ldo = n;
  problem.double_activation = double_activation;
  return problem;
}

// (M, N, K, output dtype, candidate's name); names that this build does not know are left out.
using TunedEntry = std::tuple<int64_t, int64_t, int64_t, std::string, std::string>;

TunedTable table_of(const std::vector<TunedEntry>& entries) {
  static uint64_t tables = 0;  // under the GIL
  TunedTable table;
  table.id = ++tables;
  for (const auto& [m, n, k, out, name] : entries) {
    const DType type = parse_output(out);
    for (const Candidate& candidate : candidates()) {
      if (candidate.name == name) table.shapes.push_back({m, n, k, type, &candidate});
    }
  }
  return table;
}

py::dict explain_problem(int64_t m, int64_t n, int64_t k, const std::string& out_dtype, bool raw,
                         bool double_activation, const std::string& engine, int compute_capability, int sm_count,
                         bool cublaslt, const std::vector<TunedEntry>& tuned) {
  const GemmProblem problem = problem_of(m, n, k, out_dtype, raw, double_activation);
  const TunedTable table = table_of(tuned);
  Capability capability = capability_for(compute_capability, sm_count);
  capability.cublaslt = cublaslt;
  capability.cublaslt_why = "libcublasLt could not be loaded";
  capability.tuned = &table;
  const Decision decision = explain(problem, capability, engine);
  py::dict result;
  result["chosen"] = decision.chosen->name;
  result["why"] = decision.why;
  result["declined"] = decision.declined;
  return result;
}

std::vector<std::pair<std::string, double>> estimate_problem(int64_t m, int64_t n, int64_t k,
                                                             const std::string& out_dtype, bool raw, int device) {
  std::vector<std::pair<std::string, double>> result;
  const GemmProblem problem = problem_of(m, n, k, out_dtype, raw, false);
  for (const auto& [candidate, time] : estimates(problem, device_capability(device))) {
    result.emplace_back(candidate->name, time);
  }
  return result;
}

}  // namespace

void bind_gemm(py::module_& module) {
  module.def("linear", &linear, py::arg("x"), py::arg("w"), py::arg("x_scale"), py::arg("w_scale"), py::arg("bias"),
             py::arg("activation"), py::arg("residual"), py::arg("out_dtype"), py::arg("out_scale"), py::arg("engine"),
             py::arg("out"), py::arg("x_zero_point"), py::arg("w_sum"), py::arg("constant_weight"));
  module.def("matmul", &matmul, py::arg("x"), py::arg("w"), py::arg("alpha"), py::arg("engine"), py::arg("out"));
  module.def("select", &explain_problem, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"), py::arg("raw"),
             py::arg("double_activation"), py::arg("engine"), py::arg("compute_capability"), py::arg("sm_count"),
             py::arg("cublaslt"), py::arg("tuned") = std::vector<TunedEntry>());
  module.def("estimates", &estimate_problem, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"),
             py::arg("raw"), py::arg("device"));
  module.def(
      "set_tuned", [](int device, const std::vector<TunedEntry>& entries) { set_tuned(device, table_of(entries)); },
      py::arg("device"), py::arg("entries"));
  module.def(
      "prefer_cublaslt",
      [](int64_t m, int64_t n, int64_t k, bool int8_output, int algorithm, int device) {
        return prefer_cublaslt(m, n, k, int8_output ? DType::kInt8 : DType::kInt32, algorithm, device);
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("int8_output"), py::arg("algorithm"), py::arg("device"));
  module.def("candidates", [] {
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates()) names.emplace_back(candidate.name);
    return names;
  });
  module.def("tune_cublaslt", &tune, py::arg("x"), py::arg("w"), py::arg("int8_output"));
}

}  // namespace octofuse
