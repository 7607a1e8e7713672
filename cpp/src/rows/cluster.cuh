// Rows that the blocks of a cluster share: compute capability 9.0 alone. A cluster's barrier lies between two calls
// that write to the same memory of other blocks, and before the first one, since a block may not have started.
#pragma once

#include <cooperative_groups.h>

#include "rows/reduce.cuh"

namespace octofuse::rows {

constexpr int kMostClusterBlocks = 8;

// The largest of the cluster's blocks' maxima, as row_max() has them.
__device__ inline float cluster_max(float of_block, int block, int blocks) {
  __shared__ uint32_t maxima[kMostClusterBlocks];
  if (blocks == 1) return of_block;
  const auto cluster = cooperative_groups::this_cluster();
  if (static_cast<int>(threadIdx.x) < blocks) {
    *cluster.map_shared_rank(maxima + block, threadIdx.x) = __float_as_uint(of_block);
  }
  cluster.sync();
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kMostClusterBlocks; ++i) {
    if (i < blocks) most = max(most, maxima[i]);
  }
  return __uint_as_float(most);
}

}  // namespace octofuse::rows
