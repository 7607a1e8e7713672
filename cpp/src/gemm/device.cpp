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
    const auto attribute = [device](cudaDeviceAttr which) {
      int value = 0;
      const cudaError_t status = cudaDeviceGetAttribute(&value, which, device);
      if (status != cudaSuccess) {
        throw RuntimeError("cuda:" + std::to_string(device) + ": " + cudaGetErrorString(status));
      }
      return value;
    };
    Capability capability =
        capability_for(attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor),
                       attribute(cudaDevAttrMultiProcessorCount));
    // kHz and bits; two transfers a clock.
    const double bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
    capability.bandwidth = 2.0 * attribute(cudaDevAttrMemoryClockRate) * bits / 8 / 1e6;
    capability.shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    capability.whole_shared_memory = capability.shared_memory;
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
