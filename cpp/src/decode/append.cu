// The tokens of prompts: their queries and keys are normalised and rotated in place, and keys and values go into the
// cache. A block a token, a warp a head.
#include <cuda_runtime.h>

#include "decode/heads.cuh"
#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

using namespace decode;

constexpr int kWarps = 8;

struct AppendArgs {
  HeadsArgs heads;
  const int64_t* first;  // position of each sequence's first token; nullptr: 0
};

template <class T, CacheType kCache, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps) append_kernel(const __grid_constant__ AppendArgs all) {
  const HeadsArgs& args = all.heads;
  __shared__ float scratch[kWarps][kBlocks * kBlockChannels];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t token = blockIdx.x;
  const int64_t sequence = token / args.tokens;
  wait_for_predecessors();
  launch_dependents();
  const int64_t position = token % args.tokens + (all.first == nullptr ? 0 : all.first[sequence]);
  if (position < 0 || position >= args.capacity) return;
  const Preparation<T, kBlocks> preparation(args, position, lane);
  const int heads = args.queries + 2 * args.pairs;
#pragma unroll 1
  for (int row = warp; row < heads; row += kWarps) {
    const bool query = row < args.queries;
    const bool value = row >= args.queries + args.pairs;
    const int head = query ? row : (row - args.queries) % args.pairs;
    const HeadView& view = query ? args.q : value ? args.v : args.k;
    T* const own = static_cast<T*>(view.data) + token * view.row + head * view.head;
    if (query && args.query_norm == nullptr && args.rotary == 0) continue;
    float v[kOfLane<kBlocks>];
    load_head<T, kBlocks>(own, args.head_size, lane, v);
    if (!value) {
      preparation.apply(query, scratch[warp], v);
      store_head<T, CacheType::kFloat, kBlocks>(v, args.head_size, lane, 0.0F, own, nullptr);
    }
    if (query) continue;
    const int64_t at = (sequence * args.pairs + head) * args.capacity + position;
    auto* const cache = static_cast<Stored<T, kCache>*>(value ? args.values : args.keys) + at * args.head_size;
    const float fixed = value ? args.value_scale : args.key_scale;
    const float scale = store_head<T, kCache, kBlocks>(v, args.head_size, lane, fixed, cache, nullptr);
    if (kCache != CacheType::kFloat && lane == 0) (value ? args.value_scales : args.key_scales)[at] = scale;
  }
}

template <class T, CacheType kCache>
const void* kernel_for(int size) {
  if (size <= kBlockChannels) return reinterpret_cast<const void*>(append_kernel<T, kCache, 1>);
  if (size <= 2 * kBlockChannels) return reinterpret_cast<const void*>(append_kernel<T, kCache, 2>);
  return reinterpret_cast<const void*>(append_kernel<T, kCache, 4>);
}

template <class T>
const void* kernel_for(const HeadsArgs& args) {
  if (args.cache == CacheType::kInt8) return kernel_for<T, CacheType::kInt8>(args.head_size);
  if (args.cache == CacheType::kFloat8) return kernel_for<T, CacheType::kFloat8>(args.head_size);
  return kernel_for<T, CacheType::kFloat>(args.head_size);
}

}  // namespace

void append(const HeadsArgs& heads, const int64_t* first, int device, Stream stream) {
  if (heads.batch == 0 || heads.tokens == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  AppendArgs args{heads, first};
  const void* kernel = heads.type == DType::kFloat16 ? kernel_for<__half>(heads) : kernel_for<__nv_bfloat16>(heads);
  launch_kernel("append", kernel, dim3(static_cast<unsigned>(int64_t{heads.batch} * heads.tokens)), dim3(32 * kWarps),
                0, dim3(1), is_chained(cuda_stream, device), &args, cuda_stream);
}

}  // namespace octofuse
