// Tokens to the rows that the first block of a model reads.
#include <cuda_runtime.h>

#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/decode.h"
#include "octofuse/device.h"
#include "rows/reduce.cuh"

namespace octofuse {
namespace {

using rows::kPack;
using rows::Pack;

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) embed_kernel(const EmbedArgs args) {
  // In this order: attention reads `positions` before earlier kernels have finished, but never before the argmax that
  // has set them, since nothing behind this kernel starts before it has waited for that one.
  wait_for_predecessors();
  launch_dependents();
  const int64_t row = blockIdx.x;
  const auto* token =
      reinterpret_cast<const Pack<T>*>(static_cast<const T*>(args.token_embeddings) + args.ids[row] * args.width);
  const bool placed = args.position_embeddings != nullptr;
  const auto* position = reinterpret_cast<const Pack<T>*>(static_cast<const T*>(args.position_embeddings) +
                                                          (placed ? args.positions[row] * args.width : 0));
  auto* out = reinterpret_cast<Pack<T>*>(static_cast<T*>(args.out) + row * args.width);
  for (int i = static_cast<int>(threadIdx.x); i < args.width / kPack; i += kThreads) {
    Pack<float> sum = rows::widen(token[i]);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum.values[j] = __fmul_rn(sum.values[j], args.multiplier);
    if (placed) {
      const Pack<float> other = rows::widen(position[i]);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum.values[j] = __fadd_rn(sum.values[j], other.values[j]);
    }
    out[i] = rows::narrow<T>(sum);
  }
}

}  // namespace

void embed(const EmbedArgs& args, int device, Stream stream) {
  if (args.batch == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const void* kernel = args.type == DType::kFloat16 ? reinterpret_cast<const void*>(embed_kernel<__half>)
                                                    : reinterpret_cast<const void*>(embed_kernel<__nv_bfloat16>);
  EmbedArgs kernel_args = args;
  launch_kernel("embed", kernel, dim3(static_cast<unsigned>(args.batch)), dim3(kThreads), 0, dim3(1),
                is_chained(cuda_stream, device), &kernel_args, cuda_stream);
}

}  // namespace octofuse
