// A norm of a row that the blocks of a cluster share, a pack a thread.
#pragma once

#include "rows/cluster.cuh"
#include "rows/pass.cuh"

namespace octofuse::rows {

// Shared memory of each block, where all blocks of a row meet.
template <int kThreads>
using ClusterMeeting = Meeting<kThreads, kMostClusterBlocks * kThreads / 32>;

// The sum over a row of `packs` packs, each thread's terms of pack `index`, in the order of reduce.cuh; `of_group` is
// another one for every sum.
template <int kThreads>
__device__ float cluster_sum(const float (&terms)[kPack], int index, int blocks, int packs, float* of_group) {
  const float group = warp_sum(tree_sum(terms));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (blocks == 1) {
    if (lane == 0) of_group[index / 32] = group;
    __syncthreads();
  } else {
    const auto cluster = cooperative_groups::this_cluster();
    if (lane < blocks) *cluster.map_shared_rank(of_group + index / 32, static_cast<unsigned>(lane)) = group;
    cluster.sync();
  }
  const int groups = (packs + 31) / 32;
  if (groups <= 8) return few_groups_sum(of_group, groups);
  float mine = 0.0F;
#pragma unroll
  for (int i = 0; i < kMostClusterBlocks * kThreads / 1024; ++i) {
    if (lane + 32 * i < groups) mine = __fadd_rn(mine, of_group[lane + 32 * i]);
  }
  return warp_sum(mine);
}

// The norm of row blockIdx.x, of which each thread of the cluster has pack `index`, with the bits of normalise_row().
// given: 1 / args.scale, where no scale is found. scratch: where results go instead that nobody is to read, or null.
template <class T, int kThreads>
__device__ void normalise_in_cluster(const RowPassArgs& args, const Pack<T>& pack, int index, float given,
                                     Pack<T>* scratch, ClusterMeeting<kThreads>& meeting) {
  const int block = static_cast<int>(blockIdx.y);
  const int blocks = static_cast<int>(gridDim.y);
  const int cols = static_cast<int>(args.cols);
  const int packs = cols / kPack;
  const bool inside = index < packs;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * packs + index;
  Pack<float> wide = {};
  if (inside) {
    wide = widen(pack);
    if (args.sum != nullptr) *(scratch != nullptr ? scratch : static_cast<Pack<T>*>(args.sum) + at) = pack;
  }
  if (args.norm == Norm::kLayer) {
    const float sum = cluster_sum<kThreads>(wide.values, index, blocks, packs, meeting.of_group[0]);
    const float mean = inside ? __fdiv_rn(sum, static_cast<float>(cols)) : 0.0F;
#pragma unroll
    for (int j = 0; j < kPack; ++j) wide.values[j] = __fsub_rn(wide.values[j], mean);
  }
  float squares[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) squares[j] = __fmul_rn(wide.values[j], wide.values[j]);
  const float sum = cluster_sum<kThreads>(squares, index, blocks, packs, meeting.of_group[1]);
  Pack<T> result = {};
  if (inside) result = Normalise<T, true>{args, inverse_root(sum, cols, args.eps)}(wide, index);
  if (args.y != nullptr) {
    if (inside) *(scratch != nullptr ? scratch : static_cast<Pack<T>*>(args.y) + at) = result;
    return;
  }
  if (args.scales != nullptr) {
    Largest<T> largest;
    largest.take(result);
    const float amax = row_max<kThreads>(largest.value(), static_cast<int>(threadIdx.x), meeting.of_warp);
    const float scale = scale_of(cluster_max(amax, block, blocks), args.q_type);
    if (index == 0 && scratch == nullptr) args.scales[blockIdx.x] = scale;
    given = reciprocal(scale);
  }
  auto* const q =
      scratch != nullptr ? reinterpret_cast<Pack<int8_t>*>(scratch) : reinterpret_cast<Pack<int8_t>*>(args.q) + at;
  if (inside) *q = quantised(widen(result), args.q_type, given);
}

}  // namespace octofuse::rows
