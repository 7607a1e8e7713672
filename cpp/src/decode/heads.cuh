// One head of one new token, by a warp: normalised, rotated, and as the cache has it. A lane has channels lane, lane +
// 32, and so on.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "octofuse/decode.h"
#include "rows/reduce.cuh"

namespace octofuse::decode {

constexpr int kBlockChannels = 64;  // kernels are made for heads of up to 1, 2 and 4 times so many channels
constexpr float kMostFloat8 = 448.0F;

// A head's elements in a lane, for heads of up to kBlocks * kBlockChannels channels.
template <int kBlocks>
constexpr int kOfLane = kBlocks * kBlockChannels / 32;

template <class T, int kBlocks>
__device__ inline void load_head(const T* from, int size, int lane, float (&v)[kOfLane<kBlocks>]) {
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) v[i] = lane + 32 * i < size ? to_float(from[lane + 32 * i]) : 0.0F;
}

// weight: of every channel, nullptr for none.
template <int kBlocks>
__device__ inline void normalise_head(const float* weight, float eps, int size, int lane,
                                      float (&v)[kOfLane<kBlocks>]) {
  float squares = 0.0F;
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) squares = __fadd_rn(squares, __fmul_rn(v[i], v[i]));
  const float inverse = rsqrtf(__fdividef(rows::warp_sum(squares), static_cast<float>(size)) + eps);
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) {
    if (lane + 32 * i < size) v[i] = __fmul_rn(__fmul_rn(v[i], inverse), weight[lane + 32 * i]);
  }
}

// table: the position's cosines, then its sines. scratch: room for a head, this warp's own.
template <int kBlocks>
__device__ inline void rotate_head(const float* table, int rotary, int lane, float* scratch,
                                   float (&v)[kOfLane<kBlocks>]) {
  const int half = rotary / 2;
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) scratch[lane + 32 * i] = v[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) {
    const int c = lane + 32 * i;
    if (c >= rotary) continue;
    const bool first = c < half;
    const int angle = first ? c : c - half;
    const float other = scratch[first ? c + half : c - half];
    const float turned = __fmul_rn(other, table[half + angle]);
    v[i] = __fadd_rn(__fmul_rn(v[i], table[angle]), first ? -turned : turned);
  }
  __syncwarp();
}

template <class T, int kBlocks>
__device__ inline void round_head(float (&v)[kOfLane<kBlocks>]) {
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) v[i] = to_float(rows::from_float<T>(v[i]));
}

// The largest magnitude, NaN if there is one.
template <int kBlocks>
__device__ inline float largest_of_head(const float (&v)[kOfLane<kBlocks>]) {
  float amax = 0.0F;
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(amax) : "f"(fabsf(v[i])));
  return __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(amax)));
}

// What a cache stores of an element.
template <class T, CacheType kCache>
using Stored = std::conditional_t<kCache == CacheType::kFloat, T, uint8_t>;

template <CacheType kCache>
__device__ inline float scale_of_head(float amax) {
  if constexpr (kCache == CacheType::kInt8) return rows::scale_of(amax);
  return amax == 0.0F ? 1.0F : __fdiv_rn(amax, kMostFloat8);
}

// inverse: 1 / the scale.
template <class T, CacheType kCache>
__device__ inline Stored<T, kCache> stored(float value, float inverse) {
  if constexpr (kCache == CacheType::kFloat) {
    return rows::from_float<T>(value);
  } else if constexpr (kCache == CacheType::kInt8) {
    return static_cast<uint8_t>(requantize(value, inverse, -127));
  } else {
    return __nv_cvt_float_to_fp8(__fmul_rn(value, inverse), __NV_SATFINITE, __NV_E4M3);
  }
}

// Writes a head, rounded to T already, to `to` and, if it is not nullptr, `and_to`; returns its scale.
template <class T, CacheType kCache, int kBlocks>
__device__ inline float store_head(const float (&v)[kOfLane<kBlocks>], int size, int lane, Stored<T, kCache>* to,
                                   Stored<T, kCache>* and_to) {
  float scale = 1.0F;
  if constexpr (kCache != CacheType::kFloat) scale = scale_of_head<kCache>(largest_of_head<kBlocks>(v));
  const float inverse = kCache == CacheType::kFloat ? 1.0F : reciprocal(scale);
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) {
    if (lane + 32 * i >= size) continue;
    const Stored<T, kCache> element = stored<T, kCache>(v[i], inverse);
    to[lane + 32 * i] = element;
    if (and_to != nullptr) and_to[lane + 32 * i] = element;
  }
  return scale;
}

__device__ inline float norm_weight(const void* weight, DType type, int channel) {
  return load_as_float(weight, type, channel);
}

}  // namespace octofuse::decode
