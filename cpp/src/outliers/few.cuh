// Few tokens in one kernel: every block finds the outliers and the scales for itself, writes its part of the int8 rows
// and multiplies the outliers for 64 channels, then for others.
#pragma once

#include "device/chain.cuh"
#include "octofuse/outliers.h"
#include "outliers/list.cuh"
#include "rows/reduce.cuh"

namespace octofuse::outliers {

using rows::kPack;
using rows::Pack;

constexpr int kFewTokens = 4;
constexpr int kFewThreads = 512;
constexpr int kFewWarps = kFewThreads / 32;
constexpr int kFewChannels = 64;                      // of a block
constexpr int kSharers = kFewThreads / kFewChannels;  // neighbouring threads, which share a channel's columns
constexpr int kAtOnce = 64;                           // columns whose values are in shared memory

struct FewMemory {
  uint32_t mask[(kMaxK + 31) / 32];
  ColumnList<kFewThreads> list;
  float largest[kFewTokens][kFewWarps];
  float inverse[kFewTokens];
  float x[kAtOnce][kFewTokens];
};

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

// The pack in int8: what is no outlier, times `inverse`.
template <bool kWide, class T>
__device__ inline void store_codes(const Pack<T>& pack, int index, int k, float threshold, float inverse, int8_t* q) {
  Pack<float> wide = rows::widen(pack);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if (fabsf(wide.values[j]) >= threshold) wide.values[j] = 0.0F;
  }
  const Pack<int8_t> bytes = rows::quantised(wide, DType::kInt8, inverse);
  if constexpr (kWide) {
    *reinterpret_cast<Pack<int8_t>*>(q + index * kPack) = bytes;
  } else {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (index * kPack + j < k) q[index * kPack + j] = bytes.values[j];
    }
  }
}

// The largest magnitude below the threshold of a pack, and note(column) for every outlier. Most packs have none, and
// are done at once.
template <class T, class Note>
__device__ inline void measure(const Pack<T>& pack, int index, float threshold, float& largest, Note note) {
  rows::Largest<T> of_pack;
  of_pack.take(pack);
  const float most = of_pack.value();
  if (most < threshold) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(most));
    return;
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const float value = fabsf(to_float(pack.values[j]));
    if (value >= threshold) {
      note(index * kPack + j);
    } else {
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(value));
    }
  }
}

template <class T, bool kWide>
class FewTokens {
  const OutlierArgs& args_;
  FewMemory& memory_;
  int m_, k_, packs_, words_;

 public:
  __device__ FewTokens(const OutlierArgs& args, FewMemory& memory)
      : args_(args),
        memory_(memory),
        m_(static_cast<int>(args.m)),
        k_(static_cast<int>(args.k)),
        packs_((k_ + kPack - 1) / kPack),
        words_((k_ + 31) / 32) {}

  // The mask and every row's largest value. As many warps share a row as there are for it.
  __device__ void find() {
    for (int i = static_cast<int>(threadIdx.x); i < words_; i += kFewThreads) memory_.mask[i] = 0;
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int parts = m_ > 2 ? 4 : m_ > 1 ? 8 : 16;
    for (int row = warp / parts; row < m_; row += kFewWarps / parts) {
      float largest = 0.0F;
      constexpr int kAhead = 8;  // packs on their way at once
      const int step = parts * 32;
#pragma unroll 1
      for (int first = warp % parts * 32 + static_cast<int>(threadIdx.x % 32); first < packs_; first += kAhead * step) {
        Pack<T> packs[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (first + i * step < packs_) packs[i] = load_pack<T, kWide>(row_of(row), first + i * step, k_);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (first + i * step >= packs_) break;
          measure(packs[i], first + i * step, args_.threshold, largest,
                  [&](int column) { atomicOr(memory_.mask + column / 32, 1U << column % 32); });
        }
      }
      const uint32_t most = __reduce_max_sync(kFullWarp, __float_as_uint(largest));
      if (threadIdx.x % 32 == 0) memory_.largest[row][warp % parts] = __uint_as_float(most);
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x);
    if (row < m_) {
      uint32_t most = 0;
      for (int i = 0; i < parts; ++i) most = max(most, __float_as_uint(memory_.largest[row][i]));
      const float scale = rows::scale_of(__uint_as_float(most), DType::kInt8);
      memory_.inverse[row] = reciprocal(scale);
      if (blockIdx.x == 0) args_.scales[row] = scale;
    }
    __syncthreads();
  }

