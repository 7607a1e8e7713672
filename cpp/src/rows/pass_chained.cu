// A few rows in a captured chain, a block each. The chain waits for this kernel, which fetches instructions longer than
// it computes: so it goes through its row once while earlier kernels run, with whatever shared memory holds for x and
// results that nobody reads.
#include "rows/pass_chained.h"

#include <cooperative_groups.h>

#include "device/launch.h"
#include "rows/cluster.cuh"
#include "rows/ordered.cuh"
#include "rows/ordered.h"
#include "rows/pass.cuh"

namespace octofuse::rows {
namespace {

constexpr int kThreads = 256;
constexpr int kMostRows = 32;

template <RowOp kOp>
constexpr int kPacksOf = kOp == RowOp::kNorm ? 2 : 4;  // of a thread

template <class T, RowOp kOp>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(const __grid_constant__ RowPassArgs args) {
  extern __shared__ int4 shared_memory[];
  __shared__ Meeting<kThreads, kMaxGroups<kThreads, kPacksOf<kOp>>> meeting;
  __shared__ float scale;
  const int thread = static_cast<int>(threadIdx.x);
  char* const memory = reinterpret_cast<char*>(shared_memory);
  launch_dependents();
  RowPassArgs row = args;
  if (kOp == RowOp::kNorm) stage_affine<kThreads>(row, memory, thread);
  const auto given = [inverse = given_inverse(args, blockIdx.x)] { return inverse; };
  char* const results = memory + affine_bytes(args);
  row.x = results;
  row.residual = nullptr;
  row.sum = nullptr;
  if (args.y != nullptr) row.y = results;
  row.q = reinterpret_cast<int8_t*>(results);
  row.q_group = 0;
  if (args.scales != nullptr) row.scales = &scale;
#pragma unroll 1
  for (int64_t index = -1;; index = blockIdx.x) {
    pass_row<T, kOp, kThreads, kPacksOf<kOp>>(row, given, max(index, int64_t{0}), thread, meeting);
    if (index >= 0) return;
    wait_for_all_copies();
    wait_for_predecessors();
    row.x = args.x;
    row.residual = args.residual;
    row.sum = args.sum;
    row.y = args.y;
    row.q = args.q;
    row.q_group = args.q_group;
    row.scales = args.scales;
    row_barrier<kThreads>();
  }
}

// A norm whose columns leave in another order, which is in registers before the row is.
template <class T>
__global__ void __launch_bounds__(kThreads) few_ordered_kernel(const __grid_constant__ RowPassArgs args) {
  constexpr int kPacks = kPacksOf<RowOp::kNorm>;
  extern __shared__ int4 shared_memory[];
  __shared__ Meeting<kThreads, kMaxGroups<kThreads, kPacks>> meeting;
  const int thread = static_cast<int>(threadIdx.x);
  char* const memory = reinterpret_cast<char*>(shared_memory);
  launch_dependents();
  RowPassArgs row = args;
  stage_affine<kThreads>(row, memory, thread);
  const int count = static_cast<int>(args.cols) / kPack;
  Row<int32_t, kThreads, kPacks> order(thread, count);
  order.fill([&](int index, int) { return reinterpret_cast<const Pack<int32_t>*>(args.order)[index]; });
  T* const results = reinterpret_cast<T*>(memory + affine_bytes(args));
  row.x = row.y = results;
#pragma unroll 1
  for (bool rehearses = true;; rehearses = false) {
    pass_row<T, RowOp::kNorm, kThreads, kPacks>(row, [] { return 0.0F; }, 0, thread, meeting);
    row_barrier<kThreads>();
    if (!rehearses) break;
    wait_for_all_copies();
    wait_for_predecessors();
    row.x = static_cast<const T*>(args.x) + blockIdx.x * args.ldx;
  }
  T* const y = static_cast<T*>(args.y) + blockIdx.x * args.cols;
  order.for_each([](int, int) { return Pack<int32_t>{}; },
                 [&](const Pack<int32_t>& from, int index) {
                   reinterpret_cast<Pack<T>*>(y)[index] = gathered(results, from, static_cast<int>(args.cols));
                 });
}

// Activations, whose rows are long: a cluster of blocks a row, which agree on its scale.
constexpr int kClusterBlocks = 8;
constexpr int kClusterThreads = kClusterBlocks * kThreads;
constexpr int kClusterPacks = 2;  // of a thread, at most

template <class T>
__global__ void __launch_bounds__(kThreads) few_activated_kernel(const __grid_constant__ RowPassArgs args) {
  __shared__ uint32_t of_warp[kThreads / 32];
  const int block = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int first = block * kThreads + thread;
  const int cols = static_cast<int>(args.cols);
  const int64_t row = blockIdx.x;
  launch_dependents();
  cooperative_groups::this_cluster().barrier_arrive();
  float inverse = given_inverse(args, row);
  wait_for_predecessors();
  cooperative_groups::this_cluster().barrier_wait();
  const Source<T, RowOp::kActivate, true> source(args, row);
  Pack<T> packs[kClusterPacks];
  Largest<T> largest;
#pragma unroll
  for (int i = 0; i < kClusterPacks; ++i) {
    const int index = first + i * kClusterThreads;
    if (index * kPack >= cols) continue;
    packs[i] = source(index);
    largest.take(packs[i]);
  }
  if (args.scales != nullptr) {
    const float scale =
        scale_of(cluster_max(row_max<kThreads>(largest.value(), thread, of_warp), block, kClusterBlocks), args.q_type);
    if (first == 0) args.scales[row] = scale;
    inverse = reciprocal(scale);
  }
#pragma unroll
  for (int i = 0; i < kClusterPacks; ++i) {
    const int index = first + i * kClusterThreads;
    if (index * kPack >= cols) continue;
    if (args.y != nullptr) {
      store<true>(static_cast<T*>(args.y) + row * args.cols, index, cols, packs[i]);
    } else {
      store<true>(args.q + row * args.cols, index, cols, quantised(widen(packs[i]), args.q_type, inverse));
    }
  }
}

bool run_few_activated(const RowPassArgs& args, cudaStream_t stream) {
  if (args.cols > kClusterPacks * kClusterThreads * kPack || args.q_group != 0) return false;
  RowPassArgs kernel_args = args;
  const void* kernel = args.type == DType::kFloat16
                           ? reinterpret_cast<const void*>(few_activated_kernel<__half>)
                           : reinterpret_cast<const void*>(few_activated_kernel<__nv_bfloat16>);
  launch_kernel("few_activated", kernel, dim3(static_cast<unsigned>(args.rows), kClusterBlocks), dim3(kThreads), 0,
                dim3(1, kClusterBlocks), true, &kernel_args, stream);
  return true;
}

template <RowOp kOp>
const void* kernel_for(DType type) {
  return type == DType::kFloat16 ? reinterpret_cast<const void*>(few_rows_kernel<__half, kOp>)
                                 : reinterpret_cast<const void*>(few_rows_kernel<__nv_bfloat16, kOp>);
}

const void* ordered_kernel_for(DType type) {
  return type == DType::kFloat16 ? reinterpret_cast<const void*>(few_ordered_kernel<__half>)
                                 : reinterpret_cast<const void*>(few_ordered_kernel<__nv_bfloat16>);
}

}  // namespace

bool run_few(const RowPassArgs& args, cudaStream_t stream) {
  const bool norm = args.norm != Norm::kNone;
  const int packs = norm ? kPacksOf<RowOp::kNorm> : kPacksOf<RowOp::kCopy>;
  const int shared = affine_bytes(args) + 2 * static_cast<int>(args.cols);
  if (args.rows > kMostRows || args.type == DType::kFloat32 || (args.order != nullptr && !norm)) return false;
  if (args.block_scales || args.bare_scales) return false;
  if (args.activation != Activation::kNone) return run_few_activated(args, stream);
  if (args.cols > packs * kThreads * kPack || shared > kMostShared) return false;
  RowPassArgs kernel_args = args;
  const void* kernel = args.order != nullptr ? ordered_kernel_for(args.type)
                       : norm                ? kernel_for<RowOp::kNorm>(args.type)
                                             : kernel_for<RowOp::kCopy>(args.type);
  launch_kernel("few_rows", kernel, dim3(static_cast<unsigned>(args.rows)), dim3(kThreads), shared, dim3(1), true,
                &kernel_args, stream);
  return true;
}

}  // namespace octofuse::rows
