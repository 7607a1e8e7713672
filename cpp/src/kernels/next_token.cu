// The two ends of a decoding step: tokens to rows, and logits to tokens.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "kernels/launch.h"
#include "kernels/rows.cuh"
#include "octofuse/decode.h"

namespace octofuse {
namespace {

using rows::kPack;
using rows::Pack;

constexpr int kEmbedThreads = 128;
constexpr int kChooseThreads = 1024;
constexpr int kParts = 8;  // blocks that share a row of logits, where a cluster of them can

template <class T>
__global__ void __launch_bounds__(kEmbedThreads) embed_kernel(const EmbedArgs args) {
  // In this order: attention reads places before earlier kernels have finished, but not before the choice that set
  // them.
  wait_for_earlier_kernels();
  let_later_kernels_start();
  const int64_t row = blockIdx.x;
  const auto* token = reinterpret_cast<const Pack<T>*>(static_cast<const T*>(args.tokens) + args.ids[row] * args.width);
  const auto* position =
      reinterpret_cast<const Pack<T>*>(static_cast<const T*>(args.positions) + args.places[row] * args.width);
  auto* out = reinterpret_cast<Pack<T>*>(static_cast<T*>(args.out) + row * args.width);
  for (int i = static_cast<int>(threadIdx.x); i < args.width / kPack; i += kEmbedThreads) {
    Pack<float> sum = rows::widen(token[i]);
    const Pack<float> other = rows::widen(position[i]);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum.values[j] = __fadd_rn(sum.values[j], other.values[j]);
    out[i] = rows::narrow<T>(sum);
  }
}

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
    const uint64_t other = __shfl_xor_sync(rows::kWarp, best, offset);
    best = other > best ? other : best;
  }
  return best;
}

// The best of all blocks of this one's cluster, in thread 0 of the first, of what thread 0 of each has. All of
// them have arrived at its barrier before, which says that they run.
__device__ inline uint64_t highest_of_cluster(uint64_t best, int part) {
#if __CUDA_ARCH__ >= 900
  __shared__ uint64_t of_part[kParts];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_wait();
  if (threadIdx.x == 0) *cluster.map_shared_rank(of_part + part, 0) = best;
  cluster.sync();
  if (part == 0 && threadIdx.x < 32) best = highest_of_warp(threadIdx.x < kParts ? of_part[threadIdx.x] : 0);
#endif
  return best;
}

// A block or a cluster of them a row: whole packs where they are aligned, single logits before and behind them.
template <class T>
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const ChooseArgs args) {
  __shared__ uint64_t of_warp[kChooseThreads / 32];
  const int parts = static_cast<int>(gridDim.y);
  const int part = static_cast<int>(blockIdx.y);
  const int threads = static_cast<int>(blockDim.x) * parts;
  const int thread = static_cast<int>(blockDim.x) * part + static_cast<int>(threadIdx.x);
#if __CUDA_ARCH__ >= 900
  if (parts > 1) cooperative_groups::this_cluster().barrier_arrive();
#endif
  wait_for_earlier_kernels();
  let_later_kernels_start();
  const int64_t row = blockIdx.x;
  int64_t count = 0;
  int64_t place = 0;
  if (thread == 0) {
    count = args.counts[row];
    place = args.places[row];
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
  if (parts > 1) best = highest_of_cluster(best, part);
  if (thread != 0) return;
  const int64_t chosen = static_cast<int64_t>(~static_cast<uint32_t>(best));
  args.ids[row] = chosen;
  args.history[row * args.history_ld + count] = chosen;
  args.counts[row] = count + 1;
  args.places[row] = place + args.advance;
}

template <class Args>
void launch(const char* name, const void* kernel, int threads, unsigned parts, Args args, int device, Stream stream) {
  if (args.batch == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  launch_kernel(name, kernel, dim3(static_cast<unsigned>(args.batch), parts), dim3(static_cast<unsigned>(threads)), 0,
                dim3(1, parts), is_chained(cuda_stream, device), &args, cuda_stream);
}

}  // namespace

void embed(const EmbedArgs& args, int device, Stream stream) {
  const void* kernel = args.type == DType::kFloat16 ? reinterpret_cast<const void*>(embed_kernel<__half>)
                                                    : reinterpret_cast<const void*>(embed_kernel<__nv_bfloat16>);
  launch("embed", kernel, kEmbedThreads, 1, args, device, stream);
}

void choose(const ChooseArgs& args, int device, Stream stream) {
  const void* kernel = args.type == DType::kFloat16 ? reinterpret_cast<const void*>(choose_kernel<__half>)
                                                    : reinterpret_cast<const void*>(choose_kernel<__nv_bfloat16>);
  const Capability& capability = device_capability(device);
  const bool clusters = capability.compute_capability == 90 && capability.kernels_sm90a;
  const unsigned parts = clusters ? kParts : 1;
  launch("choose", kernel, clusters ? kChooseThreads / 4 : kChooseThreads, parts, args, device, stream);
}

}  // namespace octofuse
