// From a mask of columns with an outlier to a list of them.
#pragma once

#include "device/ptx.cuh"

namespace octofuse::outliers {

constexpr int kCapacity = 2048;  // columns that a list holds at once

template <int kThreads>
struct ColumnList {
  int columns[kCapacity];  // ascending
  int of_warp[kThreads / 32];

  // The columns from the skipped-th one on; returns how many the mask has in all. Every thread of the block takes part,
  // and may read the list afterwards.
  __device__ int fill(const uint32_t* mask, int words, int skipped) {
    const int thread = static_cast<int>(threadIdx.x);
    const int own = (words + kThreads - 1) / kThreads;  // neighbouring words of this thread
    const int first = min(thread * own, words);
    const int end = min(first + own, words);
    int mine = 0;
    for (int word = first; word < end; ++word) mine += __popc(mask[word]);
    int up_to = mine;  // of this warp's threads, this one included
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(kFullWarp, up_to, static_cast<unsigned>(apart));
      if (thread % 32 >= apart) up_to += other;
    }
    __syncthreads();  // nobody reads the last list any more
    if (thread % 32 == 31) of_warp[thread / 32] = up_to;
    __syncthreads();
    int at = up_to - mine - skipped;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < thread / 32) at += of_warp[i];
      count += of_warp[i];
    }
    for (int word = first; word < end; ++word) {
      for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1, ++at) {
        if (at >= 0 && at < kCapacity) columns[at] = word * 32 + __ffs(static_cast<int>(bits)) - 1;
      }
    }
    __syncthreads();
    return count;
  }
};

// f(columns, count, of earlier lists), for all columns of the mask.
template <int kThreads, class F>
__device__ void for_each_list(ColumnList<kThreads>& list, const uint32_t* mask, int words, F f) {
  int before = 0;
  int count = 0;
#pragma unroll 1
  do {
    count = list.fill(mask, words, before);
    f(list.columns, min(count - before, kCapacity), before);
    before += kCapacity;
  } while (before < count);
}

}  // namespace octofuse::outliers
