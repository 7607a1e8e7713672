// How a warp converts a token's 128 values of a k-block to integers of 16 bits, or to fp16, and how these lie in shared
// memory as the gemv kernels want them: as bytes for products of int8 or as fp16 (gemv_int8.cu), or as bits for binary
// ones (gemv_binary.cu).
#pragma once

#include "device/ptx.cuh"
#include "lowbit/codes.cuh"

namespace octofuse::lowbit {

// What the products of a segment need to know of a token's integers beside these.
struct ScaleAndSum {
  float scale;  // the power of two that they are to be multiplied by; NaN if a value of the k-block is NaN or infinite
  int sum;      // of those in the segment
};

// Which columns of a k-block a lane converts: 2 t, 2 t + 8, 2 t + 1 and 2 t + 9 of 16, as a register of codes has them.
struct Columns {
  int t, step, half;

  __device__ explicit Columns(int lane) : t(lane % 4), step(lane / 4 % 4), half(lane / 16) {}
};

// The bits of the largest magnitude among a warp's values of each k-block; as integers they keep their order, and NaN
// is above all.
template <int kItems>
__device__ inline void largest_of(const float (&v)[kItems][4], uint32_t (&largest)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    float most = 0.0F;
#pragma unroll
    for (const float value : v[i]) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(value)));
    largest[i] = __float_as_uint(most);
  }
#pragma unroll
  for (uint32_t& value : largest) value = __reduce_max_sync(kFullWarp, value);
}

// The power of two that makes the largest of some values less than 2^15: it is below 2^(exponent - 126), and this is
// 2^(141 - exponent).
struct PowerOfTwo {
  bool finite;
  uint32_t bits, inverse_bits;

  __device__ explicit PowerOfTwo(uint32_t largest) : finite(largest < 0x7F800000U) {
    const uint32_t exponent = finite ? max(largest >> 23, 16U) : 16U;
    bits = (268U - exponent) << 23;
    inverse_bits = (exponent - 14U) << 23;
  }
  __device__ void halve() {
    bits -= 1U << 23;
    inverse_bits += 1U << 23;
  }
  // By which results are to be multiplied; NaN if one of the values is NaN or infinite.
  __device__ float inverse() const { return finite ? __uint_as_float(inverse_bits) : __int_as_float(0x7FC00000); }
};

// A lane's four values of a k-block as integers, 256 * high + low.
struct Integers {
  uint32_t high, low;  // a byte each
  float scale;         // the value that the integer 1 stands for
  int sum;

  // A warp converts kItems k-blocks at once: the steps of one hide the latencies of the others.
  template <int kItems>
  __device__ static void make(const float (&v)[kItems][4], Integers (&of)[kItems]) {
    uint32_t largest[kItems];
    largest_of(v, largest);
#pragma unroll
    for (int i = 0; i < kItems; ++i) of[i] = Integers(v[i], largest[i]);
  }

  Integers() = default;

  // In one case of 128 the largest becomes more than kMostToken, and the next smaller power is taken.
  __device__ static PowerOfTwo power_of(uint32_t largest) {
    PowerOfTwo power(largest);
    if (__uint_as_float(largest) * __uint_as_float(power.bits) > static_cast<float>(kMostToken)) power.halve();
    return power;
  }

  // The integer of a value, rounded, plus kRawZero: a number added to the product leaves it in the low bits of the sum.
  // The 128 beside it make the second byte the high one although low bytes, once their highest bit is inverted, are
  // signed.
  static constexpr uint32_t kRawZero = 0x4B400080U;  // the bits of kMagic
  __device__ static uint32_t raw_of(float value, const PowerOfTwo& power) {
    constexpr float kMagic = 12582912.0F + 128.0F;
    return __float_as_uint(__fmaf_rn(value, __uint_as_float(power.bits), kMagic));
  }

  // Of values that are int8 already: their own low bytes.
  __device__ explicit Integers(uint32_t bytes)
      : high(0), low(bytes), scale(1.0F), sum(__dp4a(static_cast<int>(bytes), 0x01010101, 0)) {}

 private:
  __device__ Integers(const float (&v)[4], uint32_t largest) {
    const PowerOfTwo power = power_of(largest);
    scale = power.inverse();
    uint32_t raw[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) raw[j] = raw_of(v[j], power);
    const uint32_t first = __byte_perm(raw[0], raw[1], 0x5140);  // low, low, high, high
    const uint32_t second = __byte_perm(raw[2], raw[3], 0x5140);
    low = __byte_perm(first, second, 0x5410) ^ 0x80808080U;
    high = __byte_perm(first, second, 0x7632);
    if (!power.finite) low = high = 0;
    sum = 256 * __dp4a(static_cast<int>(high), 0x01010101, 0) + __dp4a(static_cast<int>(low), 0x01010101, 0);
  }
};

// ---- bytes ----

