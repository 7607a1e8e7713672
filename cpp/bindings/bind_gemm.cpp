// The linear ops: every check, then select, then one launch, or the CPU engine. What torch is to compute on the CPU is
// checked here too (None).
#include <pybind11/stl.h>

#include <map>
#include <optional>

#include "arguments.h"
#include "call.h"
#include "cpu_call.h"
#include "linear_call.h"
#include "module.h"
#include "octofuse/cpu.h"
#include "octofuse/error.h"

namespace octofuse {
namespace {

// Finds or makes the output, selects and launches. None: an engine of the CPU that Python knows.
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
  if (call.x.on_cpu()) {
    if (engine != "cpu" && (engine != "auto" || left_to_onednn(args))) return py::none();
    py::object result = out ? py::reinterpret_borrow<py::object>(out_object)
                            : TensorFactory(call.x.dl.device).make(call.out_shape, out_type, &args.out);
    const CpuCall on_cpu;
    cpu::linear(args);
    return result;
  }
  read_tuning_once(call.x.device());
  TensorFactory factory(call.x.dl.device);
  const Candidate& candidate = select(problem_of(call), device_capability(call.x.device()), engine);
  py::object result =
      out ? py::reinterpret_borrow<py::object>(out_object) : factory.make(call.out_shape, out_type, &args.out);
  run_gemm(candidate, args, call.x.device(), factory.current_stream(),
           [&factory](size_t bytes) { return factory.scratch(bytes); });
  return result;
}

py::object linear(const py::tuple& fields, py::handle out) {
  const LinearFields given(fields);
  LinearCall call = checked_operands(given.x, given.w, {DType::kInt8, DType::kE4M3, DType::kE5M2});
  call.args.constant_weight = given.constant_weight.cast<bool>();
  call.args.fast_accumulate = given.fast_accumulate.cast<bool>();
  if (!parse_block_scales(call, given.x_scale, given.w_scale)) {
    call.args.epilogue.x_scale = parse_scale(given.x_scale, "x_scale", call.args.m, call.x);
  }
  parse_epilogue(call, given.w_scale, given.bias, given.activation, given.residual);
  parse_zero_point(call, given.x_zero_point, given.w_sum);
  return run(call, parse_output(call, given.out_dtype, given.out_scale), parse_str(given.engine, "engine"), out);
}

LinearCall checked_int8(py::handle x, py::handle w) {
  LinearCall call = checked_operands(x, w);
  expect_dtype(call.w, {DType::kInt8});
  return call;
}

// int32 accumulators, or with `alpha` their requantisation clamp(rne(float(acc) * alpha), -128, 127).
py::object matmul(py::handle x, py::handle w, py::handle alpha, const std::string& engine, py::handle out) {
  LinearCall call = checked_int8(x, w);
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
  LinearCall call = checked_int8(x, w);
  if (call.x.on_cpu()) refuse<ValueError>("x", "a tensor on cuda", call.x.device_text());
  call.args.out_type = int8_output ? DType::kInt8 : DType::kInt32;
  call.args.epilogue.clamp_low = -128;
  call.args.ldo = call.args.n;
  if (call.args.m < 1) refuse<ValueError>("x", "at least one row", "shape " + call.x.shape_text());
  select(problem_of(call), device_capability(call.x.device()), "cublaslt");  // refuses with the reason
  TensorFactory factory(call.x.dl.device);
  // Measuring waits for the device: other threads may run meanwhile, but not while torch's allocator is asked.
  const Allocator allocate = [&factory](size_t bytes) {
    const py::gil_scoped_acquire acquired;
    return factory.scratch(bytes);
  };
  call.args.out = allocate(static_cast<size_t>(call.args.m * call.args.n) * size_of(call.args.out_type));
  const Stream stream = factory.current_stream();
  const int device = call.x.device();
  const py::gil_scoped_release released;
  return tune_cublaslt(call.args, device, stream, allocate);
}

DType parse_output(const std::string& out_dtype) {
  return parse_dtype_name(
      out_dtype, "out_dtype",
      {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8, DType::kE4M3, DType::kInt32});
}

Arithmetic parse_arithmetic(const std::string& name) {
  if (name == "int8") return Arithmetic::kInt8;
  if (name == "float8") return Arithmetic::kFloat8;
  if (name == "float8_fast") return Arithmetic::kFloat8Fast;
  if (name == "e5m2") return Arithmetic::kE5M2;
  refuse<ValueError>("arithmetic", "int8, float8, float8_fast or e5m2", name);
}

GemmProblem problem_of(int64_t m, int64_t n, int64_t k, const std::string& out_dtype, bool raw, bool double_activation,
                       const std::string& arithmetic = "int8") {
  GemmProblem problem;
  problem.arithmetic = parse_arithmetic(arithmetic);
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

py::dict dict_of(const GemmProblem& problem, const Capability& capability, const std::string& engine) {
  const Decision decision = explain(problem, capability, engine);
  py::dict result;
  result["chosen"] = decision.chosen->name;
  result["captured"] = captured_kernel(problem, capability, *decision.chosen);
  result["why"] = decision.why;
  result["declined"] = decision.declined;
  return result;
}

// The choice on a device that is here, with what was measured on it.
py::dict explain_here(int64_t m, int64_t n, int64_t k, const std::string& out_dtype, bool raw, bool double_activation,
                      const std::string& engine, int device, const std::string& arithmetic, bool block_scales) {
  read_tuning_once(device);
  GemmProblem problem = problem_of(m, n, k, out_dtype, raw, double_activation, arithmetic);
  problem.block_scales = block_scales;
  return dict_of(problem, device_capability(device), engine);
}

// The choice for a device that need not be here.
py::dict explain_problem(int64_t m, int64_t n, int64_t k, const std::string& out_dtype, bool raw,
                         bool double_activation, const std::string& engine, int compute_capability, int sm_count,
                         bool cublaslt, const std::vector<TunedEntry>& tuned, double bandwidth,
                         const std::string& arithmetic) {
  const GemmProblem problem = problem_of(m, n, k, out_dtype, raw, double_activation, arithmetic);
  const TunedTable table = table_of(tuned);
  Capability capability = capability_for(compute_capability, sm_count);
  capability.bandwidth = bandwidth;
  capability.cublaslt = cublaslt;
  capability.cublaslt_why = "libcublasLt could not be loaded";
  capability.tuned = &table;
  return dict_of(problem, capability, engine);
}

std::vector<std::pair<std::string, double>> estimate_problem(int64_t m, int64_t n, int64_t k,
                                                             const std::string& out_dtype, bool raw, int device,
                                                             const std::string& arithmetic) {
  std::vector<std::pair<std::string, double>> result;
  const GemmProblem problem = problem_of(m, n, k, out_dtype, raw, false, arithmetic);
  for (const auto& [candidate, time] : estimates(problem, device_capability(device))) {
    result.emplace_back(candidate->name, time);
  }
  return result;
}

// What the time models of the kernels that are swept look at, for those who fit them.
std::map<std::string, TimeModel> features_of_problem(int64_t m, int64_t n, int64_t k, int sm_count) {
  std::map<std::string, TimeModel> result;
  const GemmProblem problem = problem_of(m, n, k, "float16", false, false);
  for (const Candidate& candidate : candidates()) {
    if (candidate.tile_m > 0) result[candidate.name] = features_of(candidate, problem, sm_count);
  }
  return result;
}

}  // namespace

void bind_gemm(py::module_& module) {
  module.def("linear", &linear, py::arg("call"), py::arg("out"));
  module.def("prefer_onednn", &prefer_onednn, py::arg("products"));
  module.def("call_fields", [] {
    py::dict fields;
    fields["LinearCall"] = LinearFields::names();
    fields["RowLinearCall"] = RowLinearFields::names();
    fields["LowbitCall"] = LowbitFields::names();
    fields["OutlierCall"] = OutlierFields::names();
    fields["RowsCall"] = RowsFields::names();
    fields["Col32Call"] = Col32Fields::names();
    fields["AttendCall"] = AttendFields::names();
    fields["PeerCall"] = PeerFields::names();
    return fields;
  });
  module.def("activations", [] {
    py::list names;
#define OCTOFUSE_ACTIVATION(id, name) names.append(name);
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
    return names;
  });
  module.def("matmul", &matmul, py::arg("x"), py::arg("w"), py::arg("alpha"), py::arg("engine"), py::arg("out"));
  module.def("select", &explain_problem, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"), py::arg("raw"),
             py::arg("double_activation"), py::arg("engine"), py::arg("compute_capability"), py::arg("sm_count"),
             py::arg("cublaslt"), py::arg("tuned") = std::vector<TunedEntry>(), py::arg("bandwidth") = 0.0,
             py::arg("arithmetic") = "int8");
  module.def("explain", &explain_here, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"), py::arg("raw"),
             py::arg("double_activation"), py::arg("engine"), py::arg("device"), py::arg("arithmetic") = "int8",
             py::arg("block_scales") = false);
  module.def("estimates", &estimate_problem, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("out_dtype"),
             py::arg("raw"), py::arg("device"), py::arg("arithmetic") = "int8");
  module.def("features", &features_of_problem, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("sm_count"));
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
