// Few tokens take one kernel in front of the int8 product; more take three: quantise, gather, multiply.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/align.h"
#include "device/launch.h"
#include "octofuse/device.h"
#include "octofuse/error.h"
#include "outliers/few.cuh"
#include "outliers/product.cuh"
#include "outliers/quantize.cuh"

namespace octofuse {
namespace outliers {
namespace {

constexpr int kKept = 4;  // packs of a thread

unsigned blocks(int64_t extent, int of_block) { return static_cast<unsigned>(ceil_div(extent, of_block)); }

template <class Args>
void launch(const char* name, void (*kernel)(Args), dim3 grid, int threads, bool chained, Args args,
            cudaStream_t stream) {
  launch_kernel(name, reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(threads)), 0, dim3(1),
                chained, &args, stream);
}

template <class T>
auto quantize_kernel_for(int64_t k, bool wide) {
  if (!wide || k > int64_t{kThreads} * kPack * 2 * kKept) return quantize_kernel<T, 0>;
  return k > int64_t{kThreads} * kPack * kKept ? quantize_kernel<T, 2 * kKept> : quantize_kernel<T, kKept>;
}

template <class T>
void run(OutlierArgs given, int device, cudaStream_t stream, const Allocator& allocate) {
  const bool wide = given.k % kPack == 0 && given.ldx % kPack == 0 && is_aligned(given.x) && is_aligned(given.q, kPack);
  if (given.m <= kFewTokens) {
    const auto most = static_cast<unsigned>(device_capability(device).sm_count);
    return launch("outliers_few", wide ? few_kernel<T, true> : few_kernel<T, false>,
                  dim3(std::min(blocks(given.n, kFewChannels), most)), kFewThreads, is_chained(stream, device), given,
                  stream);
  }
  const auto words = static_cast<size_t>(ceil_div(given.k, 32));
  ProductArgs args{given, nullptr, nullptr, nullptr, nullptr};
  args.of.mask = static_cast<uint32_t*>(allocate(words * 4));
  args.x = allocate(static_cast<size_t>(kMostGathered * given.m) * sizeof(T));
  args.w = allocate(static_cast<size_t>(kMostGathered * given.n) * sizeof(T));
  args.columns = static_cast<int*>(allocate(static_cast<size_t>(given.k) * 4));
  args.count = static_cast<int*>(allocate(4));
  if (cudaMemsetAsync(args.of.mask, 0, words * 4, stream) != cudaSuccess) {
    throw RuntimeError("outlier_product: could not clear its mask");
  }
  launch("outliers_quantize", quantize_kernel_for<T>(given.k, wide), dim3(static_cast<unsigned>(given.m)), kThreads,
         false, args.of, stream);
  launch("outliers_gather", gather_kernel<T>, dim3(blocks(given.m + given.n, kGatherRows)), kGatherThreads, false, args,
         stream);
  launch("outliers_product", tile_kernel<T>, dim3(blocks(given.m, kTile), blocks(given.n, kTile)), kTileThreads, false,
         args, stream);
}

}  // namespace
}  // namespace outliers

void outlier_product(const OutlierArgs& args, int device, Stream stream, const Allocator& allocate) {
  if (args.m == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.type == DType::kFloat16) return outliers::run<__half>(args, device, cuda_stream, allocate);
  outliers::run<__nv_bfloat16>(args, device, cuda_stream, allocate);
}

}  // namespace octofuse
