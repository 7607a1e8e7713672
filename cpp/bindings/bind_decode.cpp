// What a decoding step calls: a linear layer that quantises its own input, and embedding, attention and the choice of
// the next token. CPU tensors are checked here and computed in Python (None).
#include <algorithm>

#include "arguments.h"
#include "linear_call.h"
#include "module.h"
#include "octofuse/decode.h"
#include "octofuse/error.h"
#include "octofuse/row_linear.h"
#include "row_call.h"

namespace octofuse {
namespace {

// norm: None, "layer_norm" or "rms_norm"; x_scale None: a scale for each token. x may be int8 already, with x_scale.
py::object quantized_linear(py::handle x, py::handle w, py::handle w_scale, py::handle bias, py::handle x_scale,
                            py::handle norm, py::handle norm_weight, py::handle norm_bias, py::handle eps,
                            py::handle activation, py::handle residual, const std::string& out_dtype,
                            py::handle out_scale, bool constant_weight) {
  LinearCall call = checked_operands(x, w, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8});
  const bool given = call.x.dtype == DType::kInt8;
  RowPassArgs rows;
  if (!given) rows = checked_rows(call.x);
  if (given && x_scale.is_none()) refuse<ValueError>("x_scale", "the scale of an int8 x", "None");
  if (given && !norm.is_none()) refuse<ValueError>("norm", "None for an int8 x", "'" + norm.cast<std::string>() + "'");
  if (!norm.is_none()) {
    parse_norm(norm.cast<std::string>(), {norm_weight, norm_bias, eps, "norm_weight", "norm_bias"}, call.x, rows);
  }
  GemmArgs& args = call.args;
  if (!x_scale.is_none()) rows.scale = parse_scale(x_scale, "x_scale", given ? args.m : -1, call.x);
  parse_epilogue(call, w_scale, bias, activation, residual);
  args.constant_weight = constant_weight;
  args.out_type = parse_output(call, out_dtype, out_scale);
  args.ldo = args.n;
  if (call.x.on_cpu()) return py::none();
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
    run_row_linear(rows, x_scale.is_none(), args, problem_of(call), device, stream, allocate);
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

// qkv [B, 3 * H * D], keys and values [B, H, C, D], places [B] -> [B, H * D] in qkv's dtype, or int8 by `scale`.
// parts: fp32, attend_parts() of them; arrivals: int32 [B * H], zero.
py::object attend_op(py::handle qkv_object, py::handle keys_object, py::handle values_object, py::handle places_object,
                     py::handle parts_object, py::handle arrivals_object, py::handle scale) {
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
  expect_dtype(keys, {qkv.dtype});
  expect_dtype(values, {qkv.dtype});
  expect_tensor(keys, shape_of(keys), qkv);
  expect_tensor(values, shape_of(keys), qkv);
  expect_tensor(qkv, {batch, 3 * heads * size}, qkv);
  for (const TensorView* tensor : {&qkv, &keys, &values}) expect_aligned(*tensor);
  const TensorView places(places_object, "places");
  const TensorView parts(parts_object, "parts");
  const TensorView arrivals(arrivals_object, "arrivals");
  AttendArgs args;
  args.places = expect_int64(places, {batch}, qkv);
  expect_dtype(parts, {DType::kFloat32});
  expect_dtype(arrivals, {DType::kInt32});
  expect_tensor(parts, {attend_parts(batch, heads, size, keys.size(2))}, qkv);
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
  args.parts = parts.data<float>();
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

// ids, places [B]; tokens [V, W], positions [P, W] -> tokens[ids] + positions[places], [B, W].
py::object embed_op(py::handle ids_object, py::handle places_object, py::handle tokens_object,
                    py::handle positions_object) {
  const TensorView tokens(tokens_object, "tokens");
  const TensorView positions(positions_object, "positions");
  expect_half(tokens);
  if (tokens.ndim() != 2 || tokens.size(1) % 8 != 0) {
    refuse<ValueError>("tokens", "[vocabulary, width], width a multiple of 8", "shape " + tokens.shape_text());
  }
  if (positions.ndim() != 2) refuse<ValueError>("positions", "[P, width]", "shape " + positions.shape_text());
  expect_dtype(positions, {tokens.dtype});
  expect_tensor(tokens, shape_of(tokens), tokens);
  expect_tensor(positions, {positions.size(0), tokens.size(1)}, tokens);
  expect_aligned(tokens);
  expect_aligned(positions);
  const TensorView ids(ids_object, "ids");
  const TensorView places(places_object, "places");
  const int64_t batch = ids.numel();
  EmbedArgs args;
  args.ids = expect_int64(ids, {batch}, tokens);
  args.places = expect_int64(places, {batch}, tokens);
  args.batch = static_cast<int>(batch);
  args.width = static_cast<int>(tokens.size(1));
  args.type = tokens.dtype;
  args.tokens = tokens.data();
  args.positions = positions.data();
  const TensorFactory factory(tokens.dl.device);
  py::object result = factory.make({batch, tokens.size(1)}, tokens.dtype, &args.out);
  embed(args, tokens.device(), factory.current_stream());
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

// logits [B, V], rows dense; ids, counts, places [B] and history [B, C] are written (decode.h).
void choose_op(py::handle logits_object, py::handle ids_object, py::handle history_object, py::handle counts_object,
               py::handle places_object, bool advance) {
  const TensorView logits(logits_object, "logits");
  expect_half(logits);
  if (logits.ndim() != 2 || logits.size(1) < 1) refuse<ValueError>("logits", "[B, V]", "shape " + logits.shape_text());
  const TensorView history(history_object, "history");
  const int64_t batch = logits.size(0);
  if (history.ndim() != 2) refuse<ValueError>("history", "[B, capacity]", "shape " + history.shape_text());
  ChooseArgs args;
  args.batch = static_cast<int>(batch);
  args.vocabulary = static_cast<int>(logits.size(1));
  args.type = logits.dtype;
  args.logits = logits.data();
  args.ld = logits.row_stride();
  args.ids = expect_int64(TensorView(ids_object, "ids"), {batch}, logits);
  args.history = expect_int64(history, {batch, history.size(1)}, logits);
  args.history_ld = history.size(1);
  args.counts = expect_int64(TensorView(counts_object, "counts"), {batch}, logits);
  args.places = expect_int64(TensorView(places_object, "places"), {batch}, logits);
  args.advance = advance ? 1 : 0;
  choose(args, logits.device(), TensorFactory(logits.dl.device).current_stream());
}

}  // namespace

void bind_decode(py::module_& module) {
  module.def("quantized_linear", &quantized_linear, py::arg("x"), py::arg("w"), py::arg("w_scale"), py::arg("bias"),
             py::arg("x_scale"), py::arg("norm"), py::arg("norm_weight"), py::arg("norm_bias"), py::arg("eps"),
             py::arg("activation"), py::arg("residual"), py::arg("out_dtype"), py::arg("out_scale"),
             py::arg("constant_weight"));
  module.def("attend", &attend_op, py::arg("qkv"), py::arg("keys"), py::arg("values"), py::arg("places"),
             py::arg("parts"), py::arg("arrivals"), py::arg("scale"));
  module.def("attend_parts", &attend_parts, py::arg("batch"), py::arg("heads"), py::arg("head_size"),
             py::arg("capacity"));
  module.def("embed", &embed_op, py::arg("ids"), py::arg("places"), py::arg("tokens"), py::arg("positions"));
  module.def("choose", &choose_op, py::arg("logits"), py::arg("ids"), py::arg("history"), py::arg("counts"),
             py::arg("places"), py::arg("advance"));
  module.def("takes_logits", &takes_logits, py::arg("k"), py::arg("device"));
  module.def("logits", &logits_op, py::arg("x"), py::arg("w"));
}

}  // namespace octofuse
