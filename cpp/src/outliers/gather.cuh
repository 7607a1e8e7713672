// Many tokens, in one kernel all of whose blocks run at once: each quantises rows and marks their outliers' columns for
// all blocks. Once all have done so, it puts zeros in these columns of its rows, and gathers them side by side.
#pragma once

#include <cooperative_groups.h>

#include "device/chain.cuh"
#include "outliers/list.cuh"
#include "outliers/pack.cuh"

namespace octofuse::outliers {

constexpr int kThreads = 512;
constexpr int kRowThreads = 128;  // that share a row
constexpr int kRowsAtOnce = kThreads / kRowThreads;

struct GatherArgs {
  OutlierArgs of;
  Gathered to;
  uint32_t* mask;  // [words]: a bit for each column with an outlier
  int words;
  int64_t rows_of_block;
};

struct GatherMemory {
  uint32_t mask[(kMaxK + 31) / 32];
  uint32_t of_warp[2][kRowsAtOnce][kRowThreads / 32];
  ColumnList<kThreads> list;
};

// A thread's packs of a row.
template <class T, bool kWide, int kPacks>
struct KeptRow {
  rows::Row<T, kRowThreads, kPacks> row;
  const T* x = nullptr;
  int k;

  __device__ KeptRow(int thread, int k) : row(thread, (k + kPack - 1) / kPack), k(k) {}
  __device__ auto load() const {
    return [this](int index, int) { return load_pack<T, kWide>(x, index, k); };
  }
  __device__ void fill(const T* from) {
    x = from;
    row.fill(load());
  }
  template <class F>
  __device__ void for_each(F f) {
    row.for_each(load(), f);
  }
};

// kPacks: that a thread keeps of a row; 0: it reads them again.
template <class T, bool kWide, int kPacks>
class Gather {
  const GatherArgs& args_;
  const OutlierArgs& of_;
  GatherMemory& memory_;
  int thread_ = static_cast<int>(threadIdx.x);
  int64_t first_, end_;  // of this block's rows
  using Kept = KeptRow<T, kWide, kPacks>;

 public:
  __device__ Gather(const GatherArgs& args, GatherMemory& memory)
      : args_(args),
        of_(args.of),
        memory_(memory),
        first_(static_cast<int64_t>(blockIdx.x) * args.rows_of_block),
        end_(min(first_ + args.rows_of_block, args.of.m)) {}

  __device__ void run() {
    const auto grid = cooperative_groups::this_grid();
    for (int word = thread_; word < args_.words; word += kThreads) {
      memory_.mask[word] = 0;
      if (blockIdx.x == 0) args_.mask[word] = 0;
    }
    auto cleared = grid.barrier_arrive();
    Kept kept(thread_ % kRowThreads, static_cast<int>(of_.k));
    float scale = 0.0F;
    int64_t row = first_ + thread_ / kRowThreads;
    const auto turns = static_cast<int>((end_ - first_ + kRowsAtOnce - 1) / kRowsAtOnce);
    if (row < end_) kept.fill(row_of(row));
    grid.barrier_wait(std::move(cleared));  // meanwhile the first rows come
    for (int turn = 0; turn < turns; ++turn) {
      scale = measure_row(kept, row, turn % 2);
      if (turn + 1 == turns) break;  // the last rows are quantised below, while the other blocks' marks come
      quantise(kept, row, scale);
      row += kRowsAtOnce;
      if (row < end_) kept.fill(row_of(row));
    }
    __syncthreads();
    for (int word = thread_; word < args_.words; word += kThreads) {
      if (memory_.mask[word] != 0) atomicOr(args_.mask + word, memory_.mask[word]);
    }
    auto marked = grid.barrier_arrive();
    if (row < end_) quantise(kept, row, scale);
    grid.barrier_wait(std::move(marked));
    launch_dependents();
    take_columns();
  }

 private:
  __device__ const T* row_of(int64_t row) const { return static_cast<const T*>(of_.x) + row * of_.ldx; }

  // The kept row's outliers to the block's mask, zeros in their place; returns its scale. In the last turn threads may
  // have no row, and wait as often as the others (racecheck took what is shared behind it for a race otherwise).
  __device__ float measure_row(Kept& kept, int64_t row, int turn) {
    Magnitudes<T> magnitudes(of_.threshold);
    const bool exists = row < end_;
    const auto take = [&](Pack<T>& pack, int index) {
      const PackOutliers<T> outliers = magnitudes.take(pack);
      if (outliers.any()) mark_pack(outliers.bits(), index, memory_.mask);
      outliers.remove_from(pack);
      // One pack after the other, and nothing is widened ahead for quantise(): that would take too many registers.
      auto& words = reinterpret_cast<uint4&>(pack);
      asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    };
    if (exists) kept.for_each(take);
    const float amax = rows::row_max<kRowThreads, kThreads>(magnitudes.below.value(), thread_ % kRowThreads,
                                                            memory_.of_warp[turn][thread_ / kRowThreads]);
    const float scale = rows::scale_of(amax, DType::kInt8);
    if (exists && thread_ % kRowThreads == 0) of_.scales[row] = scale;
    return scale;
  }

  __device__ void quantise(Kept& kept, int64_t row, float scale) const {
    const int k = static_cast<int>(of_.k);
    const float inverse = reciprocal(scale);
    kept.for_each([&](Pack<T>& pack, int index) {
      if constexpr (kPacks == 0) Magnitudes<T>(of_.threshold).take(pack).remove_from(pack);  // it was read again
      store_pack<T, kWide>(pack, inverse, of_.q + row * k, index, k);
    });
  }

  // A warp takes one row after the other.
  __device__ void take_columns() {
    constexpr int kWarps = kThreads / 32;
    const int lane = thread_ % 32;
    const int64_t row0 = first_ + thread_ / 32;
    const auto gathered_row = [&](int64_t row) { return static_cast<T*>(args_.to.x) + row * kMostGathered; };
    for (int word = thread_; word < args_.words; word += kThreads) memory_.mask[word] = __ldcg(args_.mask + word);
    __syncthreads();
    int total = 0;
    for_each_list(memory_.list, memory_.mask, args_.words, [&](const int* columns, int count, int before) {
      total += count;
      for (int64_t row = row0; row < end_; row += kWarps) {
        gather_row(row_of(row), columns, count, before, lane, 32, gathered_row(row));
        for (int i = lane; i < count; i += 32) of_.q[row * of_.k + columns[i]] = 0;
      }
      for (int i = thread_; blockIdx.x == 0 && i < count; i += kThreads) args_.to.columns[before + i] = columns[i];
    });
    if (blockIdx.x == 0 && thread_ == 0) *args_.to.count = total;
    for (int64_t row = row0; row < end_; row += kWarps) end_row(total, lane, 32, gathered_row(row));
  }
};

template <class T, bool kWide, int kPacks>
__global__ void __launch_bounds__(kThreads, 1) gather_kernel(const __grid_constant__ GatherArgs args) {
  __shared__ GatherMemory memory;
  wait_for_predecessors();
  Gather<T, kWide, kPacks>(args, memory).run();
}

}  // namespace octofuse::outliers
