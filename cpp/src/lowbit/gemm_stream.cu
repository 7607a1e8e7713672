// 5 to 64 tokens in fp16 or bf16 beside many channels (gemm_stream.cuh).
#include "lowbit/gemm_stream.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

template <LowbitFormat kFormat, int kBits, DType kType>
GemmKernel kernel_for(int64_t m) {
  switch (stream_tokens(m)) {
    case 16:
      return stream_kernel_of<StreamTraits<kFormat, kBits, kType, 16>>();
    case 32:
      return stream_kernel_of<StreamTraits<kFormat, kBits, kType, 32>>();
    case 48:
      return stream_kernel_of<StreamTraits<kFormat, kBits, kType, 48>>();
    default:
      return stream_kernel_of<StreamTraits<kFormat, kBits, kType, 64>>();
  }
}

}  // namespace

void run_gemm_stream(const LowbitArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  GemmKernel kernel{};
  with_format(args, [&](auto format) {
    using Format = decltype(format);
    kernel = args.type == DType::kFloat16 ? kernel_for<Format::kFormat, Format::kBits, DType::kFloat16>(args.m)
                                          : kernel_for<Format::kFormat, Format::kBits, DType::kBFloat16>(args.m);
  });
  launch_gemm_stream(args, kernel, device, stream, allocate);
}

}  // namespace octofuse::lowbit
