// A finished row's columns in another order.
#pragma once

#include "rows/reduce.cuh"

namespace octofuse::rows {

// row[from] of a pack of columns.
template <class T>
__device__ inline Pack<T> gathered(const T* row, const Pack<int32_t>& from, int cols) {
  const auto last = static_cast<uint32_t>(cols - 1);
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < kPack; ++j) pack.values[j] = row[min(static_cast<uint32_t>(from.values[j]), last)];
  return pack;
}

// y[j] = row[order[j]], by kThreads threads; kWide: whole packs, of y and of order at multiples of their sizes.
template <int kThreads, bool kWide, class T>
__device__ void write_ordered(const T* row, const int32_t* order, T* y, int cols, int thread) {
  if constexpr (kWide) {
#pragma unroll 2
    for (int index = thread; index < cols / kPack; index += kThreads) {
      reinterpret_cast<Pack<T>*>(y)[index] = gathered(row, reinterpret_cast<const Pack<int32_t>*>(order)[index], cols);
    }
  } else {
    const auto last = static_cast<uint32_t>(cols - 1);
    for (int j = thread; j < cols; j += kThreads) y[j] = row[min(static_cast<uint32_t>(order[j]), last)];
  }
}

}  // namespace octofuse::rows
