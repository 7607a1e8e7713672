// From codes in registers to the first operand of fp16 and bf16 tensor-core products: each weight is scale * (code -
// zero), rounded once, as if it had been dequantised to memory. Planes add up from the last one to the first, with a
// rounding after each.
#pragma once

#include "lowbit/codes.cuh"

namespace octofuse::lowbit {

// ---- two numbers of 16 bits in a register; a separate rounding each, so the compiler fuses none of them ----

#define OCTOFUSE_PAIRWISE(NAME, OP)                                \
  template <DType kType>                                           \
  __device__ inline uint32_t NAME(uint32_t a, uint32_t b) {        \
    uint32_t d;                                                    \
    if constexpr (kType == DType::kFloat16) {                      \
      asm(OP ".rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));  \
    } else {                                                       \
      asm(OP ".rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); \
    }                                                              \
    return d;                                                      \
  }
OCTOFUSE_PAIRWISE(add_pairs, "add")
OCTOFUSE_PAIRWISE(subtract_pairs, "sub")
OCTOFUSE_PAIRWISE(multiply_pairs, "mul")
#undef OCTOFUSE_PAIRWISE

template <DType kType>
__device__ inline uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (kType == DType::kFloat16) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// In a form that costs nothing where the instruction behind it can read a half twice.
__device__ inline uint32_t twice(uint16_t bits) {
  uint32_t both;
  asm("mov.b32 %0, {%1, %1};" : "=r"(both) : "h"(bits));
  return both;
}

template <DType kType>
__device__ inline uint32_t pair_of(float value) {
  return twice(half_bits(value, kType));
}

// What a dequantiser takes: words of nibbles (of_nibbles()), words with fields of bits (of_fields()), or words with a
// code in each byte (weights()).
enum class CodesAs { kNibbles, kFields, kBytes };

// ---- uniform codes and sparse12 ----

// Turns the codes of a lane's two channels, lane / 4 (0) and lane / 4 + 8 (1), into weights. A code joined to the bits
// of the number 1024 (bf16: 128) is that number plus the code, so that one subtraction gives code - zero, exactly. bf16
// has no room for 8 bits beside its 128: there codes go through fp16, which is exact as well, and fp32.
template <class Code, DType kType, bool kPlain>
class GridDequantizer {
  static constexpr bool kThroughFp32 = kType == DType::kBFloat16 && (Code::kWidth == 8 || Code::kSparse);
  static constexpr DType kIntegers = kThroughFp32 ? DType::kFloat16 : kType;
  static constexpr bool kIsHalf = kIntegers == DType::kFloat16;
  // The zero of all may be x.5: then the next integer is subtracted, and addend_ gives half a scale back.
  static constexpr bool kMayHaveHalf = !Code::kSparse && Code::kWidth < 8 && !kPlain;
  // bf16 has no room for a zero point of 8 bits beside its 128. That of all is below 128.
  static constexpr bool kZeroApart = !kIsHalf && !kPlain;
  // Of kFields: so many of a byte are joined where they lie; the others are moved there first.
  static constexpr int kInPlace = kType == DType::kFloat16 || Code::kWidth == 1 ? 4 : 2;
  uint32_t base_, addend_factor_ = 0;
  uint32_t offset_[2], zero_[2], scale_[2], addend_[2];
  uint32_t offsets_[kPlain ? 1 : 2][kInPlace];  // of kFields

 public:
  // The bits of 1024 (fp16) or of 128 (bf16), twice.
  static constexpr uint32_t kBase = kIsHalf ? 0x64006400U : 0x43004300U;
  // Codes of 4 bits are joined where they lie: those of channel 1 are 16 times too large, and an fma undoes that. Codes
  // of 1 and 2 bits too: those p bits up are 2^p times too large.
  static constexpr bool kNibbles = kType == DType::kFloat16 && Code::kWidth == 4 && !Code::kSparse;
  static constexpr bool kFields = Code::kWidth <= 2 && !Code::kSparse;
  static constexpr CodesAs kTakes = kNibbles ? CodesAs::kNibbles : kFields ? CodesAs::kFields : CodesAs::kBytes;

  // base: kBase, which the compiler must not know. Then it stays in a register, and instructions that have room for one
  // literal are not split in two. twice_zero: that of all. Sparse codes are twice their value, plus 128: weights()
  // flips their sign.
  __device__ GridDequantizer(uint32_t base, int twice_zero, const char* /*table*/) : base_(base) {
    if (kMayHaveHalf && twice_zero % 2 != 0) addend_factor_ = pair_of<kType>(0.5F);
    const int zero = Code::kSparse ? 128 : (twice_zero + 1) / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      offset_[i] = first_offset(i) + twice(static_cast<uint16_t>(zero * factor(i)));
      zero_[i] = 0;
      if constexpr (kFields) set_offsets(i, static_cast<uint32_t>(zero));
    }
  }

