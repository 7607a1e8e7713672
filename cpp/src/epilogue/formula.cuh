// The one formula, on the device: every GPU engine ends here, so that all of them give the same bits.
// EPILOGUES.md beside this file says what each step rounds and why.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "epilogue/activations.cuh"
#include "octofuse/gemm.h"

namespace octofuse {

// Nothing here is read through __ldg: the compiler takes what that reads for constant and moves it above
// griddepcontrol.wait, that is, before the kernel that writes it has finished.
__device__ inline float scale_at(const ScaleView& scale, int64_t index) {
  return scale.data != nullptr ? scale.data[index * scale.step] : scale.value;
}

__device__ inline int32_t zero_at(const IntView& zero, int64_t index) {
  return zero.data != nullptr ? zero.data[index * zero.step] : zero.value;
}

// 1 / s rounded once to fp32 for every s, without a subroutine call (a call in a kernel serialises its wgmmas): a
// double approximation good to 2^-50 cannot round to the wrong fp32 neighbour, since 1/s stays 2^-48 away from every
// midpoint.
__device__ inline float reciprocal(float s) {
  const double d = s;
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(d));
  if (s == 0.0F || isinf(s)) return static_cast<float>(r);
  for (int i = 0; i < 2; ++i) r = __fma_rn(r, __fma_rn(-d, r, 1.0), r);
  return static_cast<float>(r);
}

template <class T>
__device__ inline float to_float(T value) {
  return static_cast<float>(value);
}

__device__ inline float load_as_float(const void* data, DType type, int64_t index) {
  switch (type) {
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(data)[index]);
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

// rne(t * r) clamped to [low, 127]; NaN becomes 0, as everywhere in this library.
// The conversion itself rounds to even, saturates, and turns NaN into 0.
__device__ inline int8_t requantize(float t, float r, int low) {
  return static_cast<int8_t>(min(max(__float2int_rn(__fmul_rn(t, r)), low), 127));
}

// t * r rounded to even in e4m3, at most 448 in magnitude; NaN stays NaN.
__device__ inline __nv_fp8_e4m3 round_to_e4m3(float t, float r) {
  __nv_fp8_e4m3 value;
  value.__x = __nv_cvt_float_to_fp8(__fmul_rn(t, r), __NV_SATFINITE, __NV_E4M3);
  return value;
}

// Outputs that are multiplied by 1 / out_scale.
template <class Out>
constexpr bool kIsScaled = std::is_same_v<Out, int8_t> || std::is_same_v<Out, __nv_fp8_e4m3>;

// A sum of products in fp32: of int8 they are exact in int32 and rounded here, of float8 they are fp32.
__device__ inline float float_of_sum(int32_t sum) { return __int2float_rn(sum); }
__device__ inline float float_of_sum(float sum) { return sum; }

// Where the elements of a fragment lie, and the edges of the matrix.
template <int kSize>
struct Coordinates {
  int m[kSize];
  int n[kSize];
  int m_end, n_end;
  __device__ bool inside(int i) const { return m[i] < m_end && n[i] < n_end; }
  // The nearest element inside: loads through it need no branch, and what they fetch past the edge is never stored.
  __device__ int64_t row(int i) const { return min(m[i], m_end - 1); }
  __device__ int64_t column(int i) const { return min(n[i], n_end - 1); }
};

// What the formula reads beside the accumulators, one value per element of a fragment.
template <int kSize>
struct Operands {
  float w_scale[kSize];
  float x_scale[kSize];
  float bias[kSize];           // read only where args.bias is given
  float residual[kSize];       // likewise
  int32_t minus_w_sum[kSize];  // this and x_zero: read only where args.w_sum is given
  int32_t x_zero[kSize];
};

// residual[m, n] in fp32; the switch on its type stands outside the loop.
template <class T, int kSize>
__device__ inline void load_residual_as(const Coordinates<kSize>& at, const EpilogueArgs& args,
                                        float (&residual)[kSize]) {
  const T* data = static_cast<const T*>(args.residual);
#pragma unroll
  for (int i = 0; i < kSize; ++i) residual[i] = to_float(data[at.row(i) * args.residual_ld + at.column(i)]);
}

template <int kSize>
__device__ inline void load_residual(const Coordinates<kSize>& at, const EpilogueArgs& args, float (&residual)[kSize]) {
  switch (args.residual_type) {
    case DType::kFloat16:
      return load_residual_as<__half>(at, args, residual);
    case DType::kBFloat16:
      return load_residual_as<__nv_bfloat16>(at, args, residual);
    default:
      return load_residual_as<float>(at, args, residual);
  }
}

// Consecutive columns of one row; kWide: with 16-byte loads.
template <bool kWide, class T, int kSize>
__device__ inline void load_residual_row_as(const Coordinates<kSize>& at, const EpilogueArgs& args,
                                            float (&residual)[kSize]) {
  if constexpr (kWide) {
    struct alignas(16) Pack {
      T values[kSize];
    };
    const T* row = static_cast<const T*>(args.residual) + static_cast<int64_t>(at.m[0]) * args.residual_ld + at.n[0];
    const Pack pack = *reinterpret_cast<const Pack*>(row);
#pragma unroll
    for (int i = 0; i < kSize; ++i) residual[i] = to_float(pack.values[i]);
  } else {
    load_residual_as<T>(at, args, residual);
  }
}

template <bool kWide, int kSize>
__device__ inline void load_residual_row(const Coordinates<kSize>& at, const EpilogueArgs& args,
                                         float (&residual)[kSize]) {
  switch (args.residual_type) {
    case DType::kFloat16:
      return load_residual_row_as<kWide, __half>(at, args, residual);
    case DType::kBFloat16:
      return load_residual_row_as<kWide, __nv_bfloat16>(at, args, residual);
    default:
      return load_residual_row_as<kWide, float>(at, args, residual);
  }
}

// Operands straight from global memory, for kernels whose epilogue is not their bottleneck: what depends on the column,
// on the row, and all of them.
template <int kSize>
__device__ inline void load_channel_operands(const Coordinates<kSize>& at, const EpilogueArgs& args,
                                             Operands<kSize>& operands) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    operands.w_scale[i] = scale_at(args.w_scale, at.column(i));
    if (args.bias != nullptr) operands.bias[i] = load_as_float(args.bias, args.bias_type, at.column(i));
    if (args.w_sum != nullptr) operands.minus_w_sum[i] = -args.w_sum[at.column(i)];
  }
}

