// From codes in registers to the first operand of int8 tensor-core products: integers of 8 bits, exactly what the codes
// stand for (octofuse/lowbit.h, has_integers()).
#pragma once

#include "lowbit/codes.cuh"

namespace octofuse::lowbit {

// A two-level weight's group, as it lies in memory: the scale first.
__device__ inline int scale_of_pair(uint16_t pair) { return pair & 0xFF; }
__device__ inline int zero_of_pair(uint16_t pair) { return pair >> 8; }

// By how much the integers of uniform codes are too large, as a power of two: a code stands in the high bits of its
// byte. The sum of all of K still fits (2^14 * 131,071 < 2^31).
constexpr int log_unit_of(LowbitFormat format, int bits) { return format == LowbitFormat::kUniform ? 8 - bits : 0; }

// Turns codes into integers, four at a time. Those of uniform codes: with the high bit of a byte inverted, a code in
// its high bits is code - 2^(bits - 1), times 2^(8 - bits). Those of two levels are made by one multiplication and
// addition of 32 bits: as long as every byte of the result, which is 128 too large, lies within 0 to 255, no carry or
// borrow is left between them.
template <class Code>
class IntegerMaker {
  static constexpr bool kTwoLevel = Code::kFormat == LowbitFormat::kTwoLevel;
  // In a register: an instruction of logic has room for one literal, which is a mask.
  const uint32_t high_bits_ = own_copy(0x80808080U);
  uint32_t factor_[2], addend_[2];  // of channels lane / 4 and lane / 4 + 8

 public:
  __device__ void set_group(int channel, uint16_t pair) {
    factor_[channel] = static_cast<uint32_t>(scale_of_pair(pair));
    addend_[channel] = static_cast<uint32_t>(128 - scale_of_pair(pair) * zero_of_pair(pair)) * 0x01010101U;
  }

  // Register r of a lane's words.
  __device__ uint32_t integers(const uint32_t (&words)[Code::kWords], int r) const {
    if constexpr (Code::kWidth == 4 && !kTwoLevel) {  // two codes in a byte: one stands where it has to
      const uint32_t word = words[r / 2];
      return ((r % 2 == 0 ? word << 4 : word) & 0xF0F0F0F0U) ^ high_bits_;
    } else {
      const uint32_t codes = codes_of<Code::kWidth>(words, r);
      if constexpr (!kTwoLevel) return codes << (8 - Code::kWidth) ^ high_bits_;
      return (codes * factor_[r % 2] + addend_[r % 2]) ^ high_bits_;
    }
  }
};

}  // namespace octofuse::lowbit
