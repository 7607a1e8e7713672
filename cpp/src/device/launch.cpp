#include "device/launch.h"

#include <algorithm>
#include <string>

#include "octofuse/device.h"
#include "octofuse/error.h"

namespace octofuse {

void throw_launch_error(const char* kernel, const char* reason) {
  throw RuntimeError(std::string(kernel) + ": launch failed: " + reason);
}

void check_launch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) throw_launch_error(kernel, cudaGetErrorString(status));
}

void allow_shared_memory(const void* kernel, int bytes, int device, DeviceFlags& raised) {
  std::atomic<bool>& done = raised.at(static_cast<size_t>(device));
  if (done.load(std::memory_order_acquire)) return;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  // The driver's own choice leaves room for one block of a kernel, and its clusters then run in waves.
  if (status == cudaSuccess) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (status != cudaSuccess) throw_launch_error("cudaFuncSetAttribute", cudaGetErrorString(status));
  done.store(true, std::memory_order_release);
}

namespace {

std::atomic<bool> overlap_allowed{true};

// The largest window of addresses that a launch may give a policy for; 0: none.
int64_t largest_window() {
  static std::array<std::atomic<int64_t>, std::tuple_size_v<DeviceFlags>> known{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  std::atomic<int64_t>& bytes = known.at(static_cast<size_t>(device));
  if (bytes.load(std::memory_order_relaxed) == 0) {
    int value = 0;
    cudaDeviceGetAttribute(&value, cudaDevAttrMaxAccessPolicyWindowSize, device);
    bytes.store(value == 0 ? -1 : value, std::memory_order_relaxed);
  }
  return std::max<int64_t>(0, bytes.load(std::memory_order_relaxed));
}

}  // namespace

bool allow_overlap(bool allowed) { return overlap_allowed.exchange(allowed); }

bool is_chained(cudaStream_t stream, int device) {
  if (!overlap_allowed.load(std::memory_order_relaxed) || !device_capability(device).kernels_sm90a) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}

void launch_kernel(const char* name, const void* function, dim3 grid, dim3 block, int shared_bytes, dim3 cluster,
                   bool overlap, void* args, cudaStream_t stream, ReadOnce weights) {
  cudaLaunchAttribute attributes[4];
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (cluster.x * cluster.y * cluster.z > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster.x;
    attribute.val.clusterDim.y = cluster.y;
    attribute.val.clusterDim.z = cluster.z;
  }
  if (overlap) {
#if CUDART_VERSION >= 13000
    // An SM takes a kernel that wants another split of its memory only when it has become idle. Where it takes several
    // blocks one after the other, a larger cache counts for more.
    constexpr unsigned kFewBlocks = 264;
    if (grid.x * grid.y * grid.z <= kFewBlocks) {
      cudaLaunchAttribute& split = attributes[config.numAttrs++];
      split.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
      split.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    }
#endif
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    const int64_t window = std::min(weights.bytes, largest_window());
    if (window > 0) {
      cudaLaunchAttribute& policy = attributes[config.numAttrs++];
      policy.id = cudaLaunchAttributeAccessPolicyWindow;
      policy.val.accessPolicyWindow = {const_cast<void*>(weights.data), static_cast<size_t>(window), 1.0F,
                                       cudaAccessPropertyStreaming, cudaAccessPropertyNormal};
    }
  }
  void* pointers[] = {args};
  const cudaError_t status = cudaLaunchKernelExC(&config, function, pointers);
  if (status != cudaSuccess) throw_launch_error(name, cudaGetErrorString(status));
}

bool launch_cooperative(const char* name, const void* function, dim3 grid, dim3 block, bool overlap, void* args,
                        cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = overlap ? 2 : 1;
  void* pointers[] = {args};
  const cudaError_t status = cudaLaunchKernelExC(&config, function, pointers);
  if (status == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // it would be taken for that of a later launch
    return false;
  }
  if (status != cudaSuccess) throw_launch_error(name, cudaGetErrorString(status));
  return true;
}

}  // namespace octofuse
