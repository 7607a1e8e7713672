// What a device and this build can run. Querying never creates a CUDA context unless a function says so.
#pragma once

#include <cstddef>
#include <string>

namespace octofuse {

struct TunedTable;  // gemm.h

struct Capability {
  int compute_capability = 0;  // 90 for sm_90; 0: no device
  int sm_count = 0;
  double bandwidth = 0;               // GB/s of memory by its clock and width; 0: no device was asked
  int shared_memory = 0;              // bytes that a block may ask for; 0: no device was asked
  int whole_shared_memory = 0;        // the same, whatever limit_shared_memory() says
  bool kernels_sm90a = false;         // this build holds sm_90a machine code
  bool kernels_mma = false;           // this build holds mma.sync kernels that the device can load
  bool kernels_naive = false;         // this build holds any kernel that the device can load
  bool cublaslt = false;              // libcublasLt could be loaded
  std::string cublaslt_why;           // why not
  const TunedTable* tuned = nullptr;  // what was measured on this very device, if anything
};

// Which architectures this build was compiled for, for example "80,90a"; empty for a CPU-only build.
const char* built_architectures();

// What it was built with: CUDART_VERSION (0: CPU-only) and CUTLASS's version ("" likewise).
int toolkit_version();
const char* cutlass_version();

// The cuBLASLt library that this process uses, or why there is none.
struct CublasLtStatus {
  bool loaded = false;
  std::string why_not;
  std::string path;
  size_t version = 0;
};
CublasLtStatus cublaslt_status();

// What kernels of this build run on a device of this compute capability (pure: no device is asked).
Capability capability_for(int compute_capability, int sm_count);

// The capability of a device, asked once and kept. Throws RuntimeError where there is none.
const Capability& device_capability(int device);

// Whether captured kernels may overlap their predecessors (programmatic dependent launch); true at start. Returns the
// setting before.
bool allow_overlap(bool allowed);

// For tests of devices that have less: kernels that choose by it take blocks for no more than `bytes` of shared memory
// from now on. Each has to have run on the device before. Returns the limit before.
int limit_shared_memory(int device, int bytes);

// Makes `device` current for its lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace octofuse
