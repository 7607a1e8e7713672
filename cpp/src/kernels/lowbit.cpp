// Which low-bit kernel takes a call.
#include <cuda_runtime_api.h>

#include "kernels/lowbit_kernels.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

// From more on a weight that is dequantised once and cuBLAS are faster (measured): sooner where blocks are few.
int most_tokens(const LowbitArgs& args) { return args.n <= 4224 ? 128 : 256; }

bool takes_gemv(const LowbitArgs& args, int device) {
  return device_capability(device).kernels_mma && lowbit::takes_gemv(args, device);
}

}  // namespace

bool takes_lowbit(const LowbitArgs& args, int device) {
  return takes_gemv(args, device) ||
         (args.m <= most_tokens(args) && device_capability(device).kernels_sm90a && lowbit::takes_gemm(args));
}

void lowbit_linear(const LowbitArgs& args, int device, Stream stream) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (takes_gemv(args, device)) return lowbit::run_gemv(args, device, cuda_stream);
  lowbit::run_gemm(args, device, cuda_stream);
}

}  // namespace octofuse