__device__ inline uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// A token's k-block in 256 bytes, as a quad's lanes read it, 16 bytes for two steps: the high bytes of steps 0 and 1,
// then their low bytes, then those of steps 2 and 3.
struct Int8Operand {
  using Values = Integers;
  using Sum = int32_t;
  static constexpr int kSums = 1;              // beside each other
  static constexpr bool kCodesInTurn = false;  // else a register has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
  static constexpr int kLow = 64;
  static constexpr int kHalf = 128;  // of the steps

  // This lane's bytes of a k-block, of a token of each set of four. is_low: those of low bytes.
  template <int kSets>
  struct Reader {
    static constexpr int kToNextSet = kTokensOfSet * 2 * kBlockK;
    const char* at;
    int to_next;  // bytes to the next k-block of this warp
    uint4 columns[kSets][2];

    __device__ Reader(const char* token, const char* /*zeros*/, bool is_low, int to_next)
        : at(token + (is_low ? kLow : 0)), to_next(to_next) {}
    __device__ void load() {
#pragma unroll
      for (int i = 0; i < 2 * kSets; ++i) {
        columns[i / 2][i % 2] = *reinterpret_cast<const uint4*>(at + i / 2 * kToNextSet + i % 2 * kHalf);
      }
    }
    // Of half a step.
    __device__ uint32_t of(int set, int step, int half) const {
      return word_of(columns[set][step / 2], step % 2 * 2 + half);
    }
    __device__ void advance() { at += to_next; }
  };

  __device__ static Integers of_int8(uint32_t bytes) { return Integers(bytes); }

  // to: null for a k-block that does not exist, and then for all behind it.
  template <int kItems>
  __device__ static void store(const Integers (&of)[kItems], char* const (&to)[kItems], const Columns& at) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (to[i] == nullptr) break;
      char* const bytes = to[i] + at.step / 2 * kHalf + (at.t * 2 + at.step % 2) * 8 + at.half * 4;
      *reinterpret_cast<uint32_t*>(bytes) = of[i].high;
      *reinterpret_cast<uint32_t*>(bytes + kLow) = of[i].low;
    }
  }
};

// The same for products with both bytes of a level (LevelTable), each beside its column's byte of the token: those of
// the token's high bytes are [high, 0], those of its low bytes [low, high], so that their sums stand for 2^16 and for
// 2^8. What low bytes of both make is left out: a column may lose 2^14, where the largest product is 2^30.
struct PairedOperand : Int8Operand {
  template <int kSets>
  struct Reader {
    static_assert(kSets == 1);
    const char *high, *low;  // this lane's of its token; low: zeros for a column of high bytes
    int step, low_step;      // bytes to the next k-block of this warp
    uint32_t first, second;  // selectors
    uint4 of_high[2], of_low[2];

    __device__ Reader(const char* token, const char* zeros, bool is_low, int step)
        : high(token),
          low(is_low ? token + kLow : zeros),
          step(step),
          low_step(is_low ? step : 0),
          first(is_low ? 0x6240 : 0x2604),
          second(is_low ? 0x7351 : 0x3715) {}

    __device__ void load() {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_high[i] = *reinterpret_cast<const uint4*>(high + i * kHalf);
        of_low[i] = *reinterpret_cast<const uint4*>(low + i * kHalf);
      }
    }
    // The second operand of a product of 16 columns: half of a step.
    __device__ void operand(int step, int half, uint32_t (&b)[2]) const {
      const uint32_t a = word_of(of_low[step / 2], step % 2 * 2 + half);
      const uint32_t c = word_of(of_high[step / 2], step % 2 * 2 + half);
      b[0] = __byte_perm(a, c, first);
      b[1] = __byte_perm(a, c, second);
    }
    __device__ void advance() {
      high += step;
      low += low_step;
    }
  };

  // An int8 token is all high bytes.
  __device__ static Integers of_int8(uint32_t bytes) {
    Integers made(bytes);
    made.high = bytes;
    made.low = 0;
    made.scale = 1.0F / 256.0F;
    return made;
  }
};

// The same beside levels (LevelBytes) whose high and low bytes have products of their own. What low bytes of both make
// is left out here as well. A register's bytes are in the order of a word's codes.
struct CodebookOperand : Int8Operand {
  static constexpr int kSums = 2;
  static constexpr bool kCodesInTurn = true;

  __device__ static Integers of_int8(uint32_t bytes) { return PairedOperand::of_int8(bytes); }

  template <int kItems>
  __device__ static void store(const Integers (&of)[kItems], char* const (&to)[kItems], const Columns& at) {
    Integers in_turn[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      in_turn[i].high = __byte_perm(of[i].high, 0, 0x3120);
      in_turn[i].low = __byte_perm(of[i].low, 0, 0x3120);
    }
    Int8Operand::store(in_turn, to, at);
  }
};

// ---- fp16 ----

