// A row to int8 without its outliers, whose columns it notes in the mask.
#pragma once

#include "outliers/few.cuh"

namespace octofuse::outliers {

constexpr int kThreads = 256;

// kPacks: of 8 columns, that a thread keeps; 0: any number, and columns one by one.
template <class T, int kPacks>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ OutlierArgs args) {
  __shared__ uint32_t of_warp[kThreads / 32];
  constexpr bool kWide = kPacks > 0;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const int k = static_cast<int>(args.k);
  const T* const x = static_cast<const T*>(args.x) + row * args.ldx;
  const auto load = [&](int index, int) { return load_pack<T, kWide>(x, index, k); };
  rows::Row<T, kThreads, kPacks> packs(thread, (k + kPack - 1) / kPack);
  packs.fill(load);
  float largest = 0.0F;
  packs.for_each(load, [&](const Pack<T>& pack, int index) {
    measure(pack, index, args.threshold, largest, [&](int column) {
      uint32_t* const word = args.mask + column / 32;
      const uint32_t bit = 1U << column % 32;
      if ((*word & bit) == 0) atomicOr(word, bit);  // most are there already; an old value does no harm
    });
  });
  const float scale = rows::scale_of(rows::row_max<kThreads>(largest, thread, of_warp), DType::kInt8);
  const float inverse = reciprocal(scale);
  packs.for_each(load, [&](const Pack<T>& pack, int index) {
    store_codes<kWide>(pack, index, k, args.threshold, inverse, args.q + row * args.k);
  });
  if (thread == 0) args.scales[row] = scale;
}

}  // namespace octofuse::outliers
