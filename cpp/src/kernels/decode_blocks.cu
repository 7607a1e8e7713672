// All blocks of a GPT-2 for one new token, in one kernel. At batch 1 a kernel for each part of a block is bound by what
// happens once in it: fetching its instructions, waiting for the kernel before. Here the code stays in the caches, and
// the parts hand their results on as messages (messages.cuh), without a barrier over the GPU.
//
// A block of threads an SM, all of them resident. Of each linear layer it makes a slice of the channels, whose weights
// are on their way long before (weight_ring.cuh). Every block of threads receives the whole token, and normalises and
// quantises it for itself.
#include "kernels/decode_blocks.cuh"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/launch.h"

namespace octofuse {
namespace {

using namespace decode;

constexpr int kMostShared = 220 << 10;

template <class T>
__global__ void __launch_bounds__(kThreads, 1) decode_blocks_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ int4 memory[];
  Decode<T>(args, reinterpret_cast<char*>(memory)).run();
  if (threadIdx.x != 0) return;
  // The last block to leave: nobody reads this launch's number any more.
  uint32_t* const launches = args.model.launches;
  if (atomicAdd(launches + 1, 1U) != gridDim.x - 1) return;
  launches[1] = 0;
  launches[0] += 1;
}

// An even share of the channels for every SM, in whole messages.
int channels_of_block(int n, int sm_count, int in_message) {
  const int channels = (n + sm_count - 1) / sm_count;
  return (channels + in_message - 1) / in_message * in_message;
}

KernelArgs kernel_args(const DecodeArgs& model, int sm_count) {
  KernelArgs args{};
  args.model = model;
  const int outputs[kKinds] = {3 * model.width, model.width, model.inner, model.width};
  for (int kind = 0; kind < kKinds; ++kind) {
    Shape& shape = args.shapes[kind];
    shape.n = outputs[kind];
    shape.k = kind == kOut ? model.inner : model.width;
    shape.channels = channels_of_block(shape.n, sm_count, kind == kFc ? 4 : 2);
    shape.parts = std::min(kWarps / ((shape.channels + kRows - 1) / kRows), (shape.k + kDepth - 1) / kDepth);
    shape.vectors = args.vectors;
    args.vectors += 2 * shape.n;
  }
  args.attended = 3 * model.width / 2;
  args.middle = args.attended + model.width / 2;
  args.hidden = args.middle + model.width / 2;
  args.end = args.hidden + model.inner / 2;
  args.parts = args.end + model.width / 2;
  return args;
}

template <class T>
void launch(const DecodeArgs& model, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const auto* function = reinterpret_cast<const void*>(decode_blocks_kernel<T>);
  KernelArgs args = kernel_args(model, device_capability(device).sm_count);
  int blocks = 0;  // each of them has something to send in every layer: nobody is left behind
  for (const Shape& shape : args.shapes) blocks = std::max(blocks, (shape.n + shape.channels - 1) / shape.channels);
  allow_shared_memory(function, kMostShared, device, raised);
  launch_together("decode_blocks", function, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared_bytes(model),
                  &args, stream);
}

}  // namespace

bool takes_decode_blocks(const DecodeArgs& model, int device) {
  const Capability& capability = device_capability(device);
  if (capability.compute_capability != 90 || !capability.kernels_sm90a) return false;
  if (model.width % 16 != 0 || model.inner % 16 != 0 || model.head_size % 8 != 0) return false;
  if (model.width > kRowThreads * rows::kPack || model.inner > kRowThreads * rows::kPack * kCopyPacks) return false;
  if (model.head_size > kMostHead || model.heads * model.head_size != model.width) return false;
  if (shared_bytes(model) > kMostShared) return false;
  const KernelArgs args = kernel_args(model, capability.sm_count);
  return std::all_of(std::begin(args.shapes), std::end(args.shapes), [](const Shape& shape) {
    return shape.channels <= kMostChannels && shape.channels * shape.k <= weight_ring::kBytes;
  });
}

int64_t decode_messages(const DecodeArgs& model) {
  const int64_t chunks = (model.capacity + kAttendChunk - 1) / kAttendChunk;
  return 3 * int64_t{model.width} + model.inner / 2 + model.heads * chunks * (model.head_size + 2);
}

void decode_blocks(const DecodeArgs& model, int device, Stream stream) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (model.type == DType::kFloat16) return launch<__half>(model, device, cuda_stream);
  launch<__nv_bfloat16>(model, device, cuda_stream);
}

}  // namespace octofuse
