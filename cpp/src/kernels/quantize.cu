// Quantisation, its inverse, and the epilogue as a pass of its own. Memory-bound: each kernel reads and writes once.
#include "octofuse/quantize.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cutlass/epilogues.cuh"
#include "kernels/launch.h"
#include "kernels/tile_epilogue.cuh"

namespace octofuse {
namespace {

constexpr int kBlock = 256;  // threads
constexpr int kVector = 8;
constexpr int64_t kMaxBlocks = 65535;

template <class T>
struct alignas(sizeof(T) * kVector) Pack {
  T values[kVector];
};

template <class T>
__device__ void load_pack(const T* source, int64_t count, bool vector, float (&t)[kVector]) {
  if (vector && count >= kVector) {
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(source);
#pragma unroll
    for (int i = 0; i < kVector; ++i) t[i] = to_float(pack.values[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) t[i] = i < count ? to_float(source[i]) : 0.0F;
}

__device__ void store_quantized(int8_t* destination, int64_t count, bool vector, const float (&t)[kVector], float r) {
  Pack<int8_t> pack;
#pragma unroll
  for (int i = 0; i < kVector; ++i) pack.values[i] = requantize(t[i], r, -127.0F);
  if (vector && count >= kVector) {
    *reinterpret_cast<Pack<int8_t>*>(destination) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) destination[i] = pack.values[i];
  }
}

template <class T>
__global__ void quantize_tensor_kernel(QuantizeArgs args, bool vector) {
  const float r = reciprocal(scale_at(args.scale, 0));
  const int64_t packs = (args.cols + kVector - 1) / kVector;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < args.rows * packs; i += step) {
    const int64_t row = i / packs;
    const int64_t col = (i - row * packs) * kVector;
    float t[kVector];
    load_pack(static_cast<const T*>(args.x) + row * args.ldx + col, args.cols - col, vector, t);
    store_quantized(args.q + row * args.cols + col, args.cols - col, vector, t, r);
  }
}

// max that keeps NaN: once a row has seen one, its amax is NaN and so is its scale.
__device__ float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

__device__ float warp_max(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = max_or_nan(value, __shfl_xor_sync(0xFFFFFFFFU, value, offset));
  }
  return value;
}

__device__ float block_max(float value) {
  __shared__ float partial[kBlock / 32];
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int i = 1; i < kBlock / 32; ++i) value = max_or_nan(value, partial[i]);
  __syncthreads();  // before the next row writes `partial` again
  return value;
}

// A zero row gets scale 1, so that nobody divides by zero later.
__device__ float scale_of(float amax) { return amax == 0.0F ? 1.0F : __fdiv_rn(amax, 127.0F); }

// kThreads threads a row (a warp or a block), which stays in their registers between finding its scale and using it:
// one read, one write, and the next row on its way meanwhile. Needs rows of whole vectors, at most kThreads * kPacks of
// them.
template <class T, int kThreads, int kPacks>
struct Row {
  Pack<T> packs[kPacks];

  __device__ void load(const QuantizeArgs& args, int64_t row, int thread) {
    const auto* source = reinterpret_cast<const Pack<T>*>(static_cast<const T*>(args.x) + row * args.ldx);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (thread + i * kThreads < args.cols / kVector) packs[i] = source[thread + i * kThreads];
    }
  }

  __device__ float amax(const QuantizeArgs& args, int thread) const {
    float value = 0.0F;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (thread + i * kThreads >= args.cols / kVector) break;
#pragma unroll
      for (int j = 0; j < kVector; ++j) value = max_or_nan(value, fabsf(to_float(packs[i].values[j])));
    }
    return kThreads == 32 ? warp_max(value) : block_max(value);
  }

  __device__ void store(const QuantizeArgs& args, int64_t row, int thread, float r) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (thread + i * kThreads >= args.cols / kVector) break;
      float t[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) t[j] = to_float(packs[i].values[j]);
      store_quantized(args.q + row * args.cols + (thread + i * kThreads) * kVector, kVector, true, t, r);
    }
  }
};

