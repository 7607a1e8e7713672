// LLM.int8() with outliers as digits: a token has kDigitRows rows of x. All sums are exact, so K may be shared.
#pragma once

#include "epilogue/digits.cuh"
#include "gemm/wgmma/launch.h"

namespace octofuse::wgmma {

// Factors of a tile's tokens, in shared memory.
template <int kTokens>
struct DigitFactors {
  static_assert(kTokens <= 32, "a lane loads each");
  float2 of_token[kTokens];
};

// Of token m0 + lane. Behind the wait for earlier kernels.
__device__ inline float2 load_factors(const OutlierKernelArgs& args, int m0, int lane) {
  return reinterpret_cast<const float2*>(args.outliers.factors)[min(m0 + lane, args.output.m - 1)];
}

// A token's sums of the thread's share to one in fp32, in place of the first.
template <class Tile>
__device__ void join_share(const DigitFactors<Tile::kTokens>& factors, const typename Tile::Share& share,
                           int32_t* parked) {
  constexpr int kPiece = Tile::Share::kPiece;
#pragma unroll 1
  for (int m = share.m; m < share.m_end; m += share.step) {
    int32_t* const rows = parked + m * Tile::kTokenPitch + share.n;
    const float2 of_token = factors.of_token[m];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      int32_t sums[kDigitRows];
#pragma unroll
      for (int row = 0; row < kDigitRows; ++row) sums[row] = rows[row * Tile::kPitch + j];
      rows[j] = __float_as_int(join_digits(sums, of_token));
    }
  }
}

}  // namespace octofuse::wgmma
