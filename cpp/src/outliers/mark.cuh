// Few tokens, in front of a kernel that takes marks: each row by itself, to int8 without its own outliers, which it
// marks.
#pragma once

#include "device/chain.cuh"
#include "outliers/pack.cuh"

namespace octofuse::outliers {

constexpr int kMarkThreads = 512;

struct MarkArgs {
  OutlierArgs of;
  uint32_t* marks;
};

// A block has a row. kPacks: of 8 columns, that a thread keeps; 0: any number, and columns one by one.
template <class T, int kPacks>
__global__ void __launch_bounds__(kMarkThreads) mark_kernel(const __grid_constant__ MarkArgs args) {
  constexpr bool kWide = kPacks > 0;
  __shared__ uint32_t marks[words_of_marks(kMaxK)];
  __shared__ uint32_t of_warp[kMarkThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int k = static_cast<int>(args.of.k);
  const int words = static_cast<int>(words_of_marks(k));
  const int64_t row = blockIdx.x;
  const T* const x = static_cast<const T*>(args.of.x) + row * args.of.ldx;
  for (int i = thread; i < words; i += kMarkThreads) marks[i] = 0;
  __syncthreads();
  launch_dependents();
  wait_for_predecessors();
  const auto load = [&](int index, int) { return load_pack<T, kWide>(x, index, k); };
  rows::Row<T, kMarkThreads, kPacks> packs(thread, (k + kPack - 1) / kPack);
  packs.fill(load);
  float largest = 0.0F;
  packs.for_each(load, [&](const Pack<T>& pack, int index) {
    mark_pack(measure(pack, args.of.threshold, largest), index, marks);
  });
  const float scale = rows::scale_of(rows::row_max<kMarkThreads>(largest, thread, of_warp), DType::kInt8);
  const float inverse = reciprocal(scale);
  packs.for_each(load, [&](const Pack<T>& pack, int index) {
    store_pack<T, kWide>(pack, marks[index / 4] >> index % 4 * kPack, inverse, args.of.q + row * k, index, k);
  });
  for (int i = thread; i < words; i += kMarkThreads) args.marks[row * words + i] = marks[i];
  if (thread == 0) args.of.scales[row] = scale;
}

}  // namespace octofuse::outliers
