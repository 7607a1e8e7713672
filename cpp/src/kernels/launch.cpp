#include "kernels/launch.h"

#include <string>

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
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) throw_launch_error("cudaFuncSetAttribute", cudaGetErrorString(status));
  done.store(true, std::memory_order_release);
}

}  // namespace octofuse
