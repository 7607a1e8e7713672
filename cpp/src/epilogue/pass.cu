// The epilogue as a pass of its own. Memory-bound: every kernel reads and writes once.
#include "octofuse/epilogue_pass.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "device/align.h"
#include "device/launch.h"
#include "epilogue/formula.cuh"

namespace octofuse {
namespace {

constexpr int kBlock = 256;  // threads
constexpr int kSize = 8;     // columns of a thread
constexpr int kRows = 2;     // that a thread loads together: acc[0] is finished, then acc[1] takes its place
constexpr int64_t kMaxBlocks = 65535;

template <class Q>
struct alignas(sizeof(Q) * kSize < 16 ? sizeof(Q) * kSize : 16) Pack {
  Q values[kSize];
};

template <class Q, class Sum>
__device__ void load(const DequantizeArgs& args, int64_t row, int col, bool wide, Sum (&acc)[kSize]) {
  const int64_t offset = args.q_group == 0 ? col : col / 32 * args.q_group + col % 32;
  const Q* source = static_cast<const Q*>(args.q) + row * args.ldq + offset;
  if (wide) {
    const Pack<Q> pack = *reinterpret_cast<const Pack<Q>*>(source);
#pragma unroll
    for (int j = 0; j < kSize; ++j) acc[j] = static_cast<Sum>(pack.values[j]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) acc[j] = col + j < args.cols ? static_cast<Sum>(source[j]) : Sum{0};
}

template <class Out>
__device__ void round_and_store(const DequantizeArgs& args, int64_t row, const Coordinates<kSize>& at, bool wide,
                                float r, const float (&t)[kSize]) {
  Out values[kSize];
  round_to(t, args.epilogue.clamp_low, r, values);
  Out* out = static_cast<Out*>(args.out) + row * args.ldo + at.n[0];
  if (wide) {
    store_piece<true>(out, at, values);
  } else {
    store_piece<false>(out, at, values);
  }
}

// The formula on 8 columns of a row; the output's type is a switch at the end.
template <class Sum>
__device__ void finish(const DequantizeArgs& args, int64_t row, const Coordinates<kSize>& at,
                       const Operands<kSize>& operands, bool wide, float r, Sum (&acc)[kSize]) {
  const EpilogueArgs& e = args.epilogue;
  float t[kSize];
  if (e.w_sum != nullptr) subtract_zero_points(operands, acc);
  dequantize(acc, operands, t);
  if (e.bias != nullptr) add(operands.bias, t);
  if (args.out_type == DType::kFloat32) {
    activate_by<float, true>(e.activation, t);
  } else if (args.out_type == DType::kInt8) {
    activate_by<int8_t, false>(e.activation, t);
  } else {
    activate_by<__half, false>(e.activation, t);
  }
  if (e.residual != nullptr) add(operands.residual, t);
  switch (args.out_type) {
    case DType::kInt8:
      return round_and_store<int8_t>(args, row, at, wide, r, t);
    case DType::kE4M3:
      return round_and_store<__nv_fp8_e4m3>(args, row, at, wide, r, t);
    case DType::kFloat16:
      return round_and_store<__half>(args, row, at, wide, r, t);
    case DType::kBFloat16:
      return round_and_store<__nv_bfloat16>(args, row, at, wide, r, t);
    default:
      return round_and_store<float>(args, row, at, wide, r, t);
  }
}

// What depends on the column alone is read once; a thread keeps its 8 columns and goes down the rows.
template <class Q>
__global__ void __launch_bounds__(kBlock) epilogue_kernel(const DequantizeArgs args, bool wide_in, bool wide_out) {
  using Sum = std::conditional_t<std::is_same_v<Q, int8_t> || std::is_same_v<Q, int32_t>, int32_t, float>;
  const int col = static_cast<int>(blockIdx.x * kBlock + threadIdx.x) * kSize;
  if (col >= args.cols) return;
  const EpilogueArgs& e = args.epilogue;
  Coordinates<kSize> at;
  at.m_end = static_cast<int>(args.rows);
  at.n_end = static_cast<int>(args.cols);
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    at.m[j] = 0;
    at.n[j] = col + j;
  }
  Operands<kSize> operands;
  load_channel_operands(at, e, operands);
  const float r = size_of(args.out_type) == 1 ? reciprocal(scale_at(e.out_scale, 0)) : 0.0F;
  const int step = kRows * static_cast<int>(gridDim.y);
  for (int64_t first = kRows * blockIdx.y; first < args.rows; first += step) {
    Sum acc[kRows][kSize];
#pragma unroll
    for (int i = 0; i < kRows; ++i) load<Q>(args, min(first + i, args.rows - 1), col, wide_in, acc[i]);
#pragma unroll 1
    for (int i = 0; i < kRows && first + i < args.rows; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) at.m[j] = static_cast<int>(first + i);
      load_token_operands(at, e, operands);
      finish(args, first + i, at, operands, wide_out, r, acc[0]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) acc[0][j] = acc[kRows - 1][j];
    }
  }
}

// From: int8_t, or uint16_t for the bits of fp16 and bf16.
template <class From, class To>
__global__ void pad_kernel(const Rows source, To* out, int64_t padded) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < source.rows * padded; i += step) {
    const int64_t row = i / padded;
    const int64_t col = i - row * padded;
    From value = 0;
    if (col < source.cols) value = static_cast<const From*>(source.data)[row * source.ld + col];
    if constexpr (std::is_same_v<From, To>) {
      out[i] = value;
    } else {
      const float wide[1] = {static_cast<float>(value)};
      To rounded[1];
      round_to(wide, 0, 0.0F, rounded);
      out[i] = rounded[0];
    }
  }
}

