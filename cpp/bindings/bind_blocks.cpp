// All blocks of a model for one token. models/one_token.py packs what it reads; CUDA alone.
#include "arguments.h"
#include "module.h"
#include "octofuse/decode.h"
#include "octofuse/error.h"

namespace octofuse {
namespace {

DecodeArgs sizes(int64_t layers, int64_t width, int64_t inner, int64_t heads, int64_t capacity) {
  DecodeArgs args;
  args.layers = static_cast<int>(layers);
  args.width = static_cast<int>(width);
  args.inner = static_cast<int>(inner);
  args.heads = static_cast<int>(heads);
  args.head_size = static_cast<int>(width / heads);
  args.capacity = static_cast<int>(capacity);
  return args;
}

bool takes_blocks(int64_t layers, int64_t width, int64_t inner, int64_t heads, int device) {
  return takes_decode_blocks(sizes(layers, width, inner, heads, 1), device);
}

int64_t block_messages(int64_t layers, int64_t width, int64_t inner, int64_t heads, int64_t capacity) {
  return decode_messages(sizes(layers, width, inner, heads, capacity));
}

// What DecodeArgs points to, one tensor each; `pairs` is [layers, 2, 1, heads, capacity, head size]. -> [1, width].
py::object decode_blocks_op(py::handle ids_object, py::handle places_object, py::handle tokens_object,
                            py::handle positions_object, py::handle weights_object, py::handle vectors_object,
                            py::handle scales_object, py::handle norms_object, py::handle eps_object,
                            py::handle pairs_object, py::handle messages_object, py::handle launches_object,
                            py::handle activation, bool final_norm) {
  const TensorView tokens(tokens_object, "tokens");
  const TensorView positions(positions_object, "positions");
  const TensorView norms(norms_object, "norms");
  const TensorView pairs(pairs_object, "pairs");
  const TensorView vectors(vectors_object, "vectors");
  const TensorView scales(scales_object, "scales");
  const TensorView eps(eps_object, "eps");
  const TensorView weights(weights_object, "weights");
  const TensorView messages(messages_object, "messages");
  const TensorView launches(launches_object, "launches");
  expect_half(tokens);
  if (tokens.ndim() != 2) refuse<ValueError>("tokens", "[vocabulary, width]", "shape " + tokens.shape_text());
  if (positions.ndim() != 2) refuse<ValueError>("positions", "[P, width]", "shape " + positions.shape_text());
  if (pairs.ndim() != 6) {
    refuse<ValueError>("pairs", "[layers, 2, 1, heads, capacity, head size]", "shape " + pairs.shape_text());
  }
  if (vectors.ndim() != 2) refuse<ValueError>("vectors", "[layers, floats of a layer]", vectors.shape_text());
  const int64_t layers = pairs.size(0);
  const int64_t width = tokens.size(1);
  DecodeArgs args = sizes(layers, width, vectors.size(1) / 2 - 5 * width, pairs.size(3), pairs.size(4));
  for (const TensorView* tensor : {&positions, &norms, &pairs}) expect_dtype(*tensor, {tokens.dtype});
  for (const TensorView* tensor : {&vectors, &scales, &eps}) expect_dtype(*tensor, {DType::kFloat32});
  expect_dtype(launches, {DType::kInt32});
  expect_tensor(tokens, shape_of(tokens), tokens);
  expect_tensor(positions, {positions.size(0), width}, tokens);
  expect_tensor(pairs, {layers, 2, 1, pairs.size(3), pairs.size(4), width / pairs.size(3)}, tokens);
  expect_tensor(vectors, {layers, 2 * (5 * width + args.inner)}, tokens);
  expect_tensor(scales, {layers, 4}, tokens);
  expect_tensor(norms, {2 * layers + 1, 2, width}, tokens);
  expect_tensor(eps, {2 * layers + 1}, tokens);
  expect_tensor(launches, {2}, tokens);
  for (const TensorView* tensor : {&tokens, &positions, &norms, &pairs, &messages}) expect_aligned(*tensor);
  if (!takes_decode_blocks(args, tokens.device())) {
    refuse<ValueError>("tokens", "sizes and a device that takes_blocks() accepts", "shape " + tokens.shape_text());
  }
  args.ids = expect_int64(TensorView(ids_object, "ids"), {1}, tokens);
  args.places = expect_int64(TensorView(places_object, "places"), {1}, tokens);
  args.weights = reinterpret_cast<const int8_t* const*>(expect_int64(weights, {layers, 4}, tokens));
  args.messages = reinterpret_cast<uint64_t*>(expect_int64(messages, {decode_messages(args)}, tokens));
  args.type = tokens.dtype;
  args.activation = parse_activation(activation);
  args.tokens = tokens.data();
  args.positions = positions.data();
  args.vectors = vectors.data<float>();
  args.scales = scales.data<float>();
  args.norms = norms.data();
  args.eps = eps.data<float>();
  args.pairs = pairs.data();
  args.launches = launches.data<uint32_t>();
  args.final_norm = final_norm;
  const TensorFactory factory(tokens.dl.device);
  py::object result = factory.make({1, width}, args.type, &args.out);
  decode_blocks(args, tokens.device(), factory.current_stream());
  return result;
}

}  // namespace

void bind_blocks(py::module_& module) {
  module.def("takes_blocks", &takes_blocks, py::arg("layers"), py::arg("width"), py::arg("inner"), py::arg("heads"),
             py::arg("device"));
  module.def("block_messages", &block_messages, py::arg("layers"), py::arg("width"), py::arg("inner"), py::arg("heads"),
             py::arg("capacity"));
  module.def("decode_blocks", &decode_blocks_op, py::arg("ids"), py::arg("places"), py::arg("tokens"),
             py::arg("positions"), py::arg("weights"), py::arg("vectors"), py::arg("scales"), py::arg("norms"),
             py::arg("eps"), py::arg("pairs"), py::arg("messages"), py::arg("launches"), py::arg("activation"),
             py::arg("final_norm"));
}

}  // namespace octofuse