template <class T, int kThreads, int kPacks>
__global__ void __launch_bounds__(kBlock) quantize_row_kernel(QuantizeArgs args) {
  constexpr int kRowsPerBlock = kBlock / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowsPerBlock;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kThreads;
  wait_for_earlier_kernels();
  let_later_kernels_start();
  Row<T, kThreads, kPacks> current;
  Row<T, kThreads, kPacks> next;
  if (row < args.rows) current.load(args, row, thread);
  for (; row < args.rows; row += step) {  // whole warps, and whole blocks where a row is one
    if (row + step < args.rows) next.load(args, row + step, thread);
    const float scale = scale_of(current.amax(args, thread));
    if (thread == 0) args.scales[row] = scale;
    current.store(args, row, thread, reciprocal(scale));
    current = next;
  }
}

// Rows of any length and alignment: one block a row, two passes; the second finds the row in L1 or L2.
template <class T>
__global__ void quantize_token_kernel(QuantizeArgs args, bool vector) {
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* source = static_cast<const T*>(args.x) + row * args.ldx;
    float amax = 0.0F;
    for (int64_t col = threadIdx.x * kVector; col < args.cols; col += kBlock * kVector) {
      float t[kVector];
      load_pack(source + col, args.cols - col, vector, t);
#pragma unroll
      for (int i = 0; i < kVector; ++i) amax = max_or_nan(amax, fabsf(t[i]));
    }
    amax = block_max(amax);
    const float scale = scale_of(amax);
    const float r = reciprocal(scale);
    if (threadIdx.x == 0) args.scales[row] = scale;
    for (int64_t col = threadIdx.x * kVector; col < args.cols; col += kBlock * kVector) {
      float t[kVector];
      load_pack(source + col, args.cols - col, vector, t);
      store_quantized(args.q + row * args.cols + col, args.cols - col, vector, t, r);
    }
  }
}

template <class Q>
__global__ void epilogue_kernel(DequantizeArgs args, bool vector) {
  constexpr int kSize = 4;
  const int64_t packs = (args.cols + kSize - 1) / kSize;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < args.rows * packs; i += step) {
    const int64_t row = i / packs;
    const int64_t col = (i - row * packs) * kSize;
    const Q* source = static_cast<const Q*>(args.q) + row * args.ldq + col;
    Coordinates<kSize> at;
    at.m_end = static_cast<int>(args.rows);
    at.n_end = static_cast<int>(args.cols);
    int32_t acc[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      at.m[j] = static_cast<int>(row);
      at.n[j] = static_cast<int>(col) + j;
      acc[j] = at.inside(j) ? source[j] : 0;
    }
    store_row(args.out, args.out_type, row * args.ldo + col, acc, at, args.epilogue, vector);
  }
}

__global__ void pad_kernel(const int8_t* source, int64_t rows, int64_t cols, int64_t ld, int8_t* out, int64_t padded) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < rows * padded; i += step) {
    const int64_t row = i / padded;
    const int64_t col = i - row * padded;
    out[i] = col < cols ? source[row * ld + col] : 0;
  }
}

bool is_aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

unsigned blocks_for(int64_t work) {
  return static_cast<unsigned>(std::clamp<int64_t>((work + kBlock - 1) / kBlock, 1, kMaxBlocks));
}

// Calls launch(T*) with the element type of a floating-point DType.
template <class Launch>
void for_float_type(DType type, Launch launch) {
  switch (type) {
    case DType::kFloat16:
      return launch(static_cast<const __half*>(nullptr));
    case DType::kBFloat16:
      return launch(static_cast<const __nv_bfloat16*>(nullptr));
    default:
      return launch(static_cast<const float*>(nullptr));
  }
}

bool can_vectorise(const QuantizeArgs& args) {
  return args.ldx % kVector == 0 && args.cols % kVector == 0 && is_aligned(args.q, kVector) &&
         is_aligned(args.x, kVector * size_of(args.x_type));
}