  // This block's part of the int8 rows.
  __device__ void quantise() const {
    const int first = static_cast<int>(blockIdx.x * kFewThreads + threadIdx.x);
    for (int i = first; i < m_ * packs_; i += static_cast<int>(gridDim.x) * kFewThreads) {
      const int row = i / packs_;
      const int index = i % packs_;
      Pack<T> pack = load_pack<T, kWide>(row_of(row), index, k_);
      const uint32_t columns = memory_.mask[index / 4] >> index % 4 * kPack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if ((columns >> j & 1U) != 0) pack.values[j] = rows::from_float<T>(0.0F);
      }
      store_codes<kWide>(pack, index, k_, args_.threshold, memory_.inverse[row], args_.q + row * args_.k);
    }
  }

  // The outliers' products for 64 channels.
  __device__ void multiply(int group) {
    const int channel = static_cast<int>(threadIdx.x / kSharers);
    const int part = static_cast<int>(threadIdx.x % kSharers);
    const int64_t n = static_cast<int64_t>(group) * kFewChannels + channel;
    const int8_t* const w = args_.w + min(n, args_.n - 1) * args_.k;
    float sums[kFewTokens] = {};
    for_each_list(memory_.list, memory_.mask, words_, [&](const int* columns, int count, int) {
#pragma unroll 1
      for (int first = 0; first < count; first += kAtOnce) {
        const int here = min(kAtOnce, count - first);
        for (int i = static_cast<int>(threadIdx.x); i < here * kFewTokens; i += kFewThreads) {
          const int row = i % kFewTokens;
          if (row < m_) memory_.x[i / kFewTokens][row] = to_float(row_of(row)[columns[first + i / kFewTokens]]);
        }
        float weights[kAtOnce / kSharers];
#pragma unroll
        for (int i = 0; i < kAtOnce / kSharers; ++i) {
          const int at = i * kSharers + part;
          weights[i] = at < here ? static_cast<float>(w[columns[first + at]]) : 0.0F;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kAtOnce / kSharers; ++i) {
          const int at = i * kSharers + part;
          if (at >= here) break;
#pragma unroll
          for (int row = 0; row < kFewTokens; ++row) {
            if (row < m_) sums[row] = __fmaf_rn(memory_.x[at][row], weights[i], sums[row]);
          }
        }
        __syncthreads();
      }
    });
    const float scale = n < args_.n ? scale_at(args_.w_scale, n) : 0.0F;
#pragma unroll
    for (int row = 0; row < kFewTokens; ++row) {
      if (row >= m_) break;
      float sum = sums[row];
#pragma unroll
      for (int apart = 1; apart < kSharers; apart *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, apart));
      if (part == row % kSharers && n < args_.n) {
        static_cast<T*>(args_.out)[row * args_.n + n] = rows::from_float<T>(__fmul_rn(sum, scale));
      }
    }
  }

 private:
  __device__ const T* row_of(int row) const { return static_cast<const T*>(args_.x) + row * args_.ldx; }
};

template <class T, bool kWide>
__global__ void __launch_bounds__(kFewThreads) few_kernel(const __grid_constant__ OutlierArgs args) {
  __shared__ FewMemory memory;
  wait_for_predecessors();
  FewTokens<T, kWide> tokens(args, memory);
  tokens.find();
  tokens.quantise();
  for (int group = static_cast<int>(blockIdx.x); group * int64_t{kFewChannels} < args.n;
       group += static_cast<int>(gridDim.x)) {
    tokens.multiply(group);
  }
  // Not before: each read above waits for the one before it, and would wait for the next kernel's weights too.
  launch_dependents();
}

}  // namespace octofuse::outliers
