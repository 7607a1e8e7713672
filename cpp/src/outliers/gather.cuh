// Many tokens, behind measure.cuh: puts together what its blocks found, quantises the rows, and gathers columns of x
// and w side by side.
#pragma once

#include "device/chain.cuh"
#include "outliers/list.cuh"
#include "outliers/measure.cuh"

namespace octofuse::outliers {

constexpr int kThreads = 256;

struct GatherArgs {
  MeasureArgs found;
  OutlierArgs of;
  Gathered to;
  int weight_blocks;
  int threads_of_row, rows_of_block;
};

struct GatherMemory {
  uint32_t mask[(kMaxK + 31) / 32];
  ColumnList<kThreads> list;
};

template <class T, bool kWide>
class Gather {
  const GatherArgs& args_;
  GatherMemory& memory_;
  int thread_ = static_cast<int>(threadIdx.x);

 public:
  __device__ Gather(const GatherArgs& args, GatherMemory& memory) : args_(args), memory_(memory) {
    for (int word = thread_; word < args.found.words; word += kThreads) memory_.mask[word] = args.found.mask(word);
    __syncthreads();
  }

  __device__ void take_weights() {
    constexpr int kLanes = 8;  // threads that share a row's columns
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + thread_ / kLanes;
    const bool exists = row < args_.of.n;
    const int8_t* const w = args_.of.w + (exists ? row : 0) * args_.of.k;
    T* const to = static_cast<T*>(args_.to.w) + row * kMostGathered;
    const int total = lists([&](const int* columns, int count, int before) {
      if (exists) gather_row(w, columns, count, before, thread_ % kLanes, kLanes, to);
      for (int i = thread_; blockIdx.x == 0 && i < count; i += kThreads) args_.to.columns[before + i] = columns[i];
    });
    if (exists) end_row(total, thread_ % kLanes, kLanes, to);
    if (blockIdx.x == 0 && thread_ == 0) *args_.to.count = total;
  }

  // As many threads as args.threads_of_row, whole warps, take one row after the other.
  __device__ void take_tokens(int block) {
    const int threads = args_.threads_of_row;
    const int thread = thread_ % threads;
    const int step = kThreads / threads;
    const int64_t first = static_cast<int64_t>(block) * args_.rows_of_block + thread_ / threads;
    const int64_t end = min(static_cast<int64_t>(block + 1) * args_.rows_of_block, args_.of.m);
    for (int64_t row = first; row < end; row += step) quantise(row, thread, threads);
    const int total = lists([&](const int* columns, int count, int before) {
      for (int64_t row = first; row < end; row += step) {
        gather_row(row_of(row), columns, count, before, thread, threads, gathered_row(row));
      }
    });
    for (int64_t row = first; row < end; row += step) end_row(total, thread, threads, gathered_row(row));
  }

 private:
  __device__ const T* row_of(int64_t row) const { return static_cast<const T*>(args_.of.x) + row * args_.of.ldx; }
  __device__ T* gathered_row(int64_t row) const { return static_cast<T*>(args_.to.x) + row * kMostGathered; }

  // f(columns, count, of earlier lists); returns how many columns there are.
  template <class F>
  __device__ int lists(F f) {
    int total = 0;
    for_each_list(memory_.list, memory_.mask, args_.found.words, [&](const int* columns, int count, int before) {
      total += count;
      f(columns, count, before);
    });
    return total;
  }

  __device__ void quantise(int64_t row, int thread, int threads) const {
    const int k = static_cast<int>(args_.of.k);
    uint32_t most = 0;
    for (int part = thread % 32; part < args_.found.parts; part += 32)
      most = max(most, args_.found.below[part * args_.of.m + row]);
    most = __reduce_max_sync(kFullWarp, most);
    const float scale = rows::scale_of(__uint_as_float(most), DType::kInt8);
    if (thread == 0) args_.of.scales[row] = scale;
    constexpr int kAhead = 4;
    const float inverse = reciprocal(scale);
    const int packs = (k + kPack - 1) / kPack;
#pragma unroll 1
    for (int first = thread; first < packs; first += threads * kAhead) {
      Pack<T> ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int index = first + threads * i;
        if (index < packs) ahead[i] = load_pack<T, kWide>(row_of(row), index, k);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int index = first + threads * i;
        if (index >= packs) break;
        const uint32_t columns = memory_.mask[index / 4] >> index % 4 * kPack;
        store_pack<T, kWide>(ahead[i], columns, inverse, args_.of.q + row * k, index, k);
      }
    }
  }
};

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherArgs args) {
  __shared__ GatherMemory memory;
  wait_for_predecessors();
  Gather<T, kWide> gather(args, memory);
  const int block = static_cast<int>(blockIdx.x) - args.weight_blocks;
  if (block < 0) {
    gather.take_weights();
  } else {
    gather.take_tokens(block);
  }
  // Not before: its reads, one behind the other, would wait for the next kernel's weights too.
  launch_dependents();
}

}  // namespace octofuse::outliers
