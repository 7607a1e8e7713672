// Eight columns of a row: what is no outlier, in int8, and where the others are.
#pragma once

#include "device/align.h"
#include "octofuse/outliers.h"
#include "rows/reduce.cuh"

namespace octofuse::outliers {

using rows::kPack;
using rows::Pack;

// Whether kernels may read and write whole packs.
inline bool is_wide(const OutlierArgs& args) {
  return args.k % kPack == 0 && args.ldx % kPack == 0 && is_aligned(args.x) && is_aligned(args.q, kPack);
}

template <class T, bool kWide>
__device__ inline Pack<T> load_pack(const T* row, int index, int k) {
  if constexpr (kWide) {
    return *reinterpret_cast<const Pack<T>*>(row + index * kPack);
  } else {
    Pack<T> pack;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      pack.values[j] = index * kPack + j < k ? row[index * kPack + j] : rows::from_float<T>(0.0F);
    }
    return pack;
  }
}

// A bit for each outlier of a pack, and the largest magnitude of the others to `below`, of all to `most`. Most packs
// have none, and are done at once.
template <class T>
__device__ inline uint32_t measure(const Pack<T>& pack, float threshold, float& below, float& most) {
  const auto take = [](float value, float& largest) { asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(value)); };
  rows::Largest<T> of_pack;
  of_pack.take(pack);
  take(of_pack.value(), most);
  if (of_pack.value() < threshold) {
    take(of_pack.value(), below);
    return 0;
  }
  uint32_t outliers = 0;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const float value = fabsf(to_float(pack.values[j]));
    const bool is_outlier = value >= threshold;
    outliers |= (is_outlier ? 1U : 0U) << j;
    take(is_outlier ? 0.0F : value, below);
  }
  return outliers;
}

// The outliers of pack `index` to a block's mask in shared memory.
__device__ inline void mark_pack(uint32_t outliers, int index, uint32_t* mask) {
  const uint32_t bits = outliers << index % 4 * kPack;
  if ((mask[index / 4] & bits) != bits) atomicOr(mask + index / 4, bits);
}

template <bool kWide>
__device__ inline void store_bytes(const Pack<int8_t>& bytes, int8_t* row, int index, int k) {
  if constexpr (kWide) {
    *reinterpret_cast<Pack<int8_t>*>(row + index * kPack) = bytes;
  } else {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (index * kPack + j < k) row[index * kPack + j] = bytes.values[j];
    }
  }
}

// Zeros in place of the outliers, a bit each.
template <class T>
__device__ inline void remove(Pack<T>& pack, uint32_t outliers) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if ((outliers >> j & 1U) != 0) pack.values[j] = rows::from_float<T>(0.0F);
  }
}

// The pack times `inverse` to int8.
template <class T, bool kWide>
__device__ inline void store_pack(const Pack<T>& pack, float inverse, int8_t* q, int index, int k) {
  store_bytes<kWide>(rows::quantised(rows::widen(pack), DType::kInt8, inverse), q, index, k);
}

// Where the columns go that hold outliers.
struct Gathered {
  int* count;
  int* columns;
  void* x;  // [m, kMostGathered]
};

// A row's columns side by side, from the list's number `before` on; `thread` of `threads`. Several are on their way at
// once: the compiler cannot know that none of them is written here.
template <class T>
__device__ inline void gather_row(const T* row, const int* columns, int count, int before, int thread, int threads,
                                  T* to) {
  constexpr int kAhead = 8;
  const int end = min(count, kMostGathered - before);
#pragma unroll 1
  for (int first = thread; first < end; first += kAhead * threads) {
    T values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * threads < end) values[i] = row[columns[first + i * threads]];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * threads < end) to[before + first + i * threads] = values[i];
    }
  }
}

// Zeros up to a whole block of columns.
template <class T>
__device__ inline void end_row(int total, int thread, int threads, T* to) {
  const int end = min((total + kOutlierBlock - 1) / kOutlierBlock * kOutlierBlock, kMostGathered);
  for (int at = total + thread; at < end; at += threads) to[at] = rows::from_float<T>(0.0F);
}

}  // namespace octofuse::outliers
