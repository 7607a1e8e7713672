// The kernels of a decoding step that are not linear layers: a token's embedding, its attention, its successor.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

// Positions of a sequence that one block reads: longer ones are split, at multiples of this alone, and the parts are
// combined in order. So a result depends on the sequence's own length, never on the batch or the cache's capacity.
constexpr int kAttendChunk = 128;

// One new token of each sequence: its key and value go into the cache, and
//   out[b, h] = sum_p softmax_p(q . keys[p] / sqrt(head_size)) * values[p],   p = 0 .. places[b],
// in fp32, rounded to `type`; with out_type int8 then quantised by `scale`.
struct AttendArgs {
  int batch = 0, heads = 0, head_size = 0, capacity = 0;
  DType type = DType::kFloat16;  // fp16 or bf16
  const void* qkv = nullptr;     // [batch, 3 * heads * head_size], row stride ldqkv
  int64_t ldqkv = 0;
  void* keys = nullptr;             // [batch, heads, capacity, head_size], contiguous
  void* values = nullptr;           // likewise
  const int64_t* places = nullptr;  // [batch]: the new token's position, below capacity
  void* out = nullptr;              // [batch, heads * head_size], contiguous
  DType out_type = DType::kFloat16;
  ScaleView scale;
  float* parts = nullptr;        // attend_parts() floats
  bool rehearses = false;        // attend() decides
  uint32_t* arrivals = nullptr;  // [batch * heads], zero; left zero
};

constexpr int kMaxHeadSize = 128;  // and a multiple of 8

// Floats of scratch memory that a call needs.
int64_t attend_parts(int64_t batch, int64_t heads, int64_t head_size, int64_t capacity);

void attend(const AttendArgs& args, int device, Stream stream);

// out[b] = tokens[ids[b]] + positions[places[b]], rounded to `type`, fp16 or bf16.
struct EmbedArgs {
  int batch = 0, width = 0;  // width: a multiple of 8
  DType type = DType::kFloat16;
  const int64_t* ids = nullptr;
  const int64_t* places = nullptr;
  const void* tokens = nullptr;     // [vocabulary, width], contiguous
  const void* positions = nullptr;  // [positions, width], contiguous
  void* out = nullptr;              // [batch, width], contiguous
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
// history[b, counts[b]], then counts[b] grows by one and places[b] by `advance`.
struct ChooseArgs {
  int batch = 0, vocabulary = 0;
  DType type = DType::kFloat16;  // fp16 or bf16
  const void* logits = nullptr;  // [batch, vocabulary], row stride ld
  int64_t ld = 0;
  int64_t* ids = nullptr;
  int64_t* history = nullptr;  // [batch, history_ld]
  int64_t history_ld = 0;
  int64_t* counts = nullptr;
  int64_t* places = nullptr;
  int advance = 0;
};

void choose(const ChooseArgs& args, int device, Stream stream);

}  // namespace octofuse
