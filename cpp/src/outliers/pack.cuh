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

// Which elements of a pack are outliers: all bits of theirs.
template <class T>
struct PackOutliers {
  uint32_t pairs[kPack / 2];

  __device__ bool any() const { return (pairs[0] | pairs[1] | pairs[2] | pairs[3]) != 0; }

  // A bit for each element.
  __device__ uint32_t bits() const {
    uint32_t found = 0;
#pragma unroll
    for (int j = 0; j < kPack / 2; ++j) found |= pairs[j] & 0x00010001U << 2 * j;
    return (found | found >> 15) & 0xFFU;
  }

  // Zeros in their place.
  __device__ void remove_from(Pack<T>& pack) const {
#pragma unroll
    for (int j = 0; j < kPack / 2; ++j) reinterpret_cast<uint32_t*>(&pack)[j] &= ~pairs[j];
  }
};

// The largest magnitudes of packs, of what is no outlier and of all; NaN once there was one.
template <class T>
struct Magnitudes {
  using Pair = typename rows::Largest<T>::Pair;
  Pair threshold;  // the smallest number of the type that is no less
  rows::Largest<T> below, most;

  __device__ explicit Magnitudes(float given) {
    if constexpr (std::is_same_v<T, __half>) threshold = __half2half2(__float2half_ru(given));
    if constexpr (!std::is_same_v<T, __half>) threshold = __bfloat162bfloat162(__float2bfloat16_ru(given));
  }

  __device__ PackOutliers<T> take(const Pack<T>& pack) {
    PackOutliers<T> outliers;
    Pack<T> rest = pack;
    most.take(pack);
#pragma unroll
    for (int j = 0; j < kPack / 2; ++j) {
      outliers.pairs[j] = __hge2_mask(__habs2(Pair{pack.values[2 * j], pack.values[2 * j + 1]}), threshold);
    }
    outliers.remove_from(rest);
    below.take(rest);
    return outliers;
  }
};

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
