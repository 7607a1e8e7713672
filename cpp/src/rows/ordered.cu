// A row is normalised or activated as in pass.cuh, into shared memory, and leaves from there in its order: columns that
// are neighbours in y come from anywhere in the row. A row that is only put into order is read where it lies.
#include "rows/ordered.h"

#include "device/launch.h"
#include "rows/ordered.cuh"
#include "rows/pass.cuh"

namespace octofuse {
namespace rows {
namespace {

constexpr int kThreads = 256;

template <class T, RowOp kOp, int kPacks>
__global__ void __launch_bounds__(kThreads) ordered_kernel(const __grid_constant__ RowPassArgs args) {
  extern __shared__ int4 shared_memory[];
  __shared__ Meeting<kThreads, kMaxGroups<kThreads, kPacks>> meeting;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row_index = blockIdx.x;
  launch_dependents();
  wait_for_predecessors();
  RowPassArgs row = args;
  row.x = static_cast<const T*>(args.x) + row_index * args.ldx;
  row.y = shared_memory;
  pass_row<T, kOp, kThreads, kPacks>(row, [] { return 0.0F; }, 0, thread, meeting);
  __syncthreads();
  T* const y = static_cast<T*>(args.y) + row_index * args.cols;
  write_ordered<kThreads, (kPacks > 0)>(reinterpret_cast<const T*>(shared_memory), args.order, y,
                                        static_cast<int>(args.cols), thread);
}

// Element: an unsigned integer of a value's size.
template <class Element, bool kWide>
__global__ void __launch_bounds__(kThreads) reorder_kernel(const __grid_constant__ RowPassArgs args) {
  const int64_t row_index = blockIdx.x;
  launch_dependents();
  wait_for_predecessors();
  const Element* const x = static_cast<const Element*>(args.x) + row_index * args.ldx;
  Element* const y = static_cast<Element*>(args.y) + row_index * args.cols;
  write_ordered<kThreads, kWide>(x, args.order, y, static_cast<int>(args.cols), static_cast<int>(threadIdx.x));
}

template <class T>
const void* kernel_for(const RowPassArgs& args, bool wide) {
  const bool in_registers = wide && args.cols <= 4 * kThreads * kPack;
  if (args.norm != Norm::kNone) {
    return in_registers ? reinterpret_cast<const void*>(ordered_kernel<T, RowOp::kNorm, 4>)
                        : reinterpret_cast<const void*>(ordered_kernel<T, RowOp::kNorm, 0>);
  }
  return in_registers ? reinterpret_cast<const void*>(ordered_kernel<T, RowOp::kActivate, 4>)
                      : reinterpret_cast<const void*>(ordered_kernel<T, RowOp::kActivate, 0>);
}

template <class Element>
const void* reorder_for(bool wide) {
  return wide ? reinterpret_cast<const void*>(reorder_kernel<Element, true>)
              : reinterpret_cast<const void*>(reorder_kernel<Element, false>);
}

bool is_computed(const RowPassArgs& args) { return args.norm != Norm::kNone || args.activation != Activation::kNone; }

int shared_bytes(const RowPassArgs& args) {
  return static_cast<int>(args.cols * static_cast<int64_t>(size_of(args.type)));
}

}  // namespace

void run_ordered(const RowPassArgs& args, bool wide, bool chained, cudaStream_t stream) {
  const bool computed = is_computed(args);
  const void* kernel = nullptr;
  if (!computed) {
    kernel = size_of(args.type) == 4 ? reorder_for<uint32_t>(wide) : reorder_for<uint16_t>(wide);
  } else if (args.type == DType::kFloat16) {
    kernel = kernel_for<__half>(args, wide);
  } else if (args.type == DType::kBFloat16) {
    kernel = kernel_for<__nv_bfloat16>(args, wide);
  } else {
    kernel = kernel_for<float>(args, wide);
  }
  RowPassArgs kernel_args = args;
  launch_kernel("ordered_rows", kernel, dim3(static_cast<unsigned>(args.rows)), dim3(kThreads),
                computed ? shared_bytes(args) : 0, dim3(1), chained, &kernel_args, stream);
}

}  // namespace rows

bool orders_row(const RowPassArgs& args) {
  return !rows::is_computed(args) || args.cols <= rows::kMostShared / static_cast<int64_t>(size_of(args.type));
}

}  // namespace octofuse
