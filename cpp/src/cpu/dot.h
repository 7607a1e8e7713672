// int8 products of one instruction set: `Dot` has the types of prepared activations and weights, how many columns one
// step takes, and the steps. All sums are exact modulo 2^32, and what comes out fits int32.
//
// AVX2 multiplies int16 by int16 (vpmaddwd): the instruction for bytes (vpmaddubsw) saturates. VNNI's vpdpbusd wants
// one operand without a sign: that is the weight, as w + 128, and 128 times the sum of x is taken off at the end.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

// Sums stay in registers only where every loop over them is unrolled.
#if defined(__clang__)
#define OCTOFUSE_UNROLL _Pragma("unroll")
#else
#define OCTOFUSE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace octofuse::cpu {
namespace {

// Keeps a value that is used several times in its register: the compiler would read it from memory at every use, and
// loads, not products, would set the pace.
template <class Vector>
inline void keep(Vector& vector) {
#if defined(__AVX2__)
  asm("" : "+v"(vector));
#else
  (void)vector;
#endif
}

#if defined(__AVX2__)
// The sums of four vectors' elements.
inline __m128i sums_of(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}
#endif

#if defined(__AVX512VNNI__)
struct Dot {
  using X = int8_t;
  using W = uint8_t;
  using Sum = __m512i;
  static constexpr int kStep = 64, kTokens = 4;
  static constexpr bool kShifted = true;
  static Sum zero() { return _mm512_setzero_si512(); }
  static __m512i load(const void* at) { return _mm512_loadu_si512(at); }
  static __m512i widen(const int8_t* w) { return _mm512_xor_si512(load(w), _mm512_set1_epi8(-128)); }
  static Sum multiply(Sum sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
  static __m256i half(Sum a) { return _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1)); }
  static void store_sums(Sum a, Sum b, Sum c, Sum d, int32_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums_of(half(a), half(b), half(c), half(d)));
  }
};
#elif defined(__AVXVNNI__)
struct Dot {
  using X = int8_t;
  using W = uint8_t;
  using Sum = __m256i;
  static constexpr int kStep = 32, kTokens = 2;
  static constexpr bool kShifted = true;
  static Sum zero() { return _mm256_setzero_si256(); }
  static __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
  static __m256i widen(const int8_t* w) { return _mm256_xor_si256(load(w), _mm256_set1_epi8(-128)); }
  static Sum multiply(Sum sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
  static void store_sums(Sum a, Sum b, Sum c, Sum d, int32_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums_of(a, b, c, d));
  }
};
#elif defined(__AVX2__)
struct Dot {
  using X = int16_t;
  using W = int16_t;
  using Sum = __m256i;
  static constexpr int kStep = 16, kTokens = 2;  // eight sums: twelve would not stay in 16 registers
  static constexpr bool kShifted = false;
  static Sum zero() { return _mm256_setzero_si256(); }
  static __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
  static __m256i widen(const int8_t* w) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  }
  static Sum multiply(Sum sum, __m256i w, __m256i x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
  static void store_sums(Sum a, Sum b, Sum c, Sum d, int32_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums_of(a, b, c, d));
  }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct Dot {
  using X = int8_t;
  using W = int8_t;
  using Sum = int32x4_t;
  static constexpr int kStep = 16, kTokens = 4;
  static constexpr bool kShifted = false;
  static Sum zero() { return vdupq_n_s32(0); }
  static int8x16_t load(const void* at) { return vld1q_s8(static_cast<const int8_t*>(at)); }
  static int8x16_t widen(const int8_t* w) { return vld1q_s8(w); }
  static Sum multiply(Sum sum, int8x16_t w, int8x16_t x) { return vdotq_s32(sum, w, x); }
  static void store_sums(Sum a, Sum b, Sum c, Sum d, int32_t* to) {
    vst1q_s32(to, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
  }
};
#else
// For compilers to vectorise as they can.
struct Dot {
  struct Vector {
    int16_t v[16];
  };
  struct Sum {
    int32_t v[8];
  };
  using X = int16_t;
  using W = int16_t;
  static constexpr int kStep = 16, kTokens = 2;
  static constexpr bool kShifted = false;
  static Sum zero() { return {}; }
  static Vector load(const void* at) {
    Vector vector;
    std::memcpy(&vector, at, sizeof(vector));
    return vector;
  }
  static Vector widen(const int8_t* w) {
    Vector vector;
    for (int i = 0; i < 16; ++i) vector.v[i] = w[i];
    return vector;
  }
  static Sum multiply(Sum sum, const Vector& w, const Vector& x) {
    for (int i = 0; i < 8; ++i) sum.v[i] += w.v[2 * i] * x.v[2 * i] + w.v[2 * i + 1] * x.v[2 * i + 1];
    return sum;
  }
  static void store_sums(const Sum& a, const Sum& b, const Sum& c, const Sum& d, int32_t* to) {
    const Sum s[4] = {a, b, c, d};
    for (int j = 0; j < 4; ++j) {
      uint32_t total = 0;
      for (int i = 0; i < 8; ++i) total += static_cast<uint32_t>(s[j].v[i]);
      to[j] = static_cast<int32_t>(total);
    }
  }
};
#endif

}  // namespace
}  // namespace octofuse::cpu
