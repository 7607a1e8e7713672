// Which variant of the row pass serves a row, and its launch.
#include "rows/pass.cuh"

#include "device/launch.h"
#include "rows/ordered.h"
#include "rows/pass_chained.h"

namespace octofuse {
namespace {

using rows::RowOp;

struct RowKernel {
  const void* function;
  int threads, rows_per_block;
};

template <class T, RowOp kOp, int kThreads, int kPacks>
RowKernel kernel_of() {
  constexpr int kBlock = rows::kBlockOf<kThreads>;
  return {reinterpret_cast<const void*>(rows::row_pass_kernel<T, kOp, kThreads, kPacks>), kBlock, kBlock / kThreads};
}

constexpr int64_t kFewRows = 32;  // of a norm: they are bound by its latency, which a whole block shortens

// A warp a row where it fits: it waits for nobody. Longer rows take a block, up to 4 packs of 8 a thread (measured on
// an H200: fewer packs or more threads a row are slower at 4096 rows, and 16 packs a lane as well). A norm of many rows
// is bound by its instructions, many of them once a thread: there, fewer threads are faster. fp32 is rarer and gets
// fewer kernels, its activations fewest.
template <class T, RowOp kOp>
RowKernel kernel_for(int64_t rows, int64_t packs, bool wide) {
  constexpr bool kHalf = sizeof(T) == 2;
  if (!wide || packs > (kHalf ? 2048 : 1024)) return kernel_of<T, kOp, 256, 0>();
  if constexpr (kHalf || kOp != RowOp::kActivate) {
    if (packs <= 128 && !(kHalf && kOp == RowOp::kNorm && rows <= kFewRows)) return kernel_of<T, kOp, 32, 4>();
  }
  if constexpr (kHalf) {
    if constexpr (kOp == RowOp::kNorm) {
      if (packs <= 512 && rows >= 1024) return kernel_of<T, kOp, 128, 4>();
    }
    if (packs <= 512) return kernel_of<T, kOp, 256, 2>();
    if (packs > 1024) return kernel_of<T, kOp, 512, 4>();
  }
  return kernel_of<T, kOp, 256, 4>();
}

template <class T>
RowKernel kernel_for(const RowPassArgs& args, bool wide) {
  const int64_t packs = (args.cols + rows::kPack - 1) / rows::kPack;
  if (args.norm != Norm::kNone) return kernel_for<T, RowOp::kNorm>(args.rows, packs, wide);
  if (args.activation != Activation::kNone) return kernel_for<T, RowOp::kActivate>(args.rows, packs, wide);
  return kernel_for<T, RowOp::kCopy>(args.rows, packs, wide);
}

// Whether every pack can be accessed at once: rows of whole packs, each at a multiple of its size.
bool is_wide(const RowPassArgs& args) {
  const auto fits = [&](const void* data, int64_t ld, DType type) {
    const size_t bytes = rows::kPack * size_of(type);
    return data == nullptr ||
           (reinterpret_cast<uintptr_t>(data) % bytes == 0 && static_cast<size_t>(ld) * size_of(type) % bytes == 0);
  };
  return args.cols % rows::kPack == 0 && fits(args.x, args.ldx, args.type) &&
         fits(args.residual, args.residual_ld, args.type) && fits(args.sum, args.cols, args.type) &&
         fits(args.y, args.cols, args.type) && (args.q_group != 0 || fits(args.q, args.cols, DType::kInt8)) &&
         fits(args.weight, 0, args.affine_type) && fits(args.bias, 0, args.affine_type) &&
         fits(args.order, 0, DType::kInt32);
}

}  // namespace

void row_pass(const RowPassArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool wide = is_wide(args);
  const bool chained = is_chained(cuda_stream, device);
  if (chained && args.constants && wide && rows::run_few(args, cuda_stream)) return;
  if (args.order != nullptr) return rows::run_ordered(args, wide, chained, cuda_stream);
  const RowKernel kernel = args.type == DType::kFloat16    ? kernel_for<__half>(args, wide)
                           : args.type == DType::kBFloat16 ? kernel_for<__nv_bfloat16>(args, wide)
                                                           : kernel_for<float>(args, wide);
  const auto blocks = static_cast<unsigned>((args.rows + kernel.rows_per_block - 1) / kernel.rows_per_block);
  RowPassArgs kernel_args = args;
  launch_kernel("row_pass", kernel.function, dim3(blocks), dim3(static_cast<unsigned>(kernel.threads)), 0, dim3(1),
                chained, &kernel_args, cuda_stream);
}

}  // namespace octofuse