// The fragment lies in one row.
template <int kSize>
__device__ inline void load_token_operands(const Coordinates<kSize>& at, const EpilogueArgs& args,
                                           Operands<kSize>& operands) {
  const float x_scale = scale_at(args.x_scale, at.row(0));
  const int32_t x_zero = args.w_sum != nullptr ? zero_at(args.x_zero, at.row(0)) : 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    operands.x_scale[i] = x_scale;
    operands.x_zero[i] = x_zero;
  }
  if (args.residual != nullptr) load_residual(at, args, operands.residual);
}

template <int kSize>
__device__ inline void load_operands(const Coordinates<kSize>& at, const EpilogueArgs& args,
                                     Operands<kSize>& operands) {
  load_channel_operands(at, args, operands);
  load_token_operands(at, args, operands);
}

// The steps of the formula over one fragment. Each takes its run-time switch outside the loop.

template <class Sum, int kSize>
__device__ inline void dequantize(const Sum (&acc)[kSize], const Operands<kSize>& operands, float (&t)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    t[i] = __fmul_rn(__fmul_rn(float_of_sum(acc[i]), operands.w_scale[i]), operands.x_scale[i]);
  }
}

template <int kSize>
__device__ inline void add(const float (&values)[kSize], float (&t)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) t[i] = __fadd_rn(t[i], values[i]);
}

template <int kSize>
__device__ inline void subtract_zero_points(const Operands<kSize>& operands, int32_t (&acc)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) acc[i] += operands.x_zero[i] * operands.minus_w_sum[i];
}

template <int kSize>
__device__ inline void subtract_zero_points(const Operands<kSize>&, float (&)[kSize]) {}  // float8 has none

// The final rounding; `r` is that of int8 and e4m3, `low` that of int8.
template <class Out, int kSize>
__device__ inline void round_to(const float (&t)[kSize], int low, float r, Out (&out)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (std::is_same_v<Out, int8_t>) {
      out[i] = requantize(t[i], r, low);
    } else if constexpr (std::is_same_v<Out, __nv_fp8_e4m3>) {
      out[i] = round_to_e4m3(t[i], r);
    } else if constexpr (std::is_same_v<Out, __half>) {
      out[i] = __float2half_rn(t[i]);
    } else if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
      out[i] = __float2bfloat16_rn(t[i]);
    } else {
      out[i] = t[i];
    }
  }
}

