// The float8 product: a block of 128 columns is added up in fp32 by kFloatLanes sums side by side, then these as a
// tree, and the blocks, each times the factor of its scales, from the first to the last. So the order depends on K
// alone.
#pragma once

#include <cstdint>

#include "cpu/epilogue.h"
#include "cpu/floats.h"
#include "cpu/kernels.h"

namespace octofuse::cpu {
namespace {

constexpr int kFloatLanes = 16;

inline float block_sum(const float* x, const float* w) {
  float lanes[kFloatLanes];
  for (int i = 0; i < kFloatLanes; ++i) lanes[i] = x[i] * w[i];
  for (int64_t k = kFloatLanes; k < kScaleBlock; k += kFloatLanes) {
    for (int i = 0; i < kFloatLanes; ++i) lanes[i] = lanes[i] + x[k + i] * w[k + i];
  }
  for (int half = kFloatLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return lanes[0];
}

// Row `row`'s factor of a block of columns, 1 where there are none.
inline float block_scale(const BlockScales& scales, int64_t row, int64_t block) {
  return scales.data == nullptr ? 1.0F : scales.data[row * scales.row + block * scales.step];
}

// Tokens [m0, m1) by channels [n0, n1); x: all rows as floats, row stride ldx, zeros behind column K.
inline void float8_block(const GemmArgs& args, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t n0,
                         int64_t n1) {
  float sums[kGemmTokens * kGemmChannels] = {};
  for (int64_t n = n0; n < n1; ++n) {
    for (int64_t k = 0; k < args.k; k += kScaleBlock) {
      const int64_t columns = least(kScaleBlock, args.k - k), block = k / kScaleBlock;
      float w[kScaleBlock] = {};
      load_floats(args.w, args.w_type, n * args.ldw + k, columns, w);
      const float of_w = block_scale(args.w_blocks, n / kScaleBlock, block);
      for (int64_t m = m0; m < m1; ++m) {
        const float factor = block_scale(args.x_blocks, m, block) * of_w;
        float& sum = sums[(m - m0) * kGemmChannels + n - n0];
        sum = sum + block_sum(x + m * ldx + k, w) * factor;
      }
    }
  }
  const Output out{args.out, args.ldo, args.out_type};
  for (int64_t m = m0; m < m1; ++m) {
    scale_and_finish(args.epilogue, out, m, n0, n1 - n0, sums + (m - m0) * kGemmChannels);
  }
}

inline void widen_row(const void* x, DType type, int64_t first, int64_t k, int64_t ld, float* to) {
  load_floats(x, type, first, k, to);
  for (int64_t i = k; i < ld; ++i) to[i] = 0.0F;
}

}  // namespace
}  // namespace octofuse::cpu
