// Rows of numbers: to fp32 and back, in loops that the compiler vectorises. Every step is one IEEE operation, so that
// all instruction sets give the same bits. Included by kernels.cpp alone, whose namespace is the instruction set's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "octofuse/types.h"

namespace octofuse::cpu {
namespace {

// Not std::min: what the linker merges must not hold one instruction set's code.
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

#if !defined(__F16C__) && !defined(__aarch64__)
inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7FFF;
  if (rest >= 0x7C00) return float_of(sign | 0x7F800000 | (rest & 0x3FF) << 13);
  // Normal numbers by their bits; subnormal ones are exact multiples of 2^-24.
  const float size = rest >= 0x400 ? float_of((rest << 13) + (112U << 23)) : static_cast<float>(rest) * 0x1p-24F;
  return float_of(sign | bits_of(size));
}

inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_of(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t rest = bits & 0x7FFFFFFF;
  if (rest > 0x7F800000) return sign | 0x7E00;
  if (rest >= 0x477FF000) return sign | 0x7C00;  // 65520 and above round to infinity
  if (rest < 0x38800000) {                       // subnormal: adding 0.5 leaves the wanted bits, rounded to even
    return sign | static_cast<uint16_t>(bits_of(float_of(rest) + 0.5F) - 0x3F000000);
  }
  return sign | static_cast<uint16_t>((rest + 0xC8000FFF + (rest >> 13 & 1)) >> 13);
}
#endif

// The value of e4m3's or e5m2's byte. Normal numbers by their bits; subnormal ones are exact multiples.
inline float float_of_e4m3(uint8_t byte) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80) << 24;
  const uint32_t rest = byte & 0x7F;
  const float normal = float_of((rest << 20) + (120U << 23));
  const float size = rest >= 8 ? normal : static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-9F;
  return float_of(sign | (rest == 0x7F ? 0x7FC00000 : bits_of(size)));
}

inline float float_of_e5m2(uint8_t byte) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80) << 24;
  const uint32_t rest = byte & 0x7F;
  const float normal = float_of((rest << 21) + (112U << 23));
  const float size = rest >= 4 ? normal : static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-16F;
  return float_of(sign | (rest >= 0x7C ? 0x7F800000 | (rest & 3) << 21 : bits_of(size)));
}

// Rounded to even, at most the largest number; NaN stays NaN. kBits of mantissa, the smallest normal number 2^kLow.
template <int kBits, int kLow>
inline uint8_t float8_of(float value, float largest, uint8_t nan) {
  const uint32_t bits = bits_of(value);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float size = float_of(bits & 0x7FFFFFFF);
  if (size != size) return sign | nan;
  const float kept = size > largest ? largest : size;
  constexpr int kShift = 23 - kBits;
  const uint32_t u = bits_of(kept);
  const uint32_t normal = ((u + (1U << (kShift - 1)) - 1 + (u >> kShift & 1)) >> kShift) - ((127U + kLow - 1) << kBits);
  // Adding this leaves a subnormal number's multiple in the last bits, rounded to even.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 23 + kLow - kBits) << 23;
  const uint32_t subnormal = bits_of(kept + float_of(kMagic)) - kMagic;
  return sign | static_cast<uint8_t>(u >= (127U + kLow) << 23 ? normal : subnormal);
}

inline uint8_t e4m3_of(float value) { return float8_of<3, -6>(value, 448.0F, 0x7F); }
inline uint8_t e5m2_of(float value) { return float8_of<2, -14>(value, 57344.0F, 0x7F); }

inline void load_halves(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < count; ++i) to[i] = _cvtsh_ss(from[i]);
#elif defined(__aarch64__)
  for (; i < count; ++i) {
    __fp16 half;
    std::memcpy(&half, from + i, 2);
    to[i] = static_cast<float>(half);
  }
#else
  for (; i < count; ++i) to[i] = float_of_half(from[i]);
#endif
}