template <class T>
struct RowKernel {
  void (*function)(QuantizeArgs) = nullptr;  // none: the row does not fit into registers or cannot be read in vectors
  int64_t rows_per_block = 1;
};

template <class T>
RowKernel<T> row_kernel(const QuantizeArgs& args, bool vector) {
  if (!vector) return {};
  const int64_t packs = args.cols / kVector;
  constexpr int64_t kWarpRows = kBlock / 32;
  if (packs <= 32) return {quantize_row_kernel<T, 32, 1>, kWarpRows};
  if (packs <= 64) return {quantize_row_kernel<T, 32, 2>, kWarpRows};
  if (packs <= 128) return {quantize_row_kernel<T, 32, 4>, kWarpRows};
  // With rows enough for every SM a warp keeps a longer row to itself: it waits for nobody.
  if (args.rows >= 2048 && packs <= 256) return {quantize_row_kernel<T, 32, 8>, kWarpRows};
  if (packs <= 256) return {quantize_row_kernel<T, kBlock, 1>, 1};
  if (packs <= 512) return {quantize_row_kernel<T, kBlock, 2>, 1};
  if (packs <= 1024) return {quantize_row_kernel<T, kBlock, 4>, 1};
  if (packs <= 2048) return {quantize_row_kernel<T, kBlock, 8>, 1};
  return {};
}

}  // namespace

void quantize_per_tensor(const QuantizeArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const unsigned blocks = blocks_for(args.rows * ((args.cols + kVector - 1) / kVector));
  for_float_type(args.x_type, [&](auto* type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    quantize_tensor_kernel<T><<<blocks, kBlock, 0, static_cast<cudaStream_t>(stream)>>>(args, can_vectorise(args));
  });
  check_launch("quantize_per_tensor");
}

void quantize_per_token(const QuantizeArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool vector = can_vectorise(args);
  QuantizeArgs kernel_args = args;
  for_float_type(args.x_type, [&](auto* type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    const RowKernel<T> kernel = row_kernel<T>(args, vector);
    const int64_t rows_of_blocks = (args.rows + kernel.rows_per_block - 1) / kernel.rows_per_block;
    // As many blocks as the SMs hold side by side; each takes every so many rows.
    const int64_t resident = int64_t{2048 / kBlock} * device_capability(device).sm_count;
    const auto blocks =
        static_cast<unsigned>(kernel.function != nullptr ? std::min(rows_of_blocks, resident) : rows_of_blocks);
    if (kernel.function != nullptr) {
      launch_kernel("quantize_per_token", reinterpret_cast<const void*>(kernel.function), dim3(blocks), dim3(kBlock), 0,
                    dim3(1), is_chained(cuda_stream, device), &kernel_args, cuda_stream);
    } else {
      quantize_token_kernel<T><<<blocks, kBlock, 0, cuda_stream>>>(args, vector);
      check_launch("quantize_per_token");
    }
  });
}

void apply_epilogue(const DequantizeArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const bool vector = args.ldo % 4 == 0 && is_aligned(args.out, 4 * size_of(args.out_type));
  const unsigned blocks = blocks_for(args.rows * ((args.cols + 3) / 4));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.q_type == DType::kInt8) {
    epilogue_kernel<int8_t><<<blocks, kBlock, 0, cuda_stream>>>(args, vector);
  } else {
    epilogue_kernel<int32_t><<<blocks, kBlock, 0, cuda_stream>>>(args, vector);
  }
  check_launch("apply_epilogue");
}

void pad_rows(const int8_t* source, int64_t rows, int64_t cols, int64_t ld, int8_t* out, int64_t padded, int device,
              Stream stream) {
  if (rows == 0) return;
  const DeviceGuard guard(device);
  pad_kernel<<<blocks_for(rows * padded), kBlock, 0, static_cast<cudaStream_t>(stream)>>>(source, rows, cols, ld, out,
                                                                                          padded);
  check_launch("pad_rows");
}

}  // namespace octofuse
