// What a decoding step calls: a linear layer that quantises its own input, and embedding, attention and the argmax of
// its logits. CPU tensors are checked here and computed in Python (None).
#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

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
// for each token, or with scales of blocks for each of their columns. x may be quantised already, with x_scale.
py::object quantized_linear(const py::tuple& fields) {
  const RowLinearFields f(fields);
  LinearCall call = checked_operands(
      f.x, f.w, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt8, DType::kE4M3, DType::kE5M2});
  const bool given = size_of(call.x.dtype) == 1;
  RowPassArgs rows;
  if (!given) rows = checked_rows(call.x);
  if (given && f.x_scale.is_none())
    refuse<ValueError>("x_scale", std::string("the scale of x in ") + name_of(call.x.dtype), "None");
  if (given && !f.norm.is_none()) {
    refuse<ValueError>("norm", std::string("None for x in ") + name_of(call.x.dtype),
                       "'" + parse_str(f.norm, "norm") + "'");
  }
  if (!f.norm.is_none()) {
    parse_norm(parse_str(f.norm, "norm"), {f.norm_weight, f.norm_bias, f.eps, "norm_weight", "norm_bias"}, call.x,
               rows);
  }
  GemmArgs& args = call.args;
  args.fast_accumulate = f.fast_accumulate.cast<bool>();
  const bool per_token = f.x_scale.is_none();
  const bool blocks = parse_block_scales(call, given ? f.x_scale : py::handle(py::none()), f.w_scale);
  if (blocks && !given && !per_token) refuse<ValueError>("x_scale", "None beside a w_scale of blocks", "one");
  if (!per_token && !blocks) rows.scale = parse_scale(f.x_scale, "x_scale", given ? args.m : -1, call.x);
  parse_epilogue(call, f.w_scale, f.bias, f.activation, f.residual);
  args.constant_weight = f.constant_weight.cast<bool>();
  args.out_type = parse_output(call, f.out_dtype, f.out_scale);
  args.ldo = args.n;
  if (call.x.on_cpu()) {
    if (left_to_onednn(args)) return py::none();
    py::object result = TensorFactory(call.x.dl.device).make(call.out_shape, args.out_type, &args.out);
    const CpuCall on_cpu;
    if (given) {
      if (!blocks) args.epilogue.x_scale = rows.scale;
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
    if (!blocks) args.epilogue.x_scale = rows.scale;
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
    refuse<ValueError>(tensor.name, "a contiguous tensor of shape " + text_of(shape), tensor.layout_text());
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

// [tokens, heads, size], dense in the last dimension.
HeadView parse_heads(const TensorView& tensor, const std::vector<int64_t>& shape, const TensorView& reference) {
  expect_dtype(tensor, {reference.dtype});
  expect_same_device(tensor, reference);
  if (shape_of(tensor) != shape || tensor.stride(2) != 1) {
    refuse<ValueError>(tensor.name, "shape " + text_of(shape) + ", dense in the last dimension", tensor.shape_text());
  }
  return {tensor.data(), tensor.stride(0), tensor.stride(1)};
}

float* parse_scales(py::handle object, const char* name, bool wanted, const TensorView& codes) {
  if (!wanted) {
    if (!object.is_none()) refuse<ValueError>(name, "None beside a cache in floating point", "a tensor");
    return nullptr;
  }
  if (object.is_none()) refuse<ValueError>(name, "fp32 scales beside a cache in 8 bits", "None");
  const TensorView scales(object, name);
  expect_dtype(scales, {DType::kFloat32});
  expect_tensor(scales, {codes.size(0), codes.size(1), codes.size(2)}, codes);
  return scales.data<float>();
}

// (of keys, of values), or None.
void parse_fixed_scales(py::handle object, HeadsArgs& args) {
  if (object.is_none()) return;
  if (args.cache != CacheType::kFloat8) refuse<ValueError>("fixed_scales", "None but beside a float8 cache", "a pair");
  std::tie(args.key_scale, args.value_scale) = object.cast<std::pair<float, float>>();
  for (const float scale : {args.key_scale, args.value_scale}) {
    if (!(scale > 0.0F) || !std::isfinite(scale)) {
      refuse<ValueError>("fixed_scales", "two finite numbers above 0", std::to_string(scale));
    }
  }
}

void parse_cache(const AttendFields& f, const TensorView& q, const TensorView& keys, HeadsArgs& args) {
  if (keys.ndim() != 4) refuse<ValueError>("keys", "[B, heads, capacity, head size]", "shape " + keys.shape_text());
  const int64_t size = keys.size(3);
  if (size < 8 || size > kMaxHeadSize || size % 8 != 0) {
    refuse<ValueError>("keys", "a head size of 8 to 256, a multiple of 8", "shape " + keys.shape_text());
  }
  if (keys.size(2) < 1 || keys.size(1) < 1) {
    refuse<ValueError>("keys", "a head and room for one position at least", "shape " + keys.shape_text());
  }
  if (keys.size(2) > 1 << 30) refuse<ValueError>("keys", "room for up to 2^30 positions", "shape " + keys.shape_text());
  const bool is_uint8 = keys.dl.dtype.code == kDLUInt && keys.dl.dtype.bits == 8;
  args.cache = is_uint8 ? CacheType::kFloat8 : keys.dtype == DType::kInt8 ? CacheType::kInt8 : CacheType::kFloat;
  if (args.cache == CacheType::kFloat) expect_dtype(keys, {q.dtype, DType::kInt8});
  if (args.cache != CacheType::kFloat && size % 16 != 0) {
    refuse<ValueError>("keys", "a head size that is a multiple of 16, with 8 bits", "shape " + keys.shape_text());
  }
  const TensorView values(f.values, "values");
  if (values.dtype != keys.dtype || values.dl.dtype.code != keys.dl.dtype.code) {
    refuse<TypeError>("values", "dtype " + keys.dtype_text() + " like keys", values.dtype_text());
  }
  for (const TensorView* tensor : {&keys, &values}) {
    expect_tensor(*tensor, shape_of(keys), q);
    expect_aligned(*tensor);
  }
  args.batch = static_cast<int>(keys.size(0));
  args.pairs = static_cast<int>(keys.size(1));
  args.capacity = static_cast<int>(keys.size(2));
  args.head_size = static_cast<int>(size);
  args.keys = keys.data();
  args.values = values.data();
  const bool scaled = args.cache != CacheType::kFloat;
  args.key_scales = parse_scales(f.key_scales, "key_scales", scaled, keys);
  args.value_scales = parse_scales(f.value_scales, "value_scales", scaled, keys);
  parse_fixed_scales(f.fixed_scales, args);
}

const void* parse_head_norm(py::handle object, const char* name, const TensorView& q, HeadsArgs& args) {
  if (object.is_none()) return nullptr;
  const TensorView weight(object, name);
  expect_dtype(weight, {DType::kFloat32, q.dtype});
  expect_tensor(weight, {args.head_size}, q);
  if (args.query_norm != nullptr && weight.dtype != args.norm_type) {
    refuse<TypeError>(name, std::string("dtype ") + name_of(args.norm_type) + " like query_norm", weight.dtype_text());
  }
  args.norm_type = weight.dtype;
  return weight.data();
}

// What append() and attend() share. q [M, H, D], k and v [M, P, D], keys and values [B, P, C, D].
HeadsArgs parse_heads_call(const AttendFields& f, const TensorView& q) {
  expect_half(q);
  if (q.ndim() != 3) refuse<ValueError>("q", "[M, heads, head size]", "shape " + q.shape_text());
  const TensorView keys(f.keys, "keys");
  HeadsArgs args;
  args.type = q.dtype;
  parse_cache(f, q, keys, args);
  args.queries = static_cast<int>(q.size(1));
  if (args.queries % args.pairs != 0) {
    refuse<ValueError>("q", "a multiple of the cache's " + std::to_string(args.pairs) + " heads", q.shape_text());
  }
  args.q = parse_heads(q, {q.size(0), q.size(1), args.head_size}, q);
  if (f.k.is_none() != f.v.is_none())
    refuse<ValueError>("v", "None like k, or both", f.v.is_none() ? "None" : "a tensor");
  if (!f.k.is_none()) {
    args.k = parse_heads(TensorView(f.k, "k"), {q.size(0), args.pairs, args.head_size}, q);
    args.v = parse_heads(TensorView(f.v, "v"), {q.size(0), args.pairs, args.head_size}, q);
  }
  if (!f.rotary.is_none()) {
    const TensorView table(f.rotary, "rotary");
    expect_dtype(table, {DType::kFloat32});
    if (table.ndim() != 2 || table.size(0) < args.capacity || table.size(1) % 2 != 0 ||
        table.size(1) > args.head_size) {
      refuse<ValueError>("rotary", "[at least capacity, an even number of channels up to the head size]",
                         "shape " + table.shape_text());
    }
    expect_tensor(table, shape_of(table), q);
    args.rotary = static_cast<int>(table.size(1));
    args.rotary_table = table.data<const float>();
  }
  args.query_norm = parse_head_norm(f.query_norm, "query_norm", q, args);
  args.key_norm = parse_head_norm(f.key_norm, "key_norm", q, args);
  args.eps = f.eps.cast<float>();
  return args;
}

void append_op(const py::tuple& fields) {
  const AttendFields f(fields);
  const TensorView q(f.q, "q");
  HeadsArgs args = parse_heads_call(f, q);
  if (f.k.is_none()) refuse<ValueError>("k", "keys to append", "None");
  if (args.batch == 0 || q.size(0) % args.batch != 0 || q.size(0) / args.batch > args.capacity) {
    refuse<ValueError>("q", "as many tokens, up to the cache's capacity, of each of its sequences", q.shape_text());
  }
  args.tokens = static_cast<int>(q.size(0) / args.batch);
  const int64_t* first = nullptr;
  if (!f.positions.is_none()) first = expect_int64(TensorView(f.positions, "positions"), {args.batch}, q);
  append(args, first, q.device(), TensorFactory(q.dl.device).current_stream());
}

// -> [B, H * D] in q's dtype, or int8 by out_scale. positions [B]; partials and arrivals: attend_scratch() of them,
// fp32, and int32 that are zero.
py::object attend_op(const py::tuple& fields) {
  const AttendFields f(fields);
  const TensorView q(f.q, "q");
  AttendArgs args;
  args.heads = parse_heads_call(f, q);
  const HeadsArgs& heads = args.heads;
  if (q.size(0) != heads.batch) {
    refuse<ValueError>("q", "a token of each of the cache's " + std::to_string(heads.batch) + " sequences",
                       q.shape_text());
  }
  args.scaling = f.scaling.cast<float>();
  args.softcap = f.softcap.cast<float>();
  args.window = f.window.cast<int>();
  if (args.window < 0) refuse<ValueError>("window", "at least 0", std::to_string(args.window));
  args.positions = expect_int64(TensorView(f.positions, "positions"), {heads.batch}, q);
  if (!f.starts.is_none()) args.starts = expect_int64(TensorView(f.starts, "starts"), {heads.batch}, q);
  const AttendScratch scratch =
      attend_scratch(heads.batch, heads.queries, heads.pairs, heads.head_size, heads.capacity);
  const TensorView partials(f.partials, "partials");
  const TensorView arrivals(f.arrivals, "arrivals");
  expect_dtype(partials, {DType::kFloat32});
  expect_dtype(arrivals, {DType::kInt32});
  expect_tensor(partials, {scratch.floats}, q);
  expect_tensor(arrivals, {scratch.counters}, q);
  args.partials = partials.data<float>();
  args.arrivals = arrivals.data<uint32_t>();
  args.out_type = q.dtype;
  if (!f.out_scale.is_none()) {
    args.scale = parse_scale(f.out_scale, "out_scale", -1, q);
    args.out_type = DType::kInt8;
  }
  const TensorFactory factory(q.dl.device);
  py::object result = factory.make({heads.batch, int64_t{heads.queries} * heads.head_size}, args.out_type, &args.out);
  attend(args, q.device(), factory.current_stream());
  return result;
}

py::tuple attend_scratch_op(int64_t batch, int64_t queries, int64_t pairs, int64_t head_size, int64_t capacity) {
  const AttendScratch scratch = attend_scratch(batch, queries, pairs, head_size, capacity);
  return py::make_tuple(scratch.floats, scratch.counters);
}

// ids, positions [B]; token_embeddings [V, W] times multiplier, and position_embeddings [P, W] or None -> their sum for
// each token, [B, W].
py::object embed_op(py::handle ids_object, py::handle positions_object, py::handle token_embeddings,
                    py::handle position_embeddings, float multiplier) {
  const TensorView table(token_embeddings, "token_embeddings");
  expect_half(table);
  if (table.ndim() != 2 || table.size(1) % 8 != 0) {
    refuse<ValueError>(table.name, "[vocabulary, width], width a multiple of 8", "shape " + table.shape_text());
  }
  expect_tensor(table, shape_of(table), table);
  expect_aligned(table);
  EmbedArgs args;
  if (!position_embeddings.is_none()) {
    const TensorView of_positions(position_embeddings, "position_embeddings");
    if (of_positions.ndim() != 2) {
      refuse<ValueError>(of_positions.name, "[P, width]", "shape " + of_positions.shape_text());
    }
    expect_dtype(of_positions, {table.dtype});
    expect_tensor(of_positions, {of_positions.size(0), table.size(1)}, table);
    expect_aligned(of_positions);
    args.position_embeddings = of_positions.data();
  }
  const TensorView ids(ids_object, "ids");
  const TensorView positions(positions_object, "positions");
  const int64_t batch = ids.numel();
  args.ids = expect_int64(ids, {batch}, table);
  args.positions = expect_int64(positions, {batch}, table);
  args.batch = static_cast<int>(batch);
  args.width = static_cast<int>(table.size(1));
  args.type = table.dtype;
  args.token_embeddings = table.data();
  args.multiplier = multiplier;
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
  module.def("append", &append_op, py::arg("call"));
  module.def("attend", &attend_op, py::arg("call"));
  module.def("attend_scratch", &attend_scratch_op, py::arg("batch"), py::arg("queries"), py::arg("pairs"),
             py::arg("head_size"), py::arg("capacity"));
  module.def("embed", &embed_op, py::arg("ids"), py::arg("positions"), py::arg("token_embeddings"),
             py::arg("position_embeddings"), py::arg("multiplier"));
  module.def("argmax", &argmax_op, py::arg("logits"), py::arg("ids"), py::arg("history"), py::arg("counts"),
             py::arg("positions"), py::arg("advance"));
  module.def("takes_logits", &takes_logits, py::arg("k"), py::arg("device"));
  module.def("logits", &logits_op, py::arg("x"), py::arg("w"));
}

}  // namespace octofuse
