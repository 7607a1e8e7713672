// The activations on the device: one struct for each line of activations.def. One that is missing does not compile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "octofuse/types.h"

namespace octofuse {

// t / (1 + exp(z)) without cancellation, without a subroutine call and with two special-function instructions. With
// s = exp(-|z|) / (1 + exp(-|z|)), at most a half, it is t - t * s for z < 0 (most of t is kept, and only s carries the
// approximations' error) and t * s for z >= 0. In the far tail s is kept 2^24 times larger: it would leave fp32 before
// the product does.
__device__ inline float times_logistic(float t, float z) {
  const float exponent = __fmul_rn(fabsf(z), -1.4426950408889634F);
  const bool far = exponent < -64.0F;
  const float down = far ? 1.0F / 16777216.0F : 1.0F;
  float e;
  float inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(far ? __fadd_rn(exponent, 24.0F) : exponent));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fmaf_rn(e, down, 1.0F)));
  const float s = __fmul_rn(e, inverse);
  // An infinite t stays one: inf - inf * 0 would not.
  const float kept = s == 0.0F ? t : __fmaf_rn(-t, __fmul_rn(s, down), t);
  return z < 0.0F ? kept : __fmul_rn(__fmul_rn(t, s), down);
}

// t / (1 + 2^a), for int8 outputs: in seven instructions instead of twenty, for a relative error of about 1e-6 where an
// 8-bit step is 4e-3 at least. What lies below 2^-126 becomes zero.
__device__ inline float times_logistic_to_int8(float t, float a) {
  float e;
  float inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(e, 1.0F)));
  return __fmul_rn(t, inverse);
}

// evaluate<Out>(t): for fp16, bf16 and int8 outputs, in fp32. The forms do not cancel: gelu goes through erfc,
// gelu_tanh and silu through the logistic function, so the relative error stays at about 1e-5 in the negative tail,
// where 1 + erf loses all digits. in_double(d): for fp32 outputs, since 1 ulp of fp32 is out of reach in fp32;
// kIsExact: not needed, evaluate() gives the exact value.
template <Activation kActivation>
struct ActivationOf;

template <>
struct ActivationOf<Activation::kRelu> {
  static constexpr bool kIsExact = true;
  template <class Out>
  __device__ static float evaluate(float t) {
    return t < 0.0F ? 0.0F : t;  // keeps NaN
  }
  __device__ static double in_double(double d) { return d < 0.0 ? 0.0 : d; }
};

template <>
struct ActivationOf<Activation::kGelu> {
  static constexpr bool kIsExact = false;
  template <class Out>
  __device__ static float evaluate(float t) {
    return __fmul_rn(__fmul_rn(0.5F, t), erfcf(__fmul_rn(t, -0.70710678118654752F)));
  }
  __device__ static double in_double(double d) { return 0.5 * d * erfc(d * -0.70710678118654752440); }
};

template <>
struct ActivationOf<Activation::kGeluTanh> {
  static constexpr bool kIsExact = false;
  template <class Out>
  __device__ static float evaluate(float t) {
    if constexpr (std::is_same_v<Out, int8_t>) {
      return times_logistic_to_int8(t, __fmul_rn(t, __fmaf_rn(__fmul_rn(t, t), -0.10294324F, -2.3022082F)));
    } else {
      return times_logistic(t, -__fmul_rn(t, __fmaf_rn(__fmul_rn(t, t), 0.0713548162726F, 1.5957691216057308F)));
    }
  }
  __device__ static double in_double(double d) {
    return d / (1.0 + exp(-d * (1.5957691216057308 + 0.07135481627260025 * d * d)));
  }
};

template <>
struct ActivationOf<Activation::kSilu> {
  static constexpr bool kIsExact = false;
  template <class Out>
  __device__ static float evaluate(float t) {
    if constexpr (std::is_same_v<Out, int8_t>) {
      return times_logistic_to_int8(t, __fmul_rn(t, -1.4426950408889634F));
    } else {
      return times_logistic(t, -t);
    }
  }
  __device__ static double in_double(double d) { return d / (1.0 + exp(-d)); }
};

// Out of line: it is long, and only kernels without wgmma call it.
static __device__ __noinline__ float activate_accurate(float t, Activation activation) {
#define OCTOFUSE_ACTIVATION(id, name)                                         \
  if (activation == Activation::k##id) {                                      \
    return static_cast<float>(ActivationOf<Activation::k##id>::in_double(t)); \
  }
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
  return t;  // none
}

// Over a fragment. A long one is a rolled loop over its first four values that rotates the fragment through registers:
// unrolled over a whole tile, the activation's code outgrows the instruction cache and costs more than it computes.
template <Activation kActivation, class Out, int kSize>
__device__ inline void activate_all(float (&t)[kSize]) {
  constexpr int kGroup = kSize > 8 && !ActivationOf<kActivation>::kIsExact ? 4 : kSize;
  static_assert(kSize % kGroup == 0);
#pragma unroll 1
  for (int step = 0; step < kSize / kGroup; ++step) {
    float head[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) head[i] = ActivationOf<kActivation>::template evaluate<Out>(t[i]);
#pragma unroll
    for (int i = 0; i + kGroup < kSize; ++i) t[i] = t[i + kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) t[kSize - kGroup + i] = head[i];
  }
}

// The activation of `t`, a switch outside the loop over it. kInDouble: the kernel may call activate_accurate.
template <class Out, bool kInDouble, int kSize>
__device__ inline void activate_by(Activation activation, float (&t)[kSize]) {
  if (activation == Activation::kNone) return;
#define OCTOFUSE_ACTIVATION(id, name)                                                    \
  if constexpr (!kInDouble || ActivationOf<Activation::k##id>::kIsExact) {               \
    if (activation == Activation::k##id) return activate_all<Activation::k##id, Out>(t); \
  }
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
  if constexpr (kInDouble) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) t[i] = activate_accurate(t[i], activation);
  }
}

}  // namespace octofuse
