// Which low-bit kernel takes a call.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/lowbit_kernels.h"
#include "kernels/lowbit_shape.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

// From more on a weight that is dequantised once and cuBLAS are faster (measured from 768 x 768 to 28672 x 8192): to
// write it costs as many bytes again and again, but many tiles of tokens each make their weights themselves.
int most_tokens(const LowbitArgs& args) {
  if (lowbit::Shape::is_split_by_4(args.n, (args.k + 127) / 128)) return 128;
  const bool planes = args.format == LowbitFormat::kPlanes;
  const int64_t several = int64_t{args.n} * args.k >> (planes ? 18 : 17);
  return static_cast<int>(std::clamp<int64_t>(several, 256, planes ? 512 : 1024));
}

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
