// The formula behind the sums (epilogue/EPILOGUES.md), for a row of at most kGemmChannels channels.
#pragma once

#include <cstdint>

#include "cpu/activations.h"
#include "cpu/floats.h"
#include "cpu/kernels.h"
#include "octofuse/gemm.h"

namespace octofuse::cpu {
namespace {

// Where a row's part goes.
struct Output {
  void* data;
  int64_t ld;
  DType type;
};

// t + bias, activation, residual, rounding: channels [n0, n0 + count) of row m.
inline void finish_floats(const EpilogueArgs& e, const Output& out, int64_t m, int64_t n0, int64_t count, float* t) {
  float other[kGemmChannels];
  if (e.bias != nullptr) {
    load_floats(e.bias, e.bias_type, n0, count, other);
    for (int64_t i = 0; i < count; ++i) t[i] = t[i] + other[i];
  }
  activate(t, count, e.activation);
  if (e.residual != nullptr) {
    load_floats(e.residual, e.residual_type, m * e.residual_ld + n0, count, other);
    for (int64_t i = 0; i < count; ++i) t[i] = t[i] + other[i];
  }
  const int64_t at = m * out.ld + n0;
  if (size_of(out.type) == 1) {
    // The bare requantisation of i8i8_matmul has its factor in w_scale, and 1 here.
    const float r = 1.0F / scale_at(e.out_scale, 0);
    store_scaled(t, count, r, static_cast<float>(e.clamp_low), static_cast<int8_t*>(out.data) + at, out.type);
  } else {
    store_floats(t, count, out.data, out.type, at);
  }
}

// t * w_scale * x_scale, and the rest.
inline void scale_and_finish(const EpilogueArgs& e, const Output& out, int64_t m, int64_t n0, int64_t count, float* t) {
  if (e.w_scale.data != nullptr && e.w_scale.step == 1) {
    for (int64_t i = 0; i < count; ++i) t[i] = t[i] * e.w_scale.data[n0 + i];
  } else {
    for (int64_t i = 0; i < count; ++i) t[i] = t[i] * scale_at(e.w_scale, n0 + i);
  }
  const float x_scale = scale_at(e.x_scale, m);
  for (int64_t i = 0; i < count; ++i) t[i] = t[i] * x_scale;
  finish_floats(e, out, m, n0, count, t);
}

inline void finish_sums(const EpilogueArgs& e, const Output& out, int64_t m, int64_t n0, int64_t count, int32_t* acc) {
  if (e.w_sum != nullptr) {
    // Modulo 2^32, as the GPU subtracts.
    const auto zero =
        static_cast<uint32_t>(e.x_zero.data == nullptr ? e.x_zero.value : e.x_zero.data[m * e.x_zero.step]);
    for (int64_t i = 0; i < count; ++i) {
      acc[i] = static_cast<int32_t>(static_cast<uint32_t>(acc[i]) - zero * static_cast<uint32_t>(e.w_sum[n0 + i]));
    }
  }
  if (out.type == DType::kInt32) {
    std::memcpy(static_cast<int32_t*>(out.data) + m * out.ld + n0, acc, static_cast<size_t>(count) * 4);
    return;
  }
  float t[kGemmChannels];
  for (int64_t i = 0; i < count; ++i) t[i] = static_cast<float>(acc[i]);
  scale_and_finish(e, out, m, n0, count, t);
}

}  // namespace
}  // namespace octofuse::cpu
