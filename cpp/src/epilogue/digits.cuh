// LLM.int8() with outliers as digits (EPILOGUES.md): a token's sums of its int8 values and of its three digits, the
// highest first, to one in fp32.
#pragma once

#include "octofuse/gemm.h"

namespace octofuse {

__device__ inline float join_digits(const int32_t (&sums)[kDigitRows], float2 factors) {
  int64_t number = 0;
#pragma unroll
  for (int digit = 1; digit < kDigitRows; ++digit) number = number * 256 + sums[digit];
  return __fadd_rn(__fmul_rn(__int2float_rn(sums[0]), factors.x), __fmul_rn(__ll2float_rn(number), factors.y));
}

}  // namespace octofuse
