// Matrices in tiled orders: conversions, and products that read and write them. CPU tensors are checked here and
// computed in Python (None).
#include <pybind11/stl.h>

#include <array>

#include "call.h"
#include "linear_call.h"
#include "module.h"
#include "octofuse/epilogue_pass.h"
#include "octofuse/error.h"
#include "octofuse/layout.h"
#include "octofuse/row_pass.h"
#include "row_call.h"

namespace octofuse {
namespace {

constexpr int64_t kMaxRowBytes = kMaxExtent - 1024;  // kernels count a padded row's bytes in 32 bits

void check_sides(int64_t rows, int64_t cols, DType type) {
  if (rows < 1 || rows > kMaxExtent - 32) refuse<ValueError>("rows", "1 to 2^31 - 33", std::to_string(rows));
  if (cols < 1 || cols * static_cast<int64_t>(size_of(type)) > kMaxRowBytes) {
    refuse<ValueError>("cols", "1 to what 2^31 - 1025 bytes hold", std::to_string(cols));
  }
}

// A tensor that holds a rows x cols matrix in `order`.
void check_laid_out(const TensorView& data, const MatrixOrder& order, int64_t rows, int64_t cols) {
  expect_known_device(data);
  check_sides(rows, cols, data.dtype);
  const int64_t size = order.size(rows, cols);
  if (data.ndim() != 1 || data.numel() != size || !data.is_contiguous()) {
    refuse<ValueError>(data.name,
                       "a contiguous tensor of " + std::to_string(size) + " elements: " + std::to_string(rows) + " x " +
                           std::to_string(cols) + " in " + order.name,
                       "shape " + data.shape_text());
  }
  if (reinterpret_cast<uintptr_t>(data.data()) % 16 != 0 && !data.on_cpu()) {
    refuse<ValueError>(data.name, "data that starts at a multiple of 16 bytes", "a view into the middle of a tensor");
  }
}

// A matrix in rows, dense in its columns.
void check_matrix(const TensorView& matrix) {
  expect_known_device(matrix);
  if (matrix.ndim() != 2) refuse<ValueError>(matrix.name, "[rows, cols]", "shape " + matrix.shape_text());
  check_sides(matrix.size(0), matrix.size(1), matrix.dtype);
}

void expect_cublaslt(int device) {
  const Capability& capability = device_capability(device);
  if (capability.cublaslt) return;
  refuse<ValueError>("engine", "one that can serve", "'cublaslt': " + capability.cublaslt_why);
}

void convert(const ConvertArgs& args, const std::string& engine, DType type, int device, Stream stream) {
  if (engine == "auto" || engine == "octofuse") return convert_layout(args, device, stream);
  if (engine != "cublaslt") refuse<ValueError>("engine", "'auto', 'octofuse' or 'cublaslt'", "'" + engine + "'");
  expect_cublaslt(device);
  if (type != DType::kInt8) refuse<ValueError>("engine", "'octofuse' for other elements than int8", "'cublaslt'");
  convert_layout_cublaslt(args, device, stream);
}

py::object to_layout(py::handle matrix_object, const std::string& order, const std::string& engine) {
  const TensorView matrix(matrix_object, "matrix");
  expect_dtype(matrix, {DType::kInt8, DType::kInt32, DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  check_matrix(matrix);
  ConvertArgs args;
  args.rows = matrix.size(0);
  args.cols = matrix.size(1);
  args.element = static_cast<int64_t>(size_of(matrix.dtype));
  args.order = order_named(order, "layout", args.cols);
  args.matrix = matrix.data();
  args.ld = matrix.row_stride();
  if (matrix.on_cpu()) return py::none();
  const TensorFactory factory(matrix.dl.device);
  py::object result = factory.make({args.order.size(args.rows, args.cols)}, matrix.dtype, &args.laid_out);
  convert(args, engine, matrix.dtype, matrix.device(), factory.current_stream());
  return result;
}

py::object from_layout(py::handle data_object, const std::string& order, int64_t rows, int64_t cols,
                       const std::string& engine) {
  const TensorView data(data_object, "data");
  expect_dtype(data, {DType::kInt8, DType::kInt32, DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  ConvertArgs args;
  args.order = order_named(order, "layout", cols);
  check_laid_out(data, args.order, rows, cols);
  args.rows = rows;
  args.cols = args.ld = cols;
  args.element = static_cast<int64_t>(size_of(data.dtype));
  args.laid_out = data.data();
  args.to_layout = false;
  if (data.on_cpu()) return py::none();
  const TensorFactory factory(data.dl.device);
  py::object result = factory.make({rows, cols}, data.dtype, &args.matrix);
  convert(args, engine, data.dtype, data.device(), factory.current_stream());
  return result;
}

// x [rows, cols] -> int8 in COL32, and scales [rows, 1] or, where one scale was given, None.
py::object quantize_col32(py::handle x_object, py::handle scale) {
  const TensorView x(x_object, "x");
  expect_dtype(x, kFloats);
  check_matrix(x);
  RowPassArgs args = checked_rows(x);
  if (!scale.is_none()) args.scale = parse_scale(scale, "scale", -1, x);
  if (x.on_cpu()) return py::none();
  const TensorFactory factory(x.dl.device);
  void* data = nullptr;
  py::object q = factory.make({order_named("COL32", "", 0).size(args.rows, args.cols)}, DType::kInt8, &data);
  args.q = static_cast<int8_t*>(data);
  args.q_group = 32 * args.rows;
  py::object scales = py::none();
  if (scale.is_none()) {
    scales = factory.make({args.rows, 1}, DType::kFloat32, &data);
    args.scales = static_cast<float*>(data);
  }
  row_pass(args, x.device(), factory.current_stream());
  return py::make_tuple(q, scales);
}

py::object dequantize_col32(py::handle q_object, int64_t rows, int64_t cols, py::handle scale, py::handle out_dtype) {
  const TensorView q(q_object, "q");
  expect_dtype(q, {DType::kInt8, DType::kInt32});
  check_laid_out(q, order_named("COL32", "", cols), rows, cols);
  DequantizeArgs args;
  args.rows = rows;
  args.cols = args.ldo = cols;
  args.q = q.data();
  args.ldq = 32;
  args.q_group = 32 * rows;
  args.q_type = q.dtype;
  args.epilogue.x_scale = parse_scale(scale, "scale", rows, q);
  args.out_type = parse_dtype(out_dtype, "out_dtype", kFloats);
  if (q.on_cpu()) return py::none();
  const TensorFactory factory(q.dl.device);
  py::object result = factory.make({rows, cols}, args.out_type, &args.out);
  apply_epilogue(args, q.device(), factory.current_stream());
  return result;
}

using Sizes = std::array<int64_t, 3>;  // M, N, K

LinearCall laid_out_operands(py::handle x, py::handle w, const Sizes& sizes, const MatrixOrder& x_order,
                             const MatrixOrder& w_order) {
  LinearCall call{TensorView(x, "x"), TensorView(w, "w"), {}, {}, {}, {}, {}, {}};
  expect_dtype(call.x, {DType::kInt8});
  expect_dtype(call.w, {DType::kInt8});
  expect_same_device(call.w, call.x);
  const auto [m, n, k] = sizes;
  if (k > kMaxK) refuse<ValueError>("x", "K <= 131071, so that int32 cannot overflow", "K = " + std::to_string(k));
  check_laid_out(call.x, x_order, m, k);
  check_laid_out(call.w, w_order, n, k);
  call.args.m = m;
  call.args.n = n;
  call.args.k = k;
  call.args.x = call.x.data<const int8_t>();
  call.args.w = call.w.data<const int8_t>();
  call.out_shape = {m, n};
  return call;
}

// The formula of `linear` (bind_gemm.cpp) on COL32 operands. out_dtype "int32": the accumulators alone; "int8" without
// out_scale: down to -128; out_layout: "COL32" or "ROW".
py::object linear_col32(const py::tuple& fields) {
  const Col32Fields given(fields);
  const MatrixOrder col32 = order_named("COL32", "", 0);
  LinearCall call = laid_out_operands(given.x, given.w, given.sizes.cast<Sizes>(), col32, col32);
  GemmArgs& args = call.args;
  args.out_type = parse_dtype(given.out_dtype, "out_dtype",
                              {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8, DType::kInt32});
  if (args.out_type != DType::kInt32) {
    args.epilogue.x_scale = parse_scale(given.x_scale, "x_scale", args.m, call.x);
    args.epilogue.w_scale = parse_scale(given.w_scale, "w_scale", args.n, call.x);
    parse_bias(call, given.bias);
    args.epilogue.activation = parse_activation(given.activation);
    parse_residual(call, given.residual);
    if (!given.out_scale.is_none()) {
      args.epilogue.out_scale = parse_scale(given.out_scale, "out_scale", -1, call.x);
    } else if (args.out_type == DType::kInt8) {
      args.epilogue.clamp_low = -128;  // the raw requantisation of i8i8_matmul
    }
  }
  if (call.x.on_cpu()) return py::none();
  const Capability& capability = device_capability(call.x.device());
  if (capability.compute_capability < 80 || !capability.kernels_mma) {
    refuse<ValueError>("x", "a device with compute capability 8.0 that this build has kernels for",
                       call.x.device_text());
  }
  const bool rows = parse_str(given.out_layout, "out_layout") == "ROW";
  args.k = col32.padded_cols(args.k);
  args.ldx = 32 * args.m;
  args.ldw = 32 * args.n;
  args.ldo = rows ? args.n : 32;
  args.out_group = rows ? 0 : 32 * args.m;
  const TensorFactory factory(call.x.dl.device);
  const int64_t size = rows ? args.m * args.n : col32.size(args.m, args.n);
  py::object result = factory.make({size}, args.out_type, &args.out);
  run_gemm_col32(args, call.x.device(), factory.current_stream());
  return result;
}

OrderedGemm ordered(const GemmArgs& args, const std::array<std::string, 3>& orders) {
  return {args, order_named(orders[0], "x", args.k), order_named(orders[1], "w", args.k),
          order_named(orders[2], "out_layout", args.n)};
}

// x w^T through cuBLASLt; orders: of x, w and the output. With `alpha` int8, else int32. The output is 1-D.
py::object matmul_ordered(py::handle x, py::handle w, const Sizes& sizes, const std::array<std::string, 3>& orders,
                          py::handle alpha, int algorithm) {
  LinearCall call =
      laid_out_operands(x, w, sizes, order_named(orders[0], "x", sizes[2]), order_named(orders[1], "w", sizes[2]));
  OrderedGemm gemm = ordered(call.args, orders);
  gemm.args.out_type = alpha.is_none() ? DType::kInt32 : DType::kInt8;
  if (!alpha.is_none()) gemm.args.epilogue.w_scale = parse_scale(alpha, "alpha", -1, call.x);
  if (call.x.on_cpu()) return py::none();
  expect_cublaslt(call.x.device());
  const int found = cublaslt_algorithms(gemm, call.x.device());
  if (algorithm < 0 || algorithm >= found) {
    const std::string names = orders[0] + " x " + orders[1] + " -> " + orders[2];
    if (found <= 0) {
      refuse<ValueError>("engine",
                         "one that multiplies " + names +
                             " on this device (ROW layouts, or COL32 operands "
                             "with engine='cutlass')",
                         "'cublaslt': it declines with status " + std::to_string(-found));
    }
    refuse<ValueError>("algorithm", "0 to " + std::to_string(found - 1), std::to_string(algorithm));
  }
  TensorFactory factory(call.x.dl.device);
  py::object result = factory.make({gemm.out.size(gemm.args.m, gemm.args.n)}, gemm.args.out_type, &gemm.args.out);
  run_gemm_ordered(gemm, algorithm, call.x.device(), factory.current_stream(),
                   [&factory](size_t bytes) { return factory.scratch(bytes); });
  return result;
}

// How many algorithms cuBLASLt has for such a product on a device, or minus the status with which it declines.
int probe(const Sizes& sizes, const std::array<std::string, 3>& orders, bool int8_output, int device) {
  GemmArgs args;
  args.m = sizes[0];
  args.n = sizes[1];
  args.k = sizes[2];
  args.out_type = int8_output ? DType::kInt8 : DType::kInt32;
  expect_cublaslt(device);
  return cublaslt_algorithms(ordered(args, orders), device);
}

}  // namespace

void bind_layout(py::module_& module) {
  module.def("to_layout", &to_layout, py::arg("matrix"), py::arg("layout"), py::arg("engine"));
  module.def("from_layout", &from_layout, py::arg("data"), py::arg("layout"), py::arg("rows"), py::arg("cols"),
             py::arg("engine"));
  module.def("quantize_col32", &quantize_col32, py::arg("x"), py::arg("scale"));
  module.def("dequantize_col32", &dequantize_col32, py::arg("q"), py::arg("rows"), py::arg("cols"), py::arg("scale"),
             py::arg("out_dtype"));
  module.def("linear_col32", &linear_col32, py::arg("call"));
  module.def("matmul_ordered", &matmul_ordered, py::arg("x"), py::arg("w"), py::arg("sizes"), py::arg("layouts"),
             py::arg("alpha"), py::arg("algorithm"));
  module.def("cublaslt_algorithms", &probe, py::arg("sizes"), py::arg("layouts"), py::arg("int8_output"),
             py::arg("device"));
}

}  // namespace octofuse
