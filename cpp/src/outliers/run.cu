// Outliers of many tokens: their columns gathered, in two kernels, and for other devices multiplied in a third.
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

template <class Args>
void launch(const char* name, void (*kernel)(Args), dim3 grid, int threads, bool chained, Args args,
            cudaStream_t stream) {
  launch_kernel(name, reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(threads)), 0, dim3(1),
                chained, &args, stream);
}

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
OutlierColumns gather(const OutlierArgs& args, int device, cudaStream_t stream, const Allocator& allocate) {
  constexpr int64_t kWeightRows = kThreads / 8;
  const auto make = [&](int64_t count, size_t size) { return allocate(static_cast<size_t>(count) * size); };
  GatherArgs gather{MeasureArgs(args, false, allocate), args, {}, 0, 0, 0};
  gather.to.count = static_cast<int*>(make(1, sizeof(int)));
  gather.to.columns = static_cast<int*>(make(args.k, sizeof(int)));
  gather.to.x = make(args.m * kMostGathered, sizeof(T));
  gather.to.w = make(args.n * kMostGathered, sizeof(T));
  gather.weight_blocks = static_cast<int>(blocks(args.n, kWeightRows));
  // A block's list of columns takes as long as some rows.
  const int64_t slots = int64_t{4} * device_capability(device).sm_count;
  gather.threads_of_row = args.m > 4 * slots ? 32 : args.m > slots ? 128 : kThreads;
  const int64_t at_once = kThreads / gather.threads_of_row;
  gather.rows_of_block = static_cast<int>(at_once * ceil_div(args.m, slots * at_once));
  const bool wide = is_wide(args);
  const bool chained = is_chained(stream, device);
  measure(gather.found, wide, chained, stream);
  const unsigned token_blocks = blocks(args.m, gather.rows_of_block);
  launch("outliers_gather", wide ? gather_kernel<T, true> : gather_kernel<T, false>,
         dim3(static_cast<unsigned>(gather.weight_blocks) + token_blocks), kThreads, chained, gather, stream);
  OutlierColumns columns = operands_of(args);
  columns.count = gather.to.count;
  columns.columns = gather.to.columns;
  columns.x_gathered = gather.to.x;
  columns.w_gathered = gather.to.w;
  return columns;
}

template <class T>
void multiply(const ProductArgs& args, cudaStream_t stream) {
  const dim3 grid(blocks(args.n, kProductChannels), std::min(blocks(args.m, kProductTokens), 65535U));
  launch("outliers_product", product_kernel<T>, grid, kProductThreads, false, args, stream);
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
