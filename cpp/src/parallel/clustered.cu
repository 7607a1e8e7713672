// Gathered or added rows that are copied, quantised or normalised: a cluster of blocks shares each, so that no thread
// has more than a pack or two to send and to wait for, and no block is too large to start beside the kernel in front.
#include "parallel/clustered.h"

#include "device/launch.h"
#include "octofuse/device.h"
#include "parallel/row_parts.cuh"
#include "rows/cluster_norm.cuh"

namespace octofuse::peers {
namespace {

constexpr int kThreads = 256;
constexpr int kWideThreads =
    512;  // of a norm's only block: two of 256 that agree on sums were slower (docs/measured.md)
static_assert(most_clustered_columns(true) == rows::kMostClusterBlocks * kThreads * kPack);

// All blocks of a cluster arrive at its barrier once they have read the number of the call, and its first one counts
// behind that barrier.
template <class T, int kPacks>
__global__ void __launch_bounds__(kThreads) gather_clustered_kernel(const __grid_constant__ GatherRowsArgs args) {
  __shared__ uint32_t of_warp[kThreads / 32];
  const int block = static_cast<int>(blockIdx.y);
  const int blocks = static_cast<int>(gridDim.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int first = block * kThreads + thread;
  const int cols = static_cast<int>(args.rows.cols);
  const int64_t row = blockIdx.x;
  launch_dependents();
  const RowParts<T, kPacks> parts(args, static_cast<int>(row), first, blocks * kThreads);
  const OwnPart<T, true> own(args, row);
  float inverse = rows::given_inverse(args.rows, row);
  wait_for_predecessors();
  const Call call(args.peers);
  cooperative_groups::this_cluster().barrier_arrive();
  Pack<T> packs[kPacks];
  parts.exchange(call, own, packs);
  cooperative_groups::this_cluster().barrier_wait();
  const auto for_each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int index = first + i * blocks * kThreads;
      if (index * kPack < cols) f(packs[i], index);
    }
  };
  if (args.rows.scales != nullptr) {
    rows::Largest<T> largest;
    for_each([&](const Pack<T>& pack, int) { largest.take(pack); });
    const float amax = rows::row_max<kThreads>(largest.value(), thread, of_warp);
    const float scale = rows::scale_of(rows::cluster_max(amax, block, blocks), args.rows.q_type);
    if (first == 0) args.rows.scales[row] = scale;
    inverse = reciprocal(scale);
  }
  for_each([&](const Pack<T>& pack, int index) {
    if (args.rows.y != nullptr) {
      rows::store<true>(static_cast<T*>(args.rows.y) + row * cols, index, cols, pack);
    } else {
      const auto out = rows::quantised(rows::widen(pack), args.rows.q_type, inverse);
      rows::store<true>(args.rows.q + row * cols, index, cols, out);
    }
  });
  if (block == 0) count(args.peers, call.number);
}

// A norm, a pack a thread. What a chain waits for is the fetching of instructions: so it goes through its row once
// while earlier kernels run, as rows/pass_chained.cu does, with zeros and for results that nobody reads.
template <class T, int kBlock>
__global__ void __launch_bounds__(kBlock, 1024 / kBlock)
    gather_norm_clustered_kernel(const __grid_constant__ GatherRowsArgs args) {
  __shared__ rows::ClusterMeeting<kBlock> meeting;
  __shared__ Pack<T> scratch[kBlock];
  const int index = static_cast<int>(blockIdx.y) * kBlock + static_cast<int>(threadIdx.x);
  launch_dependents();
  cooperative_groups::this_cluster().barrier_arrive();
  const float given = rows::given_inverse(args.rows, blockIdx.x);
  Pack<T> pack[1] = {};
  uint32_t number = 0;
#pragma unroll 1
  for (bool rehearses = true;; rehearses = false) {
    cooperative_groups::this_cluster().barrier_wait();
    rows::normalise_in_cluster<T, kBlock>(args.rows, pack[0], index, given, rehearses ? scratch + threadIdx.x : nullptr,
                                          meeting);
    if (!rehearses) break;
    const RowParts<T, 1> parts(args, static_cast<int>(blockIdx.x), index, 0);
    wait_for_predecessors();
    const Call call(args.peers);
    number = call.number;
    cooperative_groups::this_cluster().barrier_arrive();
    parts.exchange(call, OwnPart<T, false>(args, blockIdx.x), pack);
  }
  if (blockIdx.y == 0) count(args.peers, number);
}

template <class T>
const void* kernel_for(int packs) {
  return packs == 1   ? reinterpret_cast<const void*>(gather_clustered_kernel<T, 1>)
         : packs == 2 ? reinterpret_cast<const void*>(gather_clustered_kernel<T, 2>)
                      : reinterpret_cast<const void*>(gather_clustered_kernel<T, 3>);
}

template <class T>
const void* norm_for(int threads) {
  return threads == kThreads ? reinterpret_cast<const void*>(gather_norm_clustered_kernel<T, kThreads>)
                             : reinterpret_cast<const void*>(gather_norm_clustered_kernel<T, kWideThreads>);
}

}  // namespace

bool run_clustered(const GatherRowsArgs& args, int device, cudaStream_t stream) {
  if (!args.clusters || !device_capability(device).kernels_sm90a) return false;
  const bool norm = args.rows.norm != Norm::kNone;
  const bool is_half = args.rows.type == DType::kFloat16;
  const int packs = static_cast<int>(args.rows.cols) / kPack;
  const int threads = norm && packs > kThreads && packs <= kWideThreads ? kWideThreads : kThreads;
  int blocks = 1;
  while (blocks < rows::kMostClusterBlocks && blocks * threads < packs) blocks *= 2;
  const int of_thread = (packs - 1) / (blocks * threads) + 1;
  const void* kernel = norm      ? (is_half ? norm_for<__half>(threads) : norm_for<__nv_bfloat16>(threads))
                       : is_half ? kernel_for<__half>(of_thread)
                                 : kernel_for<__nv_bfloat16>(of_thread);
  GatherRowsArgs kernel_args = args;
  const auto of_row = static_cast<unsigned>(blocks);
  launch_kernel("gather_clustered", kernel, dim3(static_cast<unsigned>(args.rows.rows), of_row),
                dim3(static_cast<unsigned>(threads)), 0, dim3(1, of_row), is_chained(stream, device), &kernel_args,
                stream);
  return true;
}

}  // namespace octofuse::peers
