#include "octofuse/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>

#include "gemm/cublaslt/api.h"
#include "octofuse/error.h"
#include "octofuse/gemm.h"

namespace octofuse {

int toolkit_version() { return CUDART_VERSION; }

const char* cutlass_version() { return OCTOFUSE_CUTLASS_VERSION; }

CublasLtStatus cublaslt_status() {
  const cublaslt::Api& api = cublaslt::api();
  return {api.loaded(), api.why_not, api.path, api.loaded() ? api.cublasLtGetVersion() : 0};
}

namespace {

Capability& known_capability(int device) {
  static std::array<Capability, 64> known;
  static std::array<std::once_flag, 64> once;
  std::call_once(once.at(static_cast<size_t>(device)), [device] {
    int major = 0;
    int minor = 0;
    int sms = 0;
    int shared_memory = 0;
    cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (status == cudaSuccess) {
      status = cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (status != cudaSuccess) {
      throw RuntimeError("cuda:" + std::to_string(device) + ": " + cudaGetErrorString(status));
    }
    Capability capability = capability_for(major * 10 + minor, sms);
    capability.shared_memory = shared_memory;
    capability.cublaslt = cublaslt::api().loaded();
    capability.cublaslt_why = cublaslt::api().why_not;
    known.at(static_cast<size_t>(device)) = capability;
  });
  return known.at(static_cast<size_t>(device));
}

}  // namespace

const Capability& device_capability(int device) { return known_capability(device); }

void set_tuned(int device, TunedTable table) {
  // Kept for ever: another thread may be reading the table before.
  known_capability(device).tuned = new TunedTable(std::move(table));
}

int limit_shared_memory(int device, int bytes) { return std::exchange(known_capability(device).shared_memory, bytes); }

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current != device) {
    previous_ = current;
    cudaSetDevice(device);
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace octofuse
