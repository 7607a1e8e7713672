// Which low-bit kernel takes a call.
#include <cuda_runtime_api.h>

#include "kernels/lowbit_kernels.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

// A launch's: with more the codes would be read again, and a weight that is dequantised once costs no more (measured).
constexpr int kMostTokens = 64;

bool has_wgmma(const LowbitArgs& args, int device) { return !args.mma_sync && device_capability(device).kernels_sm90a; }

}  // namespace

// The kernels ask for up to 226 KB of shared memory a block, which other chips that they are built for do not have.
bool takes_lowbit(const LowbitArgs& args, int device) {
  const Capability& capability = device_capability(device);
  return args.m <= kMostTokens && capability.compute_capability == 90 && capability.kernels_mma;
}

size_t lowbit_scratch(const LowbitArgs& args, int device) {
  if (lowbit::takes_gemv(args)) return 0;
  return has_wgmma(args, device) ? lowbit::wgmma_scratch(args) : lowbit::gemm_scratch(args);
}

void lowbit_linear(const LowbitArgs& args, void* scratch, int device, Stream stream) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (lowbit::takes_gemv(args)) return lowbit::run_gemv(args, device, cuda_stream);
  if (has_wgmma(args, device)) return lowbit::run_wgmma(args, scratch, device, cuda_stream);
  lowbit::run_gemm(args, scratch, device, cuda_stream);
}

}  // namespace octofuse
