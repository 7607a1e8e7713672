// Many tokens, behind measure.cuh: puts together what its blocks found, quantises the rows, and gathers columns of x
// side by side.
#pragma once

#include "device/chain.cuh"
#include "outliers/list.cuh"
#include "outliers/measure.cuh"

namespace octofuse::outliers {

constexpr int kThreads = 256;

struct GatherArgs {
  MeasureArgs found;
  Gathered to;
  int threads_of_row, rows_of_block;
};

struct GatherMemory {
  uint32_t mask[(kMaxK + 31) / 32];
  ColumnList<kThreads> list;
};

template <class T, bool kWide>
class Gather {
  const GatherArgs& args_;
  const OutlierArgs& of_;
  GatherMemory& memory_;
  int thread_ = static_cast<int>(threadIdx.x);

 public:
  __device__ Gather(const GatherArgs& args, GatherMemory& memory) : args_(args), of_(args.found.of), memory_(memory) {}

  // As many threads as args.threads_of_row, whole warps, take one row after the other.
  __device__ void run() {
    const int threads = args_.threads_of_row;
    const int thread = thread_ % threads;
    const int step = kThreads / threads;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * args_.rows_of_block + thread_ / threads;
    const int64_t end = min(static_cast<int64_t>(blockIdx.x + 1) * args_.rows_of_block, of_.m);
    uint32_t most = first < end ? most_below(first) : 0;  // on its way beside the masks
    for (int word = thread_; word < args_.found.words; word += kThreads) memory_.mask[word] = args_.found.mask(word);
    __syncthreads();
    for (int64_t row = first; row < end; row += step) {
      if (row != first) most = most_below(row);
      quantise(row, most, thread, threads);
    }
    int total = 0;
    for_each_list(memory_.list, memory_.mask, args_.found.words, [&](const int* columns, int count, int before) {
      total += count;
      for (int64_t row = first; row < end; row += step) {
        gather_row(row_of(row), columns, count, before, thread, threads, gathered_row(row));
      }
      for (int i = thread_; blockIdx.x == 0 && i < count; i += kThreads) args_.to.columns[before + i] = columns[i];
    });
    if (blockIdx.x == 0 && thread_ == 0) *args_.to.count = total;
    for (int64_t row = first; row < end; row += step) end_row(total, thread, threads, gathered_row(row));
  }

 private:
  __device__ const T* row_of(int64_t row) const { return static_cast<const T*>(of_.x) + row * of_.ldx; }
  __device__ T* gathered_row(int64_t row) const { return static_cast<T*>(args_.to.x) + row * kMostGathered; }

  // The row's largest magnitude below the threshold, of a lane's parts.
  __device__ uint32_t most_below(int64_t row) const {
    uint32_t most = 0;
    for (int part = thread_ % 32; part < args_.found.parts; part += 32) {
      most = max(most, args_.found.below[part * of_.m + row]);
    }
    return most;
  }

  __device__ void quantise(int64_t row, uint32_t most, int thread, int threads) const {
    const int k = static_cast<int>(of_.k);
    const float scale = rows::scale_of(__uint_as_float(__reduce_max_sync(kFullWarp, most)), DType::kInt8);
    if (thread == 0) of_.scales[row] = scale;
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
        store_pack<T, kWide>(ahead[i], columns, inverse, of_.q + row * k, index, k);
      }
    }
  }
};

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherArgs args) {
  __shared__ GatherMemory memory;
  wait_for_predecessors();
  Gather<T, kWide>(args, memory).run();
  // Not before: its reads, one behind the other, would wait for the next kernel's weights too.
  launch_dependents();
}

}  // namespace octofuse::outliers
