// The outliers' product by itself, for devices whose int8 kernels do not add it.
#pragma once

#include "epilogue/outliers.cuh"
#include "octofuse/outliers.h"

namespace octofuse::outliers {

constexpr int kProductThreads = 128;
constexpr int kProductTokens = 64;    // of a block: 16 a warp
constexpr int kProductChannels = 32;  // of a block

struct ProductArgs {
  OutlierColumns columns;
  ScaleView w_scale;
  void* out;  // [m, n], of x's type
  int m, n;
};

template <class T>
__global__ void __launch_bounds__(kProductThreads) product_kernel(const __grid_constant__ ProductArgs args) {
  constexpr int kSums = kProductChannels / 2;
  const int count = *args.columns.count;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int col = static_cast<int>(blockIdx.x) * kProductChannels;
  for (int row = static_cast<int>(blockIdx.y) * kProductTokens + static_cast<int>(threadIdx.x) / 32 * 16; row < args.m;
       row += static_cast<int>(gridDim.y) * kProductTokens) {
    float sums[kSums] = {};
    multiply_columns<T, false>(args.columns, 0, count, args.m, args.n, row, col, lane, sums);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int m = row + lane / 4 + i / 2 % 2 * 8;
      const int n = col + lane % 4 * 2 + i / 4 * 8 + i % 2;
      if (m >= args.m || n >= args.n) continue;
      const float in[1] = {__fmul_rn(sums[i], scale_at(args.w_scale, n))};
      round_to(in, 0, 0.0F, reinterpret_cast<T(&)[1]>(static_cast<T*>(args.out)[static_cast<int64_t>(m) * args.n + n]));
    }
  }
}

}  // namespace octofuse::outliers
