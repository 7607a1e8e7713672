// How up to 4 tokens become integers in shared memory, as both kernels for them want them: bytes for products of int8
// (lowbit_gemv.cu), or bits for binary ones (lowbit_gemv_bits.cu).
#pragma once

#include "kernels/lowbit_tile.cuh"

namespace octofuse::lowbit {

// What a chunk of a token is to a segment's products: the power of two that its integers stand for, NaN if a value is
// NaN or infinite; and the sum of those in the segment.
struct TokenChunk {
  float power;
  int sum;
};

// Which columns of a chunk a lane converts: 2 t, 2 t + 8, 2 t + 1 and 2 t + 9 of 16, as a register of codes has them.
struct Columns {
  int t, step, half;

  __device__ explicit Columns(int lane) : t(lane % 4), step(lane / 4 % 4), half(lane / 16) {}

  __device__ void load(const char* chunk, DType type, float (&v)[4]) const {
    const auto* const pairs = reinterpret_cast<const uint32_t*>(chunk) + step * 16 + half * 8 + t;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t pair = pairs[j * 4];
      v[j] = half_of(static_cast<uint16_t>(pair), type);
      v[2 + j] = half_of(static_cast<uint16_t>(pair >> 16), type);
    }
  }

  // int8, byte i of four.
  __device__ uint32_t load_int8(const char* chunk) const {
    const auto* const pairs = reinterpret_cast<const uint16_t*>(chunk) + step * 16 + half * 8 + t;
    return __byte_perm(pairs[0], pairs[4], 0x5140);
  }
};

// They as integers, 256 * high + low.
struct Integers {
  uint32_t high, low;  // a byte each
  float stands_for;    // of 1
  int sum;

  // By a warp, of kItems chunks, whose steps take turns.
  template <int kItems>
  __device__ static void make(const float (&v)[kItems][4], Integers (&of)[kItems]) {
    uint32_t largest[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      float most = 0.0F;
#pragma unroll
      for (const float value : v[i]) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(value)));
      largest[i] = __float_as_uint(most);  // as integers they keep their order, and NaN is above all
    }
#pragma unroll
    for (uint32_t& value : largest) value = __reduce_max_sync(0xFFFFFFFFU, value);
#pragma unroll
    for (int i = 0; i < kItems; ++i) of[i] = Integers(v[i], largest[i]);
  }

  Integers() = default;

  // Of columns that are int8.
  __device__ explicit Integers(uint32_t bytes)
      : high(0), low(bytes), stands_for(1.0F), sum(__dp4a(static_cast<int>(bytes), 0x01010101, 0)) {}

 private:
  __device__ Integers(const float (&v)[4], uint32_t largest) {
    // The largest is below 2^(exponent - 126), so 2^(141 - exponent) makes it less than 2^15: once in 128 times too
    // large.
    const bool finite = largest < 0x7F800000U;
    const uint32_t exponent = finite ? max(largest >> 23, 16U) : 16U;
    uint32_t power = (268U - exponent) << 23;
    uint32_t inverse = (exponent - 14U) << 23;
    if (__uint_as_float(largest) * __uint_as_float(power) > static_cast<float>(kMostToken)) {
      power -= 1U << 23;
      inverse += 1U << 23;
    }
    stands_for = finite ? __uint_as_float(inverse) : __int_as_float(0x7FC00000);
    // Added to a product it leaves the integer, rounded, in the low bits: 128 more, so that its second byte is the high
    // one.
    constexpr float kMagic = 12582912.0F + 128.0F;
    uint32_t raw[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) raw[j] = __float_as_uint(__fmaf_rn(v[j], __uint_as_float(power), kMagic));
    const uint32_t first = __byte_perm(raw[0], raw[1], 0x5140);  // low, low, high, high
    const uint32_t second = __byte_perm(raw[2], raw[3], 0x5140);
    low = __byte_perm(first, second, 0x5410) ^ 0x80808080U;
    high = __byte_perm(first, second, 0x7632);
    if (!finite) low = high = 0;
    sum = 256 * __dp4a(static_cast<int>(high), 0x01010101, 0) + __dp4a(static_cast<int>(low), 0x01010101, 0);
  }
};

// ---- bytes ----

// A token's chunk as a quad's lanes read it, 16 bytes for two steps: the high bytes of steps 0 and 1, their low bytes,
// those of steps 2 and 3.
struct AsBytes {
  static constexpr int kLow = 64;
  static constexpr int kHalf = 128;  // of the steps

  // places: nowhere where there is no chunk.
  template <int kItems>
  __device__ static void store(const Integers (&of)[kItems], char* const (&places)[kItems], const Columns& at) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (places[i] == nullptr) break;
      char* const place = places[i] + at.step / 2 * kHalf + (at.t * 2 + at.step % 2) * 8 + at.half * 4;
      *reinterpret_cast<uint32_t*>(place) = of[i].high;
      *reinterpret_cast<uint32_t*>(place + kLow) = of[i].low;
    }
  }
};

// ---- bits ----

// Bit i of a token's 128 integers is a column of a binary product: lane 4 * g + t has those of bit g, then of bit
// 8 + g, of the 32 columns that lane t of a quad has in codes of one bit, in their order.
class AsBits {
  // Lanes `apart` trade fields of kWidth bits: the first keeps its even ones and gets the other's as its odd ones.
  template <int kWidth, int kWords>
  __device__ static void trade(uint32_t (&words)[kWords], int apart, bool second) {
    constexpr uint32_t kOdd = kWidth == 4 ? 0xF0F0F0F0U : kWidth == 2 ? 0xCCCCCCCCU : 0xAAAAAAAAU;
    const uint32_t mine = second ? kOdd : ~kOdd;
    const int by = second ? 32 - kWidth : kWidth;
    uint32_t others[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) others[i] = __shfl_xor_sync(0xFFFFFFFFU, words[i], apart);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = (words[i] & mine) | (__funnelshift_l(others[i], others[i], by) & ~mine);
    }
  }

 public:
  // Of a byte's 8 bits lane (step, half) ends up with bit 2 * step + half, of the step and half of 16 columns that the
  // place in the byte says.
  template <int kItems>
  __device__ static void store(const Integers (&of)[kItems], char* const (&places)[kItems], const Columns& at) {
    uint32_t words[2 * kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      words[2 * i] = of[i].low;
      words[2 * i + 1] = of[i].high;
    }
    trade<4>(words, 8, at.step >= 2);
    trade<2>(words, 4, at.step % 2 == 1);
    trade<1>(words, 16, at.half == 1);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (places[i] == nullptr) break;
      auto* const lanes = reinterpret_cast<uint2*>(places[i]);
      lanes[(at.step * 2 + at.half) * 4 + at.t] = make_uint2(words[2 * i], words[2 * i + 1]);
    }
  }
};

}  // namespace octofuse::lowbit
