// What follows the sums of a low-bit product: the formula of epilogue/formula.cuh, with the sum in the place of
// float(acc) * w_scale; where sums are integers, the formula itself.
#pragma once

#include "device/ptx.cuh"
#include "epilogue/formula.cuh"
#include "lowbit/codes.cuh"

namespace octofuse::lowbit {

// What the formula reads beside kCount sums side by side, as it lies in memory: converted only when the sums are there,
// so that nothing waits for it before.
template <int kCount>
struct Addends {
  uint16_t w_scale[kCount] = {}, bias[kCount] = {}, residual[kCount] = {};
  float x_scale = 1.0F;
  float out_scale = 1.0F;
};

struct Epilogue {
  ScaleView x_scale, out_scale;
  const uint16_t* w_scale;  // of each channel, beside sums that are integers; else null
  float w_unit = 1.0F;      // times this power of two
  const uint16_t* bias;
  Activation activation;
  const uint16_t* residual;
  int64_t residual_ld;
  void* out;
  int64_t ldo;
  bool whole_quads;  // 4 outputs can be written at once, and their addends read
  bool to_int8;
  bool gated;  // see store()
  DType type;

  explicit Epilogue(const LowbitArgs& args)
      : x_scale(args.epilogue.x_scale),
        out_scale(args.epilogue.out_scale),
        w_scale(has_integers(args) ? static_cast<const uint16_t*>(args.scale) : nullptr),
        bias(static_cast<const uint16_t*>(args.epilogue.bias)),
        activation(args.epilogue.activation),
        residual(static_cast<const uint16_t*>(args.epilogue.residual)),
        residual_ld(args.epilogue.residual_ld),
        out(args.out),
        ldo(args.gated ? args.n / 2 : args.n),
        whole_quads(args.n % 4 == 0 && residual_ld % 4 == 0 && is_aligned(out, 8) && is_aligned(w_scale, 8) &&
                    is_aligned(bias, 8) && is_aligned(residual, 8)),
        to_int8(args.out_type == DType::kInt8),
        gated(args.gated),
        type(args.type) {}

  // Of outputs n to n + kCount - 1 of a token, before the gate.
  template <int kCount>
  __device__ Addends<kCount> load(int token, int n) const {
    Addends<kCount> addends;
    addends.x_scale = scale_at(x_scale, token);
    if (to_int8) addends.out_scale = scale_at(out_scale, 0);
    if (w_scale != nullptr) load_row(w_scale + n, n, addends.w_scale);
    if (bias != nullptr) load_row(bias + n, n, addends.bias);
    if (residual != nullptr) load_row(residual + token * residual_ld + n, n, addends.residual);
    return addends;
  }

  // float(sum) times this is the formula's float(acc) * w_scale, as powers of two do not change what is rounded.
  __device__ float scaled(uint16_t of_channel) const { return half_of(of_channel, type) * w_unit; }

  template <int kCount>
  __device__ void store(const int32_t (&sums)[kCount], const Addends<kCount>& addends, int token, int n) const {
    float t[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) t[i] = __fmul_rn(static_cast<float>(sums[i]), scaled(addends.w_scale[i]));
    store_as<true>(t, addends, token, n);
  }

  template <int kCount>
  __device__ void store(const float (&sums)[kCount], const Addends<kCount>& addends, int token, int n) const {
    store_as<false>(sums, addends, token, n);
  }

 private:
  // Gated: all lanes of the warp are here with one sum each, a gate's or, 16 lanes on, its value's, and each step is
  // rounded to `type`, as in row_pass(). kIntegers: where the output is int8 the activation is that of the int8 linear.
  template <bool kIntegers, int kCount>
  __device__ void store_as(const float (&sums)[kCount], const Addends<kCount>& addends, int token, int n) const {
    float t[kCount];
    float of_bias[kCount];
    float of_residual[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      t[i] = __fmul_rn(sums[i], addends.x_scale);
      of_bias[i] = bias != nullptr ? half_of(addends.bias[i], type) : -0.0F;
      of_residual[i] = residual != nullptr ? half_of(addends.residual[i], type) : -0.0F;
    }
    const auto rounded = [&](float value) { return half_of(half_bits(value, type), type); };
    const auto activate = [&](float (&values)[kCount]) {
      float factor = 1.0F;
      if (kCount == 1 && gated) {
        values[0] = rounded(values[0]);
        factor = __shfl_down_sync(kFullWarp, values[0], kTileRows);
      }
#pragma unroll 1
      for (int turn = 0; turn < (activation == Activation::kNone ? 0 : kCount); ++turn) {  // its code is long
        float first[1] = {values[0]};
        if (kIntegers && to_int8 && !gated) {
          activate_by<int8_t, false>(activation, first);
        } else {
          activate_by<__half, false>(activation, first);
        }
#pragma unroll
        for (int i = 1; i < kCount; ++i) values[i - 1] = values[i];
        values[kCount - 1] = first[0];
      }
      if (kCount == 1 && gated) values[0] = rounded(__fmul_rn(rounded(values[0]), factor));
    };
    float unrounded[kCount];
    finish(t, of_bias, activate, of_residual, 0, 0.0F, unrounded);
    if (kCount == 1 && gated && threadIdx.x % 32 >= kTileRows) return;
    if (to_int8) {
      int8_t q[kCount];
      round_to(unrounded, -127, reciprocal(addends.out_scale), q);
      return store_row(static_cast<int8_t*>(out) + token * ldo + n, n, q);
    }
    uint16_t bits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = half_bits(unrounded[i], type);
    store_row(static_cast<uint16_t*>(out) + token * ldo + n, n, bits);
  }

  template <class T>
  struct alignas(4 * sizeof(T)) Four {
    T values[4];
  };

  template <int kCount>
  __device__ void load_row(const uint16_t* from, int n, uint16_t (&to)[kCount]) const {
    if constexpr (kCount == 4) {
      if (whole_quads) {
        const Four<uint16_t> four = *reinterpret_cast<const Four<uint16_t>*>(from);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = four.values[i];
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kCount == 1 || n + i < ldo) to[i] = from[i];
    }
  }

  template <class T, int kCount>
  __device__ void store_row(T* to, int n, const T (&values)[kCount]) const {
    if constexpr (kCount == 4) {
      if (whole_quads) {
        *reinterpret_cast<Four<T>*>(to) = {values[0], values[1], values[2], values[3]};
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kCount == 1 || n + i < ldo) to[i] = values[i];
    }
  }
};

}  // namespace octofuse::lowbit
