// Eight floats, whose sums have one order on every instruction set, and a fused multiply-add that rounds once.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/dot.h"
#include "cpu/floats.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octofuse::cpu {
namespace {

#if defined(__AVX2__)
struct Lanes {
  __m256 v;
  static Lanes all(float value) { return {_mm256_set1_ps(value)}; }
  static Lanes load(const float* at) { return {_mm256_loadu_ps(at)}; }
  static __m256i integers(const uint8_t* at) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
  }
  static Lanes load_bytes(const uint8_t* at) { return {_mm256_cvtepi32_ps(integers(at))}; }
  // table[byte >> shift & 7] of eight bytes.
  static Lanes look_up(const float* table, const uint8_t* at, int shift) {
    return {_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), _mm256_srli_epi32(integers(at), shift))};
  }
  // table[byte] of eight bytes below 16.
  static Lanes look_up_16(const float* table, const uint8_t* at) {
    const __m256i codes = integers(at);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), codes);
    return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)))};
  }
  // Eight numbers in e4m3: as fp16, whose exponents have another bias, they are 2^-8 of them, and subnormal ones pass
  // whether or not the thread flushes such numbers.
  static Lanes load_e4m3(const uint8_t* at) {
    const __m128i bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    const __m128i sign = _mm_slli_epi16(_mm_srli_epi16(bytes, 7), 15);
    const __m128i rest = _mm_srli_epi16(_mm_slli_epi16(bytes, 9), 2);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(0x1p8F))};
  }
  void store(float* at) const { _mm256_storeu_ps(at, v); }
  Lanes operator-(Lanes other) const { return {_mm256_sub_ps(v, other.v)}; }
  Lanes operator+(Lanes other) const { return {_mm256_add_ps(v, other.v)}; }
  Lanes operator*(Lanes other) const { return {_mm256_mul_ps(v, other.v)}; }
  // a * b + c
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
};
#else
struct Lanes {
#if defined(__aarch64__)
  float32x4_t low, high;
  static Lanes load(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4)}; }
  void store(float* at) const {
    vst1q_f32(at, low);
    vst1q_f32(at + 4, high);
  }
  Lanes operator-(Lanes other) const { return {vsubq_f32(low, other.low), vsubq_f32(high, other.high)}; }
  Lanes operator+(Lanes other) const { return {vaddq_f32(low, other.low), vaddq_f32(high, other.high)}; }
  Lanes operator*(Lanes other) const { return {vmulq_f32(low, other.low), vmulq_f32(high, other.high)}; }
  static Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
#else
  float v[8];
  static Lanes load(const float* at) {
    Lanes lanes;
    std::memcpy(lanes.v, at, 32);
    return lanes;
  }
  void store(float* at) const { std::memcpy(at, v, 32); }
  template <class Operation>
  static Lanes each(Operation operation) {
    Lanes lanes;
    for (int i = 0; i < 8; ++i) lanes.v[i] = operation(i);
    return lanes;
  }
  Lanes operator-(const Lanes& other) const {
    return each([&](int i) { return v[i] - other.v[i]; });
  }
  Lanes operator+(const Lanes& other) const {
    return each([&](int i) { return v[i] + other.v[i]; });
  }
  Lanes operator*(const Lanes& other) const {
    return each([&](int i) { return v[i] * other.v[i]; });
  }
  static Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
    return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }
#endif
  static Lanes all(float value) {
    const float values[8] = {value, value, value, value, value, value, value, value};
    return load(values);
  }
  static Lanes load_bytes(const uint8_t* at) {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = static_cast<float>(at[i]);
    return load(values);
  }
  static Lanes look_up(const float* table, const uint8_t* at, int shift) {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = table[at[i] >> shift & 7];
    return load(values);
  }
  static Lanes look_up_16(const float* table, const uint8_t* at) {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = table[at[i]];
    return load(values);
  }
  static Lanes load_e4m3(const uint8_t* at) {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = float_of_e4m3(at[i]);
    return load(values);
  }
};
#endif

inline void keep(Lanes& lanes) {
#if defined(__AVX2__)
  keep(lanes.v);
#else
  (void)lanes;
#endif
}

inline float sum_of(Lanes lanes) {
  float v[8];
  lanes.store(v);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

}  // namespace
}  // namespace octofuse::cpu
