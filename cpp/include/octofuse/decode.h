// The kernels of a decoding step that are not linear layers: a token's embedding, its attention, its successor.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

// How the cache has a key or a value: in the model's type, or in 8 bits with an fp32 scale for each token and head.
enum class CacheType : int8_t { kFloat, kInt8, kFloat8 };  // kFloat8: e4m3

// [tokens of all sequences, heads, head size], dense in the last; strides in elements.
struct HeadView {
  void* data = nullptr;
  int64_t row = 0, head = 0;
};

// The queries, keys and values of new tokens, what is done to them, and the cache.
//
// Queries and keys are normalised over a head by RMS norms with these weights, if there are any, and their first
// `rotary` channels rotated by the token's position: channel i < rotary / 2 together with channel i + rotary / 2. All
// that is in fp32 and rounded once to `type`. Keys and values then go into the cache, quantised where it is: s = amax /
// 127 or amax / 448, 1 for zeros, q = t * (1 / s) rounded to even.
struct HeadsArgs {
  int batch = 0, tokens = 1;   // tokens: of each sequence
  int queries = 0, pairs = 0;  // heads; queries is a multiple of pairs, whose heads serve so many of them in turn
  int head_size = 0, capacity = 0;
  DType type = DType::kFloat16;  // fp16 or bf16
  HeadView q, k, v;
  int rotary = 0;                       // channels, even
  const float* rotary_table = nullptr;  // [capacity, rotary]: cosines of a position's angles, then sines
  const void* query_norm = nullptr;     // [head_size], of norm_type: fp32 or `type`
  const void* key_norm = nullptr;       // likewise
  DType norm_type = DType::kFloat32;
  float eps = 0.0F;
  CacheType cache = CacheType::kFloat;
  void* keys = nullptr;           // [batch, pairs, capacity, head_size], contiguous
  void* values = nullptr;         // likewise
  float* key_scales = nullptr;    // [batch, pairs, capacity], with 8 bits
  float* value_scales = nullptr;  // likewise
  // Of a float8 cache: the scales of all new keys and of all new values; 0: each has its own, found from its largest
  // magnitude.
  float key_scale = 0.0F, value_scale = 0.0F;
};

constexpr int kMaxHeadSize = 256;  // and a multiple of 8, of 16 with a cache in 8 bits

// The tokens stand at positions 0 and up, or with `first` at first[b] and up: queries and keys are prepared in place,
// keys and values go into the cache. What would stand outside of it goes nowhere.
void append(const HeadsArgs& args, const int64_t* first, int device, Stream stream);

// One new token of each sequence: its key and value go into the cache, and
//   out[b, h] = sum_p softmax_p(score(q . keys[p] * scaling)) * values[p],   p = first .. positions[b],
// in fp32, rounded to `type`; with out_type int8 then quantised by `scale`. Weights are rounded to `type`, with a cache
// in 8 bits to fp16, before they meet the values. A position outside of the cache leaves its sequence's output and
// cache as they were. Without heads.k and heads.v the cache has the new token's already.
//
// In a captured graph the cache, `positions`, rotary_table, the norms and `scale` are read before earlier kernels have
// finished: what writes them must come before an embed(), or before a kernel that is launched without overlap.
struct AttendArgs {
  HeadsArgs heads;
  float scaling = 1.0F;
  float softcap = 0.0F;                // c of c * tanh(s / c); 0: scores stay
  int window = 0;                      // positions that a token sees, its own included; 0: all
  const int64_t* positions = nullptr;  // [batch]: the new token's position, below capacity
  const int64_t* starts = nullptr;     // [batch]: the first position of each sequence that is seen; nullptr: 0
  void* out = nullptr;                 // [batch, queries * head_size], contiguous
  DType out_type = DType::kFloat16;
  ScaleView scale;
  float* partials = nullptr;  // AttendScratch's floats: the splits' softmaxes
  // These are attend()'s own.
  int group = 1, sharing = 1;    // query heads that share a pair, and blocks that do
  float factor = 1.0F;           // of products, in front of the softcap or the power of two
  float inverse_pairs = 1.0F;    // 2 / head_size
  bool reads_first = false;      // lets successors in only behind its own first requests
  int slots = 2;                 // of a warp's ring
  int sums_at = 0;               // where the warps' sums lie in dynamic shared memory, in bytes
  uint32_t* arrivals = nullptr;  // AttendScratch's counters: blocks that are done; zero, and left zero
};

// Scratch memory that a call needs: floats, and 32-bit counters.
struct AttendScratch {
  int64_t floats, counters;
};
AttendScratch attend_scratch(int64_t batch, int64_t queries, int64_t pairs, int64_t head_size, int64_t capacity);

void attend(const AttendArgs& args, int device, Stream stream);

// out[b] = multiplier * token_embeddings[ids[b]] + position_embeddings[positions[b]], rounded to `type`, fp16 or bf16.
struct EmbedArgs {
  int batch = 0, width = 0;  // width: a multiple of 8
  DType type = DType::kFloat16;
  const int64_t* ids = nullptr;
  const int64_t* positions = nullptr;
  const void* token_embeddings = nullptr;     // [vocabulary, width], contiguous
  const void* position_embeddings = nullptr;  // [context, width], contiguous, or nullptr
  float multiplier = 1.0F;
  void* out = nullptr;  // [batch, width], contiguous
};

void embed(const EmbedArgs& args, int device, Stream stream);

// out[m, n] = sum_k x[m, k] * w[n, k] in fp32, rounded to `type`: an output head in floating point. A row's bits depend
// on the row alone.
struct LogitsArgs {
  int m = 0, n = 0, k = 0;
  DType type = DType::kFloat16;  // fp16 or bf16
  const void* x = nullptr;       // [m, k], contiguous; k a multiple of 8
  const void* w = nullptr;       // [n, k], contiguous; nothing in flight writes it
  void* out = nullptr;           // [m, n], row stride ldo
  int64_t ldo = 0;
};

// Whether this build and device have the kernel, for such a k.
bool takes_logits(int64_t k, int device);
void logits(const LogitsArgs& args, int device, Stream stream);

// The likeliest token of each row of logits, the first of equals; NaN is above all. It goes into ids[b] and
// history[b, counts[b]], then counts[b] grows by one and positions[b] by `advance`.
struct ArgmaxArgs {
  int batch = 0, vocabulary = 0;
  DType type = DType::kFloat16;  // fp16 or bf16
  const void* logits = nullptr;  // [batch, vocabulary], row stride ld
  int64_t ld = 0;
  int64_t* ids = nullptr;
  int64_t* history = nullptr;  // [batch, history_ld]
  int64_t history_ld = 0;
  int64_t* counts = nullptr;
  int64_t* positions = nullptr;
  int advance = 0;
};

void argmax(const ArgmaxArgs& args, int device, Stream stream);

}  // namespace octofuse
