// Which low-bit kernel takes a call.
#include <cuda_runtime_api.h>

#include "kernels/lowbit_kernels.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

// From more on a weight that is dequantised once and cuBLAS are faster (measured): sooner where blocks are few.
int most_tokens(const LowbitArgs& args) { return args.n <= lowbit::kFewRows ? 128 : 256; }

enum class Kernel { kNone, kGemv, kGemvBits, kGemm };

Kernel kernel_of(const LowbitArgs& args, int device) {
  const Capability& capability = device_capability(device);
  if (capability.kernels_mma && lowbit::takes_gemv_bits(args, device)) return Kernel::kGemvBits;
  if (capability.kernels_mma && lowbit::takes_gemv(args, device)) return Kernel::kGemv;
  const bool few = args.m <= most_tokens(args);
  return few && capability.kernels_sm90a && lowbit::takes_gemm(args) ? Kernel::kGemm : Kernel::kNone;
}

}  // namespace

bool takes_lowbit(const LowbitArgs& args, int device) { return kernel_of(args, device) != Kernel::kNone; }

void lowbit_linear(const LowbitArgs& args, int device, Stream stream) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (kernel_of(args, device)) {
    case Kernel::kGemvBits:
      return lowbit::run_gemv_bits(args, device, cuda_stream);
    case Kernel::kGemv:
      return lowbit::run_gemv(args, device, cuda_stream);
    default:
      return lowbit::run_gemm(args, device, cuda_stream);
  }
}

}  // namespace octofuse