template <class From, class To>
void pad(const Rows& source, void* out, int64_t padded, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min(ceil_div(source.rows * padded, kBlock), kMaxBlocks));
  pad_kernel<From, To><<<blocks, kBlock, 0, stream>>>(source, static_cast<To*>(out), padded);
}

// Whether every 8 elements of a row are aligned for one access of 16 bytes, or of 8 for int8.
bool is_wide(const void* data, int64_t ld, int64_t cols, DType type) {
  return cols % kSize == 0 && is_vectorizable(data, ld, type, kSize);
}

}  // namespace

void apply_epilogue(const DequantizeArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const auto kernel = args.q_type == DType::kInt8      ? epilogue_kernel<int8_t>
                      : args.q_type == DType::kE4M3    ? epilogue_kernel<__nv_fp8_e4m3>
                      : args.q_type == DType::kE5M2    ? epilogue_kernel<__nv_fp8_e5m2>
                      : args.q_type == DType::kFloat32 ? epilogue_kernel<float>
                                                       : epilogue_kernel<int32_t>;
  const int64_t across = (args.cols + kBlock * kSize - 1) / (kBlock * kSize);
  // About 16 blocks an SM: enough for every SM, few enough that a thread uses its columns' operands again.
  const int64_t wanted = std::max<int64_t>(1, 16 * device_capability(device).sm_count / across);
  const int64_t down = std::min({(args.rows + kRows - 1) / kRows, wanted, kMaxBlocks});
  kernel<<<dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), kBlock, 0,
           static_cast<cudaStream_t>(stream)>>>(args,
                                                args.q_group != 0 || is_wide(args.q, args.ldq, args.cols, args.q_type),
                                                is_wide(args.out, args.ldo, args.cols, args.out_type));
  check_launch("apply_epilogue");
}

void pad_rows(const Rows& source, void* out, DType type, int64_t padded, int device, Stream stream) {
  if (source.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (type == DType::kInt8) {
    pad<int8_t, int8_t>(source, out, padded, cuda_stream);
  } else if (source.type == type) {
    pad<uint16_t, uint16_t>(source, out, padded, cuda_stream);
  } else if (type == DType::kFloat16) {
    pad<int8_t, __half>(source, out, padded, cuda_stream);
  } else {
    pad<int8_t, __nv_bfloat16>(source, out, padded, cuda_stream);
  }
  check_launch("pad_rows");
}

}  // namespace octofuse