inline void store_halves(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
  for (; i < count; ++i) to[i] = _cvtss_sh(from[i], 0);
#elif defined(__aarch64__)
  for (; i < count; ++i) {
    const auto half = static_cast<__fp16>(from[i]);
    std::memcpy(to + i, &half, 2);
  }
#else
  for (; i < count; ++i) to[i] = half_of_float(from[i]);
#endif
}

// Elements [first, first + count) of an array of this type.
inline void load_floats(const void* array, DType type, int64_t first, int64_t count, float* to) {
  switch (type) {
    case DType::kFloat32:
      std::memcpy(to, static_cast<const float*>(array) + first, static_cast<size_t>(count) * 4);
      return;
    case DType::kFloat16:
      load_halves(static_cast<const uint16_t*>(array) + first, count, to);
      return;
    case DType::kBFloat16: {
      const uint16_t* from = static_cast<const uint16_t*>(array) + first;
      for (int64_t i = 0; i < count; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
      return;
    }
    case DType::kE4M3: {
      const uint8_t* from = static_cast<const uint8_t*>(array) + first;
      for (int64_t i = 0; i < count; ++i) to[i] = float_of_e4m3(from[i]);
      return;
    }
    case DType::kE5M2: {
      const uint8_t* from = static_cast<const uint8_t*>(array) + first;
      for (int64_t i = 0; i < count; ++i) to[i] = float_of_e5m2(from[i]);
      return;
    }
    case DType::kInt32: {
      const int32_t* from = static_cast<const int32_t*>(array) + first;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
      return;
    }
    default: {
      const int8_t* from = static_cast<const int8_t*>(array) + first;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
    }
  }
}

inline uint16_t bfloat_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// fp16, bf16 or fp32, rounded to nearest even.
inline void store_floats(const float* from, int64_t count, void* array, DType type, int64_t first) {
  if (type == DType::kFloat32) {
    std::memcpy(static_cast<float*>(array) + first, from, static_cast<size_t>(count) * 4);
  } else if (type == DType::kFloat16) {
    store_halves(from, count, static_cast<uint16_t*>(array) + first);
  } else {
    uint16_t* to = static_cast<uint16_t*>(array) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = bfloat_of(from[i]);
  }
}

// What a value becomes when it is stored as `type` and read again.
inline void round_floats(float* values, int64_t count, DType type) {
  if (type == DType::kFloat16) {
    constexpr int64_t kAtOnce = 256;
    uint16_t halves[kAtOnce];
    for (int64_t i = 0; i < count; i += kAtOnce) {
      const int64_t some = count - i < kAtOnce ? count - i : kAtOnce;
      store_halves(values + i, some, halves);
      load_halves(halves, some, values + i);
    }
  } else if (type == DType::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) values[i] = float_of(static_cast<uint32_t>(bfloat_of(values[i])) << 16);
  }
}

// clamp(rne(t * r), low, 127); NaN becomes 0.
inline void store_int8(const float* t, int64_t count, float r, float low, int8_t* to) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to whole numbers, ties to even
  for (int64_t i = 0; i < count; ++i) {
    float v = t[i] * r;
    v = v == v ? v : 0.0F;
    v = v < low ? low : v;
    v = v > 127.0F ? 127.0F : v;
    to[i] = static_cast<int8_t>(static_cast<int32_t>((v + kRound) - kRound));
  }
}

// t * r in 8 bits: int8 from `low` up, or float8.
inline void store_scaled(const float* t, int64_t count, float r, float low, int8_t* to, DType type) {
  if (type == DType::kInt8) return store_int8(t, count, r, low, to);
  if (type == DType::kE4M3) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(e4m3_of(t[i] * r));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(e5m2_of(t[i] * r));
  }
}

inline float scale_at(const ScaleView& scale, int64_t i) {
  return scale.data == nullptr ? scale.value : scale.data[i * scale.step];
}

}  // namespace
}  // namespace octofuse::cpu
