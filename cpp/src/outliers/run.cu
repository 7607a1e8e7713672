// Outliers of many tokens: their columns gathered, and for other devices multiplied in a second kernel.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/launch.h"
#include "octofuse/device.h"
#include "octofuse/outliers.h"
#include "outliers/gather.cuh"
#include "outliers/product.cuh"

namespace octofuse {
namespace outliers {
namespace {

unsigned blocks(int64_t extent, int64_t of_block) { return static_cast<unsigned>(ceil_div(extent, of_block)); }

OutlierColumns operands_of(const OutlierArgs& args) {
  OutlierColumns columns;
  columns.type = args.type;
  columns.x = args.x;
  columns.ldx = args.ldx;
  columns.w = args.w;
  columns.ldw = args.k;
  return columns;
}

template <class T>
const void* gather_kernel_of(const OutlierArgs& args) {
  const int64_t packs = ceil_div(args.k, int64_t{kPack} * kRowThreads);  // of a thread
  if (!is_wide(args)) return reinterpret_cast<const void*>(gather_kernel<T, false, 0>);
  if (packs <= 4) return reinterpret_cast<const void*>(gather_kernel<T, true, 4>);
  if (packs <= 14) return reinterpret_cast<const void*>(gather_kernel<T, true, 14>);
  return reinterpret_cast<const void*>(gather_kernel<T, true, 0>);
}

template <class T>
OutlierColumns gather(const OutlierArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  const auto make = [&](int64_t count, size_t size) { return allocate(static_cast<size_t>(count) * size); };
  GatherArgs gather{args, {}, nullptr, static_cast<int>(ceil_div(args.k, 32)), 0};
  gather.mask = static_cast<uint32_t*>(make(gather.words, sizeof(uint32_t)));
  gather.to.count = static_cast<int*>(make(1, sizeof(int)));
  gather.to.columns = static_cast<int*>(make(args.k, sizeof(int)));
  gather.to.x = make(args.m * kMostGathered, sizeof(T));
  const void* const kernel = gather_kernel_of<T>(args);
  const bool chained = is_chained(stream, device);
  // Where a process may use only a part of the device, fewer blocks run at once than it has SMs.
  bool launched = false;
  for (int64_t most = device_capability(device).sm_count; !launched; most /= 2) {
    if (most == 0) throw_launch_error("outliers_gather", "no block of it fits the device");
    gather.rows_of_block = ceil_div(args.m, most);
    launched = launch_cooperative("outliers_gather", kernel, dim3(blocks(args.m, gather.rows_of_block)), dim3(kThreads),
                                  chained, &gather, stream);
  }
  OutlierColumns columns = operands_of(args);
  columns.count = gather.to.count;
  columns.columns = gather.to.columns;
  columns.x_gathered = gather.to.x;
  return columns;
}

template <class T>
void multiply(const ProductArgs& args, cudaStream_t stream) {
  const dim3 grid(blocks(args.n, kProductChannels), std::min(blocks(args.m, kProductTokens), 65535U));
  ProductArgs given = args;
  launch_kernel("outliers_product", reinterpret_cast<const void*>(product_kernel<T>), grid, dim3(kProductThreads), 0,
                dim3(1), false, &given, stream);
}

}  // namespace
}  // namespace outliers

Outliers outliers_of_kernels(int64_t m, int device) {
  const Capability& capability = device_capability(device);
  if (capability.compute_capability != 90 || !capability.kernels_sm90a) return Outliers::kNone;
  return m <= kMostDigitTokens ? Outliers::kDigits : Outliers::kGathered;
}

OutlierColumns gather_outliers(const OutlierArgs& args, int device, Stream stream, const Allocator& allocate) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return args.type == DType::kFloat16 ? outliers::gather<__half>(args, device, cuda_stream, allocate)
                                      : outliers::gather<__nv_bfloat16>(args, device, cuda_stream, allocate);
}

void outlier_product(const OutlierArgs& args, const OutlierColumns& columns, const ScaleView& w_scale, void* out,
                     int device, Stream stream) {
  const DeviceGuard guard(device);
  const outliers::ProductArgs product{columns, w_scale, out, static_cast<int>(args.m), static_cast<int>(args.n)};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.type == DType::kFloat16) return outliers::multiply<__half>(product, cuda_stream);
  outliers::multiply<__nv_bfloat16>(product, cuda_stream);
}

}  // namespace octofuse