  __device__ void set_zero(int channel, uint8_t zero) {
    if constexpr (kFields) return set_offsets(channel, zero);
    if constexpr (kIsHalf) {
      offset_[channel] = (factor(channel) == 1 ? base_ : first_offset(channel)) + twice(zero * factor(channel));
    } else {  // 128 + zero may need 9 bits
      offset_[channel] = kBase;
      zero_[channel] = pair_of<kType>(zero);
    }
  }

  __device__ void set_scale(int channel, uint16_t scale) {
    if constexpr (kThroughFp32) {
      scale_[channel] = __float_as_uint(half_of(scale, kType) * (Code::kSparse ? 0.5F : 1.0F));
    } else {
      scale_[channel] = twice(scale);
      if constexpr (Code::kSparse) scale_[channel] = multiply_pairs<kType>(scale_[channel], pair_of<kType>(0.5F));
      addend_[channel] = kMayHaveHalf ? multiply_pairs<kType>(scale_[channel], addend_factor_) : 0;
    }
  }

  // Channel 0 has the low nibbles of a word, channel 1 the high ones; those of bytes 0 and 2 become a[channel], those
  // of bytes 1 and 3 a[channel + 2].
  __device__ void of_nibbles(uint32_t word, uint32_t* a) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t shifted = i == 0 ? word : word >> 8;
      a[2 * i] = scaled(0, subtract_pairs<kType>((shifted & 0x000F000FU) | base_, offset_[0]));
      // The high nibble joined to 1024 reads 1024 + 16 * code: times 1/16 (0x2C00), less 64 (0xD400), that is the code.
      a[2 * i + 1] = scaled(1, fma_pairs<kType>((shifted & 0x00F000F0U) | base_, 0x2C002C00U, offset_[1]));
    }
  }

  // The codes that lie `shift` bits up in a word's bytes: those of bytes 0 and 2 become a[0], the others a[2].
  __device__ void of_fields(int channel, uint32_t word, int shift, uint32_t* a) const {
    constexpr int kBits = Code::kWidth * kInPlace;  // that are joined where they lie
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int up = shift % kBits;
      const uint32_t mask = twice_of(((1U << Code::kWidth) - 1U) << up);
      const uint32_t joined = (word >> (shift - up + 8 * i) & mask) | base_;
      const uint32_t offset = offsets_[kPlain ? 0 : channel][up / Code::kWidth];
      uint32_t level = fma_pairs<kType>(joined, power_of_two(-up), offset);
      if constexpr (kZeroApart) level = subtract_pairs<kType>(level, zero_[channel]);
      a[2 * i] = scaled(channel, level);
    }
  }

  // The weights of bytes 0 and 2, and those of bytes 1 and 3.
  __device__ void weights(int channel, uint32_t codes, uint32_t& even, uint32_t& odd) const {
    if constexpr (Code::kSparse) codes ^= 0x80808080U;
    // Bytes 0 and 2 of the codes, or 1 and 3, each below the high byte of a half of base_.
    even = weight(channel, __byte_perm(codes, base_, 0x7270));
    odd = weight(channel, __byte_perm(codes, base_, 0x7371));
  }

 private:
  static constexpr uint32_t twice_of(uint32_t bits) { return bits * 0x10001U; }
  // Both halves.
  static constexpr uint32_t power_of_two(int log) {
    return twice_of(kType == DType::kFloat16 ? static_cast<uint32_t>(15 + log) << 10
                                             : static_cast<uint32_t>(127 + log) << 7);
  }
  // What an fma adds to a joined code.
  __device__ void set_offsets(int channel, uint32_t zero) {
    zero_[channel] = kIsHalf ? subtract_pairs<kType>(base_ + twice_of(zero), base_)  // no conversion, which is slow
                             : pair_of<kType>(static_cast<float>(zero));
#pragma unroll
    for (int i = 0; i < kInPlace; ++i) {
      const uint32_t of_base = power_of_two((kIsHalf ? 10 : 7) - i * Code::kWidth) | 0x80008000U;
      offsets_[kPlain ? 0 : channel][i] = kZeroApart ? of_base : subtract_pairs<kType>(of_base, zero_[channel]);
    }
  }

  // By how much a joined code is too large, and the offset that stands for the code 0: what `sub` takes away (kBase),
  // or what an fma adds (-64; one more in the code is 16 more in these bits).
  static constexpr int factor(int channel) { return kNibbles && channel == 1 ? 16 : 1; }
  static constexpr uint32_t first_offset(int channel) { return factor(channel) == 1 ? kBase : 0xD400D400U; }

  __device__ uint32_t scaled(int channel, uint32_t level) const {
    return kMayHaveHalf ? fma_pairs<kType>(level, scale_[channel], addend_[channel])
                        : multiply_pairs<kType>(level, scale_[channel]);
  }

  __device__ uint32_t weight(int channel, uint32_t joined) const {
    uint32_t level = subtract_pairs<kIntegers>(joined, offset_[channel]);
    if constexpr (kZeroApart) level = subtract_pairs<kIntegers>(level, zero_[channel]);
    if constexpr (kThroughFp32) {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&level));
      const float scale = __uint_as_float(scale_[channel]);
      const __nv_bfloat162 rounded = __floats2bfloat162_rn(__fmul_rn(both.x, scale), __fmul_rn(both.y, scale));
      return *reinterpret_cast<const uint32_t*>(&rounded);
    } else {
      return scaled(channel, level);
    }
  }
};

