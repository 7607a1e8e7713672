// What a decoding step calls: a linear layer that quantises its own input, and embedding, attention and the argmax of
// its logits. CPU tensors are checked here and computed in Python (None).
#include <algorithm>

#include "arguments.h"
#include "call.h"
#include "cpu_call.h"
#include "linear_call.h"
#include "module.h"
#include "octofuse/cpu.h"
#include "octofuse/decode.h"
#include "octofuse/error.h"
#include "octofuse/row_linear.h"
#include "row_call.h"

namespace octofuse {
namespace {

// None: a call that oneDNN serves faster, part by part. norm: None, "layer_norm" or "rms_norm"; x_scale None: a scale
// for each token. x may be int8 already, with x_scale.
py::object quantized_linear(const py::tuple& fields) {
  const RowLinearFields f(fields);
  LinearCall call = checked_operands(f.x, f.w, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8});
  const bool given = call.x.dtype == DType::kInt8;
  RowPassArgs rows;
  if (!given) rows = checked_rows(call.x);
  if (given && f.x_scale.is_none()) refuse<ValueError>("x_scale", "the scale of an int8 x", "None");
  if (given && !f.norm.is_none()) {
    refuse<ValueError>("norm", "None for an int8 x", "'" + parse_str(f.norm, "norm") + "'");
  }
  if (!f.norm.is_none()) {
    parse_norm(parse_str(f.norm, "norm"), {f.norm_weight, f.norm_bias, f.eps, "norm_weight", "norm_bias"}, call.x,
               rows);
  }
  GemmArgs& args = call.args;
  const bool per_token = f.x_scale.is_none();
  if (!per_token) rows.scale = parse_scale(f.x_scale, "x_scale", given ? args.m : -1, call.x);
  parse_epilogue(call, f.w_scale, f.bias, f.activation, f.residual);
  args.constant_weight = f.constant_weight.cast<bool>();
  args.out_type = parse_output(call, f.out_dtype, f.out_scale);
  args.ldo = args.n;
  if (call.x.on_cpu()) {
    if (left_to_onednn(args)) return py::none();
    py::object result = TensorFactory(call.x.dl.device).make(call.out_shape, args.out_type, &args.out);
    const CpuCall on_cpu;
    if (given) {
      args.epilogue.x_scale = rows.scale;
      cpu::linear(args);
    } else {
      cpu::row_linear(rows, per_token, args);
    }
    return result;
  }
  const int device = call.x.device();
  read_tuning_once(device);
  TensorFactory factory(call.x.dl.device);
  const Allocator allocate = [&factory](size_t bytes) { return factory.scratch(bytes); };
  py::object result = factory.make(call.out_shape, args.out_type, &args.out);
  const Stream stream = factory.current_stream();
  if (given) {
    args.epilogue.x_scale = rows.scale;
    run_gemm(select(problem_of(call), device_capability(device), "auto"), args, device, stream, allocate);
  } else {
    run_row_linear(rows, per_token, args, problem_of(call), device, stream, allocate);
  }
  return result;
}

// A contiguous tensor on the device of `reference`.
void expect_tensor(const TensorView& tensor, const std::vector<int64_t>& shape, const TensorView& reference) {
  expect_same_device(tensor, reference);
  if (shape_of(tensor) != shape || !tensor.is_contiguous()) {
    refuse<ValueError>(tensor.name, "a contiguous tensor of shape " + text_of(shape), tensor.shape_text());
  }
}

int64_t* expect_int64(const TensorView& tensor, const std::vector<int64_t>& shape, const TensorView& reference) {
  if (tensor.dl.dtype.code != kDLInt || tensor.dl.dtype.bits != 64) {
    refuse<TypeError>(tensor.name, "dtype int64", tensor.dtype_text());
  }
  expect_tensor(tensor, shape, reference);
  return tensor.data<int64_t>();
}

void expect_half(const TensorView& tensor) {
  expect_dtype(tensor, {DType::kFloat16, DType::kBFloat16});
  expect_known_device(tensor);
  if (tensor.on_cpu()) refuse<ValueError>(tensor.name, "a tensor on cuda", tensor.device_text());
}

void expect_aligned(const TensorView& tensor) {
  if (reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0) return;
  refuse<ValueError>(tensor.name, "data that starts at a multiple of 16 bytes", "a view into the middle of a tensor");
}

// qkv [B, 3 * H * D], keys and values [B, H, C, D], positions [B] -> [B, H * D] in qkv's dtype, or int8 by `scale`.
// partials: fp32, attend_partials() of them; arrivals: int32 [B * H], zero.
py::object attend_op(py::handle qkv_object, py::handle keys_object, py::handle values_object,
                     py::handle positions_object, py::handle partials_object, py::handle arrivals_object,
                     py::handle scale) {
  const TensorView qkv(qkv_object, "qkv");
  const TensorView keys(keys_object, "keys");
  const TensorView values(values_object, "values");
  expect_half(qkv);
  if (keys.ndim() != 4) refuse<ValueError>("keys", "[B, heads, capacity, head size]", "shape " + keys.shape_text());
  const int64_t batch = keys.size(0);
  const int64_t heads = keys.size(1);
  const int64_t size = keys.size(3);
  if (size < 8 || size > kMaxHeadSize || size % 8 != 0) {
    refuse<ValueError>("keys", "a head size of 8 to 128, a multiple of 8", "shape " + keys.shape_text());
  }
  if (keys.size(2) < 1) refuse<ValueError>("keys", "room for one position at least", "shape " + keys.shape_text());
  expect_dtype(keys, {qkv.dtype});
  expect_dtype(values, {qkv.dtype});
  expect_tensor(keys, shape_of(keys), qkv);
  expect_tensor(values, shape_of(keys), qkv);
  expect_tensor(qkv, {batch, 3 * heads * size}, qkv);
  for (const TensorView* tensor : {&qkv, &keys, &values}) expect_aligned(*tensor);
  const TensorView positions(positions_object, "positions");
  const TensorView partials(partials_object, "partials");
  const TensorView arrivals(arrivals_object, "arrivals");
  AttendArgs args;
  args.positions = expect_int64(positions, {batch}, qkv);
  expect_dtype(partials, {DType::kFloat32});
  expect_dtype(arrivals, {DType::kInt32});
  expect_tensor(partials, {attend_partials(batch, heads, size, keys.size(2))}, qkv);
  expect_tensor(arrivals, {batch * heads}, qkv);
  args.batch = static_cast<int>(batch);
  args.heads = static_cast<int>(heads);
  args.head_size = static_cast<int>(size);
  args.capacity = static_cast<int>(keys.size(2));
  args.type = args.out_type = qkv.dtype;
  args.qkv = qkv.data();
  args.ldqkv = 3 * heads * size;
  args.keys = keys.data();
  args.values = values.data();
  args.partials = partials.data<float>();
  args.arrivals = arrivals.data<uint32_t>();
  if (!scale.is_none()) {
    args.scale = parse_scale(scale, "scale", -1, qkv);
    args.out_type = DType::kInt8;
  }
  const TensorFactory factory(qkv.dl.device);
  py::object result = factory.make({batch, heads * size}, args.out_type, &args.out);
  attend(args, qkv.device(), factory.current_stream());
  return result;
}

// ids, positions [B]; token_embeddings [V, W], position_embeddings [P, W] -> their sum for each token, [B, W].
py::object embed_op(py::handle ids_object, py::handle positions_object, py::handle token_embeddings,
                    py::handle position_embeddings) {
  const TensorView table(token_embeddings, "token_embeddings");
  const TensorView of_positions(position_embeddings, "position_embeddings");
  expect_half(table);
  if (table.ndim() != 2 || table.size(1) % 8 != 0) {
    refuse<ValueError>(table.name, "[vocabulary, width], width a multiple of 8", "shape " + table.shape_text());
  }
  if (of_positions.ndim() != 2) {
    refuse<ValueError>(of_positions.name, "[P, width]", "shape " + of_positions.shape_text());
  }
  expect_dtype(of_positions, {table.dtype});
  expect_tensor(table, shape_of(table), table);
  expect_tensor(of_positions, {of_positions.size(0), table.size(1)}, table);
  expect_aligned(table);
  expect_aligned(of_positions);
  const TensorView ids(ids_object, "ids");
  const TensorView positions(positions_object, "positions");
  const int64_t batch = ids.numel();
  EmbedArgs args;
  args.ids = expect_int64(ids, {batch}, table);
  args.positions = expect_int64(positions, {batch}, table);
  args.batch = static_cast<int>(batch);
  args.width = static_cast<int>(table.size(1));
  args.type = table.dtype;
  args.token_embeddings = table.data();
  args.position_embeddings = of_positions.data();
  const TensorFactory factory(table.dl.device);
  py::object result = factory.make({batch, table.size(1)}, table.dtype, &args.out);
  embed(args, table.device(), factory.current_stream());
  return result;
}

// x [M, K], w [V, K] -> [M, V rounded up to a multiple of 8]; the columns behind V are not written.
py::object logits_op(py::handle x_object, py::handle w_object) {
  const TensorView x(x_object, "x");
  const TensorView w(w_object, "w");
  expect_half(x);
  if (x.ndim() != 2) refuse<ValueError>("x", "[M, K]", "shape " + x.shape_text());
  if (w.ndim() != 2 || w.size(0) < 1) refuse<ValueError>("w", "[V, K]", "shape " + w.shape_text());
  expect_dtype(w, {x.dtype});
  expect_tensor(x, shape_of(x), x);
  expect_tensor(w, {w.size(0), x.size(1)}, x);
  if (!takes_logits(x.size(1), x.device())) {
    refuse<ValueError>("x", "compute capability 9.0, and a multiple of 8 columns that fits", "shape " + x.shape_text());
  }
  for (const TensorView* tensor : {&x, &w}) expect_aligned(*tensor);
  LogitsArgs args;
  args.m = static_cast<int>(x.size(0));
  args.n = static_cast<int>(w.size(0));
  args.k = static_cast<int>(x.size(1));
  args.type = x.dtype;
  args.x = x.data();
  args.w = w.data();
  args.ldo = (w.size(0) + 7) / 8 * 8;
  const TensorFactory factory(x.dl.device);
  py::object result = factory.make({x.size(0), args.ldo}, args.type, &args.out);
  logits(args, x.device(), factory.current_stream());
  return result;
}

// logits [B, V], rows dense; ids, counts, positions [B] and history [B, C] are written (decode.h).
void argmax_op(py::handle logits_object, py::handle ids_object, py::handle history_object, py::handle counts_object,
               py::handle positions_object, bool advance) {
  const TensorView logits(logits_object, "logits");
  expect_half(logits);
  if (logits.ndim() != 2 || logits.size(1) < 1) refuse<ValueError>("logits", "[B, V]", "shape " + logits.shape_text());
  const TensorView history(history_object, "history");
  const int64_t batch = logits.size(0);
  if (history.ndim() != 2) refuse<ValueError>("history", "[B, capacity]", "shape " + history.shape_text());
  ArgmaxArgs args;
  args.batch = static_cast<int>(batch);
  args.vocabulary = static_cast<int>(logits.size(1));
  args.type = logits.dtype;
  args.logits = logits.data();
  args.ld = logits.row_stride();
  args.ids = expect_int64(TensorView(ids_object, "ids"), {batch}, logits);
  args.history = expect_int64(history, {batch, history.size(1)}, logits);
  args.history_ld = history.size(1);
  args.counts = expect_int64(TensorView(counts_object, "counts"), {batch}, logits);
  args.positions = expect_int64(TensorView(positions_object, "positions"), {batch}, logits);
  args.advance = advance ? 1 : 0;
  argmax(args, logits.device(), TensorFactory(logits.dl.device).current_stream());
}

}  // namespace

void bind_decode(py::module_& module) {
  module.def("quantized_linear", &quantized_linear, py::arg("call"));
  module.def("attend", &attend_op, py::arg("qkv"), py::arg("keys"), py::arg("values"), py::arg("positions"),
             py::arg("partials"), py::arg("arrivals"), py::arg("scale"));
  module.def("attend_partials", &attend_partials, py::arg("batch"), py::arg("heads"), py::arg("head_size"),
             py::arg("capacity"));
  module.def("embed", &embed_op, py::arg("ids"), py::arg("positions"), py::arg("token_embeddings"),
             py::arg("position_embeddings"));
  module.def("argmax", &argmax_op, py::arg("logits"), py::arg("ids"), py::arg("history"), py::arg("counts"),
             py::arg("positions"), py::arg("advance"));
  module.def("takes_logits", &takes_logits, py::arg("k"), py::arg("device"));
  module.def("logits", &logits_op, py::arg("x"), py::arg("w"));
}

}  // namespace octofuse