// The steps behind dequantisation without a branch, for operands that are neutral where they are absent: bias and
// residual -0 (adding it changes no value, not even the sign of a zero). `activate(t)` is the activation.
template <class Out, class Activate, int kSize>
__device__ inline void finish(float (&t)[kSize], const float (&bias)[kSize], Activate activate,
                              const float (&residual)[kSize], int low, float r, Out (&out)[kSize]) {
  add(bias, t);
  activate(t);
  add(residual, t);
  round_to(t, low, r, out);
}

// The formula to `Out`: __half, __nv_bfloat16, float, int8_t or __nv_fp8_e4m3 (requantised) or int32_t (raw). Operands
// that are absent are not read.
template <class Out, bool kDoubleActivation = std::is_same_v<Out, float>, int kSize>
__device__ inline void epilogue(int32_t (&acc)[kSize], const Operands<kSize>& operands, const EpilogueArgs& args,
                                Out (&out)[kSize]) {
  if constexpr (std::is_same_v<Out, int32_t>) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) out[i] = acc[i];
  } else {
    float t[kSize];
    if (args.w_sum != nullptr) subtract_zero_points(operands, acc);
    dequantize(acc, operands, t);
    if (args.bias != nullptr) add(operands.bias, t);
    activate_by<Out, kDoubleActivation>(args.activation, t);
    if (args.residual != nullptr) add(operands.residual, t);
    float r = 0.0F;
    if constexpr (std::is_same_v<Out, int8_t>) r = reciprocal(scale_at(args.out_scale, 0));
    round_to(t, args.clamp_low, r, out);
  }
}

// The same without a branch: as finish(), and w_sum and x_zero are 0 where they are absent.
template <class Out, class Activate, class Sum, int kSize>
__device__ inline void epilogue(Sum (&acc)[kSize], const Operands<kSize>& operands, Activate activate, int low, float r,
                                Out (&out)[kSize]) {
  if constexpr (std::is_same_v<Out, int32_t>) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) out[i] = acc[i];
  } else {
    float t[kSize];
    subtract_zero_points(operands, acc);
    dequantize(acc, operands, t);
    finish(t, operands.bias, activate, operands.residual, low, r, out);
  }
}

// A fragment of consecutive columns of one row to memory; kWide: 16-byte stores are allowed, and it lies wholly inside.
template <bool kWide, class Out, int kSize>
__device__ inline void store_piece(Out* destination, const Coordinates<kSize>& at, const Out (&values)[kSize]) {
  if constexpr (kWide) {
    struct alignas(sizeof(Out) * kSize < 16 ? sizeof(Out) * kSize : 16) Pack {
      Out values[kSize];
    } pack;
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.values[i] = values[i];
    *reinterpret_cast<Pack*>(destination) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (at.inside(i)) destination[i] = values[i];
    }
  }
}

template <class Out, int kSize>
__device__ inline void store_row(void* out, int64_t offset, int32_t (&acc)[kSize], const Coordinates<kSize>& at,
                                 const EpilogueArgs& args, bool vector) {
  Operands<kSize> operands;
  if constexpr (!std::is_same_v<Out, int32_t>) load_operands(at, args, operands);
  Out values[kSize];
  epilogue<Out>(acc, operands, args, values);
  Out* destination = static_cast<Out*>(out) + offset;
  if (vector && at.inside(kSize - 1)) {
    store_piece<true>(destination, at, values);
  } else {
    store_piece<false>(destination, at, values);
  }
}

// store_row with the output type known only at run time: for kernels that would otherwise be compiled five times.
template <int kSize>
__device__ inline void store_row(void* out, DType type, int64_t offset, int32_t (&acc)[kSize],
                                 const Coordinates<kSize>& at, const EpilogueArgs& args, bool vector) {
  switch (type) {
    case DType::kInt32:
      return store_row<int32_t>(out, offset, acc, at, args, vector);
    case DType::kInt8:
      return store_row<int8_t>(out, offset, acc, at, args, vector);
    case DType::kFloat16:
      return store_row<__half>(out, offset, acc, at, args, vector);
    case DType::kBFloat16:
      return store_row<__nv_bfloat16>(out, offset, acc, at, args, vector);
    default:
      return store_row<float>(out, offset, acc, at, args, vector);
  }
}

}  // namespace octofuse