// ---- codebooks ----

// A level times its scale, rounded. From a table of kLevelTableBytes: for every byte, two codes, both levels in x's
// type, once for each lane, so that no two lanes ever meet in a bank. Of prmt's bytes a weight would take three times
// the instructions of logic that a grid's takes.
template <DType kType>
class CodebookDequantizer {
  const char* table_;  // this lane's first entry
  uint32_t scale_[2];

 public:
  static constexpr uint32_t kBase = 0;
  static constexpr CodesAs kTakes = CodesAs::kNibbles;

  __device__ CodebookDequantizer(uint32_t /*base*/, int /*twice_zero*/, const char* table)
      : table_(table + threadIdx.x % 32 * 4) {}

  // By the first kThreads threads of the block.
  template <unsigned kThreads>
  __device__ static void fill(uint32_t* table, const uint16_t (&levels)[16]) {
    if (threadIdx.x >= kThreads) return;
    for (unsigned entry = threadIdx.x / 32; entry < 256; entry += kThreads / 32) {
      table[entry * 32 + threadIdx.x % 32] = levels[entry % 16] | static_cast<uint32_t>(levels[entry / 16]) << 16;
    }
  }

  __device__ void set_scale(int channel, uint16_t scale) { scale_[channel] = twice(scale); }
  __device__ void set_zero(int /*channel*/, uint8_t /*zero*/) {}

  // As the grid's, but channel 0 has the low half of a word, bytes 0 and 2 of its codes first.
  __device__ void of_nibbles(uint32_t word, uint32_t* a) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = word >> 8 * i & 0xFFU;
      const uint32_t levels = *reinterpret_cast<const uint32_t*>(table_ + pair * 128);
      a[i % 2 * 2 + i / 2] = multiply_pairs<kType>(levels, scale_[i / 2]);
    }
  }
};

// ---- float8 ----

// A number in e4m3 times its scale, rounded: what float8_pair() left out of the number is in the scale's exponent.
template <DType kType>
class Float8Dequantizer {
  uint32_t scale_[2];

 public:
  static constexpr uint32_t kBase = 0;
  static constexpr CodesAs kTakes = CodesAs::kBytes;

  __device__ Float8Dequantizer(uint32_t /*base*/, int /*twice_zero*/, const char* /*table*/) {}

  __device__ void set_scale(int channel, uint16_t scale) {
    constexpr float kUnit = kType == DType::kFloat16 ? 0x1p8F : 0x1p120F;
    scale_[channel] = multiply_pairs<kType>(twice(scale), pair_of<kType>(kUnit));
  }
  __device__ void set_zero(int /*channel*/, uint8_t /*zero*/) {}

  __device__ void weights(int channel, uint32_t codes, uint32_t& even, uint32_t& odd) const {
    even = multiply_pairs<kType>(float8_pair<kType>(codes, 0), scale_[channel]);
    odd = multiply_pairs<kType>(float8_pair<kType>(codes, 1), scale_[channel]);
  }
};

template <class Code, DType kType, bool kPlain = false>
using Dequantizer = std::conditional_t<
    Code::kCodebook, CodebookDequantizer<kType>,
    std::conditional_t<Code::kFloat8, Float8Dequantizer<kType>, GridDequantizer<Code, kType, kPlain>>>;

// ---- planes ----

// Adds (kFirst: sets) a plane's +alpha or -alpha of a step for channels lane / 4 and lane / 4 + 8; `words`: this
// lane's.
template <DType kType, bool kFirst>
__device__ inline void add_plane(const uint2& words, int step, const uint32_t (&minus_alpha)[2], uint32_t* a) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // register i of the step: a bit of every byte
    const uint32_t word = i % 2 == 0 ? words.x : words.y;
    const int bit = step * 2 + i / 2;
    const uint32_t alpha = minus_alpha[i % 2];
    const uint32_t even = (word << (15 - bit) & 0x80008000U) ^ alpha;
    const uint32_t odd = (bit < 7 ? word << (7 - bit) & 0x80008000U : word & 0x80008000U) ^ alpha;
    uint32_t* const to = a + i / 2 * 4 + i % 2;
    to[0] = kFirst ? even : add_pairs<kType>(to[0], even);
    to[2] = kFirst ? odd : add_pairs<kType>(to[2], odd);
  }
}

}  // namespace octofuse::lowbit
