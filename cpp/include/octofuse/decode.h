// The kernels of a decoding step that are not linear layers: a token's embedding, its attention, its successor.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

// Positions of a sequence that one block reads: longer ones are split, at multiples of this alone, and the splits'
// softmaxes are combined in order. So a result depends on the sequence's own length, never on the batch or the cache's
// capacity.
constexpr int kAttendSplit = 128;

// One new token of each sequence: its key and value go into the cache, and
//   out[b, h] = sum_p softmax_p(q . keys[p] / sqrt(head_size)) * values[p],   p = 0 .. positions[b],
// in fp32, rounded to `type`; with out_type int8 then quantised by `scale`. A position outside of the cache leaves its
// sequence's output and cache as they were.
//
// In a captured graph the cache and `positions` are read before earlier kernels have finished: what writes them must
// come before an embed(), or before a kernel that is launched without overlap.
struct AttendArgs {
  int batch = 0, heads = 0, head_size = 0, capacity = 0;
  DType type = DType::kFloat16;  // fp16 or bf16
  const void* qkv = nullptr;     // [batch, 3 * heads * head_size], row stride ldqkv
  int64_t ldqkv = 0;
  void* keys = nullptr;                // [batch, heads, capacity, head_size], contiguous
  void* values = nullptr;              // likewise
  const int64_t* positions = nullptr;  // [batch]: the new token's position, below capacity
  void* out = nullptr;                 // [batch, heads * head_size], contiguous
  DType out_type = DType::kFloat16;
  ScaleView scale;
  float* partials = nullptr;     // attend_partials() floats: the splits' softmaxes
  bool rehearses = false;        // attend() decides
  uint32_t* arrivals = nullptr;  // [batch * heads]: splits of a head that are done; zero, and left zero
};

constexpr int kMaxHeadSize = 128;  // and a multiple of 8

// Floats of scratch memory that a call needs.
int64_t attend_partials(int64_t batch, int64_t heads, int64_t head_size, int64_t capacity);

void attend(const AttendArgs& args, int device, Stream stream);

// out[b] = token_embeddings[ids[b]] + position_embeddings[positions[b]], rounded to `type`, fp16 or bf16.
struct EmbedArgs {
  int batch = 0, width = 0;  // width: a multiple of 8
  DType type = DType::kFloat16;
  const int64_t* ids = nullptr;
  const int64_t* positions = nullptr;
  const void* token_embeddings = nullptr;     // [vocabulary, width], contiguous
  const void* position_embeddings = nullptr;  // [context, width], contiguous
  void* out = nullptr;                        // [batch, width], contiguous
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
