// One head of one new token, by a warp: normalised, rotated, and as the cache has it. A lane has channels lane, lane +
// 32, and so on.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "octofuse/decode.h"
#include "rows/reduce.cuh"

namespace octofuse::decode {

constexpr int kBlockChannels = 64;  // kernels are made for heads of up to 1, 2 and 4 times so many channels

// A head's elements in a lane, for heads of up to kBlocks * kBlockChannels channels.
template <int kBlocks>
constexpr int kOfLane = kBlocks * kBlockChannels / 32;

template <class T, int kBlocks>
__device__ inline void load_head(const T* from, int size, int lane, float (&v)[kOfLane<kBlocks>]) {
#pragma unroll
  for (int i = 0; i < kOfLane<kBlocks>; ++i) v[i] = lane + 32 * i < size ? to_float(from[lane + 32 * i]) : 0.0F;
}

// What is done to queries and keys at a position, in a lane's registers: nothing here depends on earlier kernels, so it
// is loaded before they have finished.
template <class T, int kBlocks>
class Preparation {
 public:
  __device__ Preparation(const HeadsArgs& args, int64_t position, int lane) : args_(args), lane_(lane) {
    load_weight(args.query_norm, query_weight_);
    load_weight(args.key_norm, key_weight_);
    const int half = args.rotary / 2;
    const float* const table = args.rotary_table + position * args.rotary;
#pragma unroll
    for (int i = 0; i < kOfLane<kBlocks>; ++i) {
      const int c = lane + 32 * i;
      if (c >= args.rotary) continue;
      const int angle = c < half ? c : c - half;
      cosine_[i] = table[angle];
      sine_[i] = table[half + angle];
    }
  }

  // v: a head's elements, a key's or a query's, which are rounded to T in the end. scratch: room for a head, this
  // warp's own.
  __device__ void apply(bool is_query, float* scratch, float (&v)[kOfLane<kBlocks>]) const {
    if ((is_query ? args_.query_norm : args_.key_norm) != nullptr) normalise(is_query, v);
    if (args_.rotary != 0) rotate(scratch, v);
#pragma unroll
    for (float& element : v) element = to_float(rows::from_float<T>(element));
  }

 private:
  // Weights stay as they are until they are used: a conversion would wait for the load.
  __device__ void load_weight(const void* from, uint32_t (&weight)[kOfLane<kBlocks>]) const {
    if (from == nullptr) return;
    const bool wide = args_.norm_type == DType::kFloat32;
#pragma unroll
    for (int i = 0; i < kOfLane<kBlocks>; ++i) {
      const int c = lane_ + 32 * i;
      if (c >= args_.head_size) continue;
      weight[i] = wide ? static_cast<const uint32_t*>(from)[c] : static_cast<const uint16_t*>(from)[c];
    }
  }

  __device__ void normalise(bool is_query, float (&v)[kOfLane<kBlocks>]) const {
    float squares = 0.0F;
#pragma unroll
    for (const float element : v) squares = __fadd_rn(squares, __fmul_rn(element, element));
    const float mean = __fdividef(rows::warp_sum(squares), static_cast<float>(args_.head_size));
    const float inverse = rsqrtf(mean + args_.eps);
#pragma unroll
    for (int i = 0; i < kOfLane<kBlocks>; ++i) {
      const uint32_t bits = is_query ? query_weight_[i] : key_weight_[i];
      const T narrow = *reinterpret_cast<const T*>(&bits);
      const float weight = args_.norm_type == DType::kFloat32 ? __uint_as_float(bits) : to_float(narrow);
      if (lane_ + 32 * i < args_.head_size) v[i] = __fmul_rn(__fmul_rn(v[i], inverse), weight);
    }
  }

  __device__ void rotate(float* scratch, float (&v)[kOfLane<kBlocks>]) const {
    const int half = args_.rotary / 2;
#pragma unroll
    for (int i = 0; i < kOfLane<kBlocks>; ++i) scratch[lane_ + 32 * i] = v[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOfLane<kBlocks>; ++i) {
      const int c = lane_ + 32 * i;
      if (c >= args_.rotary) continue;
      const float turned = __fmul_rn(scratch[c < half ? c + half : c - half], sine_[i]);
      v[i] = __fadd_rn(__fmul_rn(v[i], cosine_[i]), c < half ? -turned : turned);
    }
    __syncwarp();
  }

  const HeadsArgs& args_;
  const int lane_;
  uint32_t query_weight_[kOfLane<kBlocks>], key_weight_[kOfLane<kBlocks>];
  float cosine_[kOfLane<kBlocks>], sine_[kOfLane<kBlocks>];
};

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
  return rows::scale_of(amax, kCache == CacheType::kInt8 ? DType::kInt8 : DType::kE4M3);
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

// Writes a head, rounded to T already, to `to` and, if it is not nullptr, `and_to`; returns its scale, which is `fixed`
// where that is not 0.
template <class T, CacheType kCache, int kBlocks>
__device__ inline float store_head(const float (&v)[kOfLane<kBlocks>], int size, int lane, float fixed,
                                   Stored<T, kCache>* to, Stored<T, kCache>* and_to) {
  float scale = kCache == CacheType::kFloat ? 1.0F : fixed;
  if constexpr (kCache != CacheType::kFloat) {
    if (scale == 0.0F) scale = scale_of_head<kCache>(largest_of_head<kBlocks>(v));
  }
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

}  // namespace octofuse::decode
