// From logits to the next token: a block, or on compute capability 9.0 a cluster of blocks, finds the argmax of a row.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/decode.h"
#include "octofuse/device.h"
#include "rows/reduce.cuh"

namespace octofuse {
namespace {

using rows::kPack;

constexpr int kThreads = 1024;
constexpr int kBlocks = 8;  // of a cluster, which share a row of logits

// The likeliest token that a thread has seen. NaN is above all, as torch.argmax has it.
struct Likeliest {
  float logit = -INFINITY;
  int index = -1;

  // Called with growing indices: the first of equals stays.
  __device__ bool take(float other, int at) {
    const bool better = other > logit || index < 0 || (other != other && logit == logit);
    if (better) {
      logit = other;
      index = at;
    }
    return better;
  }

  // As one number: the greater is the likelier, and of equals the one that comes first.
  __device__ uint64_t rank() const {
    if (index < 0) return 0;
    const uint32_t bits = __float_as_uint(logit + 0.0F);  // one zero
    const uint32_t order = logit != logit ? 0xFFFFFFFFU : bits >> 31 != 0 ? ~bits : bits | 0x80000000U;
    return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(index);
  }
};

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ inline float highest_of_pack(const uint4& words) {
  const auto pair = [](const uint32_t& word) { return *reinterpret_cast<const Pair<T>*>(&word); };
  const Pair<T> all = __hmax2_nan(__hmax2_nan(pair(words.x), pair(words.y)), __hmax2_nan(pair(words.z), pair(words.w)));
  return to_float(__hmax_nan(all.x, all.y));
}

__device__ inline uint64_t highest_of_warp(uint64_t best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, best, offset);
    best = other > best ? other : best;
  }
  return best;
}

// The best of all blocks of this one's cluster, in thread 0 of the first, of what thread 0 of each has. All of
// them have arrived at its barrier before, which says that they run.
__device__ inline uint64_t highest_of_cluster(uint64_t best, int block) {
#if __CUDA_ARCH__ >= 900
  __shared__ uint64_t of_block[kBlocks];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_wait();
  if (threadIdx.x == 0) *cluster.map_shared_rank(of_block + block, 0) = best;
  cluster.sync();
  if (block == 0 && threadIdx.x < 32) best = highest_of_warp(threadIdx.x < kBlocks ? of_block[threadIdx.x] : 0);
#endif
  return best;
}

// A block or a cluster of them a row: whole packs where they are aligned, single logits before and behind them.
template <class T>
__global__ void __launch_bounds__(kThreads) argmax_kernel(const ArgmaxArgs args) {
  __shared__ uint64_t of_warp[kThreads / 32];
  const int blocks = static_cast<int>(gridDim.y);
  const int block = static_cast<int>(blockIdx.y);
  const int threads = static_cast<int>(blockDim.x) * blocks;
  const int thread = static_cast<int>(blockDim.x) * block + static_cast<int>(threadIdx.x);
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) cooperative_groups::this_cluster().barrier_arrive();
#endif
  wait_for_predecessors();
  launch_dependents();
  const int64_t row = blockIdx.x;
  int64_t count = 0;
  int64_t position = 0;
  if (thread == 0) {
    count = args.counts[row];
    position = args.positions[row];
  }
  const T* const logits = static_cast<const T*>(args.logits) + row * args.ld;
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(logits) / sizeof(T) % kPack);
  const int before = min((kPack - misaligned) % kPack, args.vocabulary);
  const int packs = (args.vocabulary - before) / kPack;
  const auto* const middle = reinterpret_cast<const uint4*>(logits + before);
  Likeliest mine;
  if (thread < before) mine.take(to_float(logits[thread]), thread);
  constexpr int kAtOnce = 4;
  int best_pack = -1;  // the pack that holds the likeliest so far
#pragma unroll 1
  for (int first = thread; first < packs; first += kAtOnce * threads) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) loaded[i] = middle[min(first + i * threads, packs - 1)];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int pack = min(first + i * threads, packs - 1);  // the last one again, if need be
      if (mine.take(highest_of_pack<T>(loaded[i]), before + pack * kPack)) best_pack = pack;
    }
  }
  if (best_pack >= 0) {  // which of its eight
    Likeliest of_pack;
    for (int j = 0; j < kPack; ++j)
      of_pack.take(to_float(logits[before + best_pack * kPack + j]), before + best_pack * kPack + j);
    mine = of_pack;
  }
  const int behind = before + packs * kPack + thread;
  if (behind < args.vocabulary) mine.take(to_float(logits[behind]), behind);
  uint64_t best = highest_of_warp(mine.rank());
  const unsigned own = threadIdx.x;
  if (own % 32 == 0) of_warp[own / 32] = best;
  __syncthreads();
  if (own < 32) best = highest_of_warp(own < blockDim.x / 32 ? of_warp[own] : 0);
  if (blocks > 1) best = highest_of_cluster(best, block);
  if (thread != 0) return;
  const int64_t token = static_cast<int64_t>(~static_cast<uint32_t>(best));
  args.ids[row] = token;
  args.history[row * args.history_ld + count] = token;
  args.counts[row] = count + 1;
  args.positions[row] = position + args.advance;
}

}  // namespace

void argmax(const ArgmaxArgs& args, int device, Stream stream) {
  if (args.batch == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const void* kernel = args.type == DType::kFloat16 ? reinterpret_cast<const void*>(argmax_kernel<__half>)
                                                    : reinterpret_cast<const void*>(argmax_kernel<__nv_bfloat16>);
  const Capability& capability = device_capability(device);
  const bool clusters = capability.compute_capability == 90 && capability.kernels_sm90a;
  const unsigned blocks = clusters ? kBlocks : 1;
  ArgmaxArgs kernel_args = args;
  launch_kernel("argmax", kernel, dim3(static_cast<unsigned>(args.batch), blocks),
                dim3(clusters ? kThreads / 4 : kThreads), 0, dim3(1, blocks), is_chained(cuda_stream, device),
                &kernel_args, cuda_stream);
}

}  // namespace octofuse
