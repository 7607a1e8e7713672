// Passes over rows: norms, activations, quantisation (octofuse/row_pass.h). Sums have reference.row_sum's order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/activations.h"
#include "cpu/floats.h"
#include "octofuse/epilogue_pass.h"
#include "octofuse/row_pass.h"

namespace octofuse::cpu {
namespace {

constexpr int kGroup = 256;  // elements: 32 packs of 8
constexpr int kLanes = 32;

// Each 8 neighbours as a tree.
inline void add_packs(const float* v, float* packs) {
#if defined(__AVX2__)
  for (int i = 0; i < kLanes; i += 4) {
    const float* at = v + i * 8;
    const __m256 ab = _mm256_hadd_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8));
    const __m256 cd = _mm256_hadd_ps(_mm256_loadu_ps(at + 16), _mm256_loadu_ps(at + 24));
    const __m256 halves = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(packs + i, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    const float* at = v + i * 8;
    packs[i] = ((at[0] + at[1]) + (at[2] + at[3])) + ((at[4] + at[5]) + (at[6] + at[7]));
  }
#endif
}

// 32 values: i plus i + 16, then + 8, 4, 2 and 1.
inline float halve(float* v) {
  for (int half = 16; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
  }
  return v[0];
}

// v: count floats, with room for zeros up to a multiple of kGroup.
inline float row_sum(float* v, int64_t count) {
  float lanes[kLanes] = {};
  const int64_t groups = (count + kGroup - 1) / kGroup;
  for (int64_t i = count; i < groups * kGroup; ++i) v[i] = 0.0F;
  for (int64_t group = 0; group < groups; ++group) {
    float packs[kLanes];
    add_packs(v + group * kGroup, packs);
    lanes[group % kLanes] = lanes[group % kLanes] + halve(packs);
  }
  return halve(lanes);
}

// In place; `squares` has room for count + kGroup floats.
inline void normalise(const RowPassArgs& args, float* v, float* squares) {
  const int64_t count = args.cols;
  const auto length = static_cast<float>(count);
  if (args.norm == Norm::kLayer) {
    const float mean = row_sum(v, count) / length;
    for (int64_t i = 0; i < count; ++i) v[i] = v[i] - mean;
  }
  for (int64_t i = 0; i < count; ++i) squares[i] = v[i] * v[i];
  const float variance = row_sum(squares, count) / length + args.eps;
  const float r = 1.0F / static_cast<float>(std::sqrt(static_cast<double>(variance)));
  for (int64_t i = 0; i < count; ++i) v[i] = v[i] * r;
  if (args.weight != nullptr) {
    load_floats(args.weight, args.affine_type, 0, count, squares);
    for (int64_t i = 0; i < count; ++i) v[i] = v[i] * squares[i];
  }
  if (args.bias != nullptr) {
    load_floats(args.bias, args.affine_type, 0, count, squares);
    for (int64_t i = 0; i < count; ++i) v[i] = v[i] + squares[i];
  }
  round_floats(v, count, args.type);
}

// amax / 127, of float8 amax / its largest number; of zeros 1, and of a row with NaN NaN.
inline float token_scale(const float* v, int64_t count, DType type) {
  int32_t most = 0;  // magnitudes are ordered as their bits are, NaN above all
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<int32_t>(bits_of(v[i]) & 0x7FFFFFFF);
    most = bits > most ? bits : most;
  }
  const float largest = type == DType::kInt8 ? 127.0F : type == DType::kE4M3 ? 448.0F : 57344.0F;
  return most == 0 ? 1.0F : float_of(static_cast<uint32_t>(most)) / largest;
}

// buffer: 2 * (cols + kGroup) floats.
inline void row_pass_row(const RowPassArgs& args, int64_t row, float* buffer) {
  const int64_t count = args.cols, at = row * args.ldx;
  float* v = buffer;
  float* other = buffer + count + kGroup;
  load_floats(args.x, args.type, at, count, v);
  if (args.residual != nullptr) {
    load_floats(args.residual, args.type, row * args.residual_ld, count, other);
    for (int64_t i = 0; i < count; ++i) v[i] = v[i] + other[i];
    store_floats(v, count, args.sum, args.type, row * count);
    round_floats(v, count, args.type);
  }
  if (args.norm != Norm::kNone) normalise(args, v, other);
  if (args.activation != Activation::kNone) {
    activate(v, count, args.activation);
    round_floats(v, count, args.type);
  }
  if (args.gated) {
    load_floats(args.x, args.type, at + count, count, other);
    for (int64_t i = 0; i < count; ++i) v[i] = v[i] * other[i];
    round_floats(v, count, args.type);
  }
  if (args.order != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const auto from = static_cast<uint32_t>(args.order[i]);
      other[i] = v[from < count ? from : count - 1];
    }
    v = other;
  }
  if (args.y != nullptr) {
    store_floats(v, count, args.y, args.type, row * count);
    return;
  }
  int8_t* q = args.q + row * count;
  if (args.block_scales) {
    for (int64_t i = 0; i < count; i += kScaleBlock) {
      const int64_t some = least(kScaleBlock, count - i);
      const float scale = args.scales[i / kScaleBlock * args.rows + row] = token_scale(v + i, some, args.q_type);
      store_scaled(v + i, some, 1.0F / scale, -127.0F, q + i, args.q_type);
    }
    return;
  }
  float scale = scale_at(args.scale, row);
  if (scale == 0.0F) scale = 1.0F;  // of parts that are all zero
  if (args.scales != nullptr) {
    scale = token_scale(v, count, args.q_type);
    const bool zero = args.bare_scales && std::all_of(v, v + count, [](float one) { return one == 0.0F; });
    args.scales[row] = zero ? 0.0F : scale;
  }
  store_scaled(v, count, 1.0F / scale, -127.0F, q, args.q_type);
}

inline void row_pass_rows(const RowPassArgs& args, int64_t first, int64_t last, float* buffer) {
  for (int64_t row = first; row < last; ++row) row_pass_row(args, row, buffer);
}

// Plain dequantisation: x_scale alone.
inline void dequantize_rows(const DequantizeArgs& args, int64_t first, int64_t last) {
  constexpr int64_t kAtOnce = 256;
  float t[kAtOnce];
  for (int64_t row = first; row < last; ++row) {
    const float scale = scale_at(args.epilogue.x_scale, row);
    for (int64_t i = 0; i < args.cols; i += kAtOnce) {
      const int64_t some = args.cols - i < kAtOnce ? args.cols - i : kAtOnce;
      load_floats(args.q, args.q_type, row * args.ldq + i, some, t);
      for (int64_t j = 0; j < some; ++j) t[j] = t[j] * scale;
      store_floats(t, some, args.out, args.out_type, row * args.ldo + i);
    }
  }
}

}  // namespace
}  // namespace octofuse::cpu
