// Gathered or added rows that are copied or quantised: a cluster of blocks shares each, so that no thread has more than
// a pack or two to send and to wait for, and no block is too large to start beside the kernel in front.
#include "parallel/clustered.h"

#include "device/launch.h"
#include "octofuse/device.h"
#include "parallel/row_parts.cuh"
#include "rows/cluster.cuh"

namespace octofuse::peers {
namespace {

constexpr int kThreads = 256;

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
  cooperative_groups::this_cluster().barrier_arrive();
  const RowParts<T, kPacks> parts(args, static_cast<int>(row), first, blocks * kThreads);
  const OwnPart<T, true> own(args, row);
  float inverse = rows::given_inverse(args.rows, row);
  wait_for_predecessors();
  const Call call(args.peers);
  Pack<T> packs[kPacks];
  parts.exchange(call, own, packs);
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
  } else {
    cooperative_groups::this_cluster().barrier_wait();
  }
  for_each([&](const Pack<T>& pack, int index) {
    if (args.rows.y != nullptr) {
      rows::store<true>(static_cast<T*>(args.rows.y) + row * cols, index, cols, pack);
    } else {
      const auto out = rows::quantised(rows::widen(pack), args.rows.q_type, inverse);
      rows::store<true>(args.rows.q + row * cols, index, cols, out);
    }
  });
  count(args.peers, call.number);
}

template <class T>
const void* kernel_for(int packs) {
  return packs == 1   ? reinterpret_cast<const void*>(gather_clustered_kernel<T, 1>)
         : packs == 2 ? reinterpret_cast<const void*>(gather_clustered_kernel<T, 2>)
                      : reinterpret_cast<const void*>(gather_clustered_kernel<T, 3>);
}

}  // namespace

bool run_clustered(const GatherRowsArgs& args, int device, cudaStream_t stream) {
  const bool served = args.clusters && args.rows.norm == Norm::kNone;
  if (!served || !device_capability(device).kernels_sm90a) return false;
  const int packs = static_cast<int>(args.rows.cols) / kPack;
  unsigned blocks = 1;
  while (blocks < rows::kMostClusterBlocks && static_cast<int>(blocks) * kThreads < packs) blocks *= 2;
  const int of_thread = (packs - 1) / (static_cast<int>(blocks) * kThreads) + 1;
  GatherRowsArgs kernel_args = args;
  const void* kernel =
      args.rows.type == DType::kFloat16 ? kernel_for<__half>(of_thread) : kernel_for<__nv_bfloat16>(of_thread);
  launch_kernel("gather_clustered", kernel, dim3(static_cast<unsigned>(args.rows.rows), blocks), dim3(kThreads), 0,
                dim3(1, blocks), is_chained(stream, device), &kernel_args, stream);
  return true;
}

}  // namespace octofuse::peers
