#include "outliers/measure.cuh"

#include "device/chain.cuh"

namespace octofuse::outliers {
namespace {

// A warp has a row, a lane eight columns of it.
template <class T, bool kWide>
__global__ void __launch_bounds__(kMeasureThreads) measure_kernel(const __grid_constant__ MeasureArgs args) {
  constexpr int kAhead = 4;  // rows on their way at once
  constexpr int kWarps = kMeasureThreads / 32;
  constexpr int kWords = kPartColumns / 32;
  __shared__ uint32_t mask[kWords];
  const int thread = static_cast<int>(threadIdx.x);
  const int pack = static_cast<int>(blockIdx.x) * 32 + thread % 32;
  const int k = static_cast<int>(args.of.k);
  const int64_t end = min(args.of.m, static_cast<int64_t>(blockIdx.y + 1) * args.rows_of_group);
  const bool inside = pack < (k + kPack - 1) / kPack;
  if (thread < kWords) mask[thread] = 0;
  __syncthreads();
  launch_dependents();
  wait_for_predecessors();
#pragma unroll 1
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * args.rows_of_group + thread / 32; row < end;
       row += kAhead * kWarps) {
    Pack<T> packs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = row + i * kWarps;
      const T* const x = static_cast<const T*>(args.of.x) + at * args.of.ldx;
      if (inside && at < end) packs[i] = load_pack<T, kWide>(x, pack, k);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = row + i * kWarps;
      if (at >= end) break;
      Magnitudes<T> magnitudes(args.of.threshold);
      if (inside) {
        const PackOutliers<T> outliers = magnitudes.take(packs[i]);
        if (outliers.any()) mark_pack(outliers.bits(), pack % 32, mask);
      }
      const uint32_t largest_below = __reduce_max_sync(kFullWarp, __float_as_uint(magnitudes.below.value()));
      if (thread % 32 == 0) args.below[blockIdx.x * args.of.m + at] = largest_below;
      const uint32_t largest = __reduce_max_sync(kFullWarp, __float_as_uint(magnitudes.most.value()));
      if (thread % 32 == 0) args.most[blockIdx.x * args.of.m + at] = largest;
    }
  }
  __syncthreads();
  const int word = static_cast<int>(blockIdx.x) * kWords + thread;
  if (thread < kWords && word < args.words) args.masks[blockIdx.y * args.words + word] = mask[thread];
  if (thread >= 32) return;
  const uint32_t any = __reduce_or_sync(kFullWarp, thread < kWords ? mask[thread] : 0);
  if (thread == 0) args.any[blockIdx.y * gridDim.x + blockIdx.x] = any;
}

}  // namespace

void measure(const MeasureArgs& args, bool wide, bool chained, cudaStream_t stream) {
  const auto kernel_of = [&](auto type) {
    using T = decltype(type);
    return wide ? reinterpret_cast<const void*>(measure_kernel<T, true>)
                : reinterpret_cast<const void*>(measure_kernel<T, false>);
  };
  const void* const kernel = args.of.type == DType::kFloat16 ? kernel_of(__half()) : kernel_of(__nv_bfloat16());
  MeasureArgs given = args;
  launch_kernel("outliers_measure", kernel, dim3(static_cast<unsigned>(args.parts), static_cast<unsigned>(args.groups)),
                dim3(kMeasureThreads), 0, dim3(1), chained, &given, stream);
}

}  // namespace octofuse::outliers