// A lane's four values of a k-block in fp16, times a power of two that keeps the largest of the 128 below 2^15. So bf16
// values keep all their bits, but those below 2^-29 of the largest.
struct Halves {
  uint32_t first, second;  // of 16 columns 2 t and 2 t + 8, then those behind them: codes lie so
  float scale;
  static constexpr int sum = 0;  // as of Integers; no product needs it

  template <int kItems>
  __device__ static void make(const float (&v)[kItems][4], Halves (&of)[kItems]) {
    uint32_t largest[kItems];
    largest_of(v, largest);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const PowerOfTwo power(largest[i]);
      of[i] = Halves(v[i], __uint_as_float(power.bits));
      of[i].scale = power.inverse();
    }
  }

  Halves() = default;

  __device__ explicit Halves(uint32_t bytes) : scale(1.0F) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = static_cast<int8_t>(bytes >> 8 * i & 0xFFU);
    join(v, 1.0F);
  }

 private:
  __device__ Halves(const float (&v)[4], float power) { join(v, power); }

  __device__ void join(const float (&v)[4], float power) {
    const __half2 a = __floats2half2_rn(v[0] * power, v[1] * power);
    const __half2 b = __floats2half2_rn(v[2] * power, v[3] * power);
    first = *reinterpret_cast<const uint32_t*>(&a);
    second = *reinterpret_cast<const uint32_t*>(&b);
  }
};

// A token's k-block in 256 bytes: of each step, of each lane of a quad, its columns of both halves of the step. The odd
// ones of a product's columns read what the even ones do, and nobody their sums.
struct HalfOperand {
  using Values = Halves;
  using Sum = float;
  static constexpr int kSums = 2;  // of each half of a step one: products that wait for fewer others

  template <int kSets>
  struct Reader {
    static_assert(kSets == 1);
    const char* at;
    int to_next;  // bytes to the next k-block of this warp
    uint4 columns[kSteps];

    __device__ Reader(const char* token, const char* /*zeros*/, bool /*is_low*/, int to_next)
        : at(token), to_next(to_next) {}
    __device__ void load() {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) columns[i] = *reinterpret_cast<const uint4*>(at + i * 64);
    }
    // The second operand of a product of 16 columns: register i of half a step.
    __device__ uint32_t of(int step, int half, int i) const { return word_of(columns[step], half * 2 + i); }
    __device__ void advance() { at += to_next; }
  };

  __device__ static Halves of_int8(uint32_t bytes) { return Halves(bytes); }

  // to: as above.
  template <int kItems>
  __device__ static void store(const Halves (&of)[kItems], char* const (&to)[kItems], const Columns& at) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (to[i] == nullptr) break;
      *reinterpret_cast<uint2*>(to[i] + at.step * 64 + at.t * 16 + at.half * 8) = make_uint2(of[i].first, of[i].second);
    }
  }
};

// ---- bits ----

// Bit i of a token's 128 integers is a column of a binary product: lane 4 * g + t has bits g, then bits 8 + g, of the
// 32 columns that lane t of a quad has in codes of one bit, in their order.
class BinaryOperand {
  // Lanes that are `apart` exchange fields of kWidth bits: the first of the two keeps its even fields and gets the
  // other's as its odd ones.
  template <int kWidth, int kWords>
  __device__ static void exchange(uint32_t (&words)[kWords], int apart, bool second) {
    constexpr uint32_t kOdd = kWidth == 4 ? 0xF0F0F0F0U : kWidth == 2 ? 0xCCCCCCCCU : 0xAAAAAAAAU;
    const uint32_t mine = second ? kOdd : ~kOdd;
    const int by = second ? 32 - kWidth : kWidth;
    uint32_t others[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) others[i] = __shfl_xor_sync(kFullWarp, words[i], apart);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = (words[i] & mine) | (__funnelshift_l(others[i], others[i], by) & ~mine);
    }
  }

 public:
  using Values = Integers;

  __device__ static Integers of_int8(uint32_t bytes) { return Integers(bytes); }

  // Of the 8 bits of its bytes lane (step, half) ends up with bit 2 * step + half of all lanes' bytes: bit i of the
  // result comes from the lane whose step and half of 16 columns i stands for.
  template <int kItems>
  __device__ static void store(const Integers (&of)[kItems], char* const (&to)[kItems], const Columns& at) {
    uint32_t words[2 * kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      words[2 * i] = of[i].low;
      words[2 * i + 1] = of[i].high;
    }
    exchange<4>(words, 8, at.step >= 2);
    exchange<2>(words, 4, at.step % 2 == 1);
    exchange<1>(words, 16, at.half == 1);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (to[i] == nullptr) break;
      auto* const lanes = reinterpret_cast<uint2*>(to[i]);
      lanes[(at.step * 2 + at.half) * 4 + at.t] = make_uint2(words[2 * i], words[2 * i + 1]);
    }
  }
};

}  // namespace octofuse::lowbit
