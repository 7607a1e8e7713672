// What the dp4a kernels share: a warp's way through its weights, the vectors of a block's few outputs, and the formula
// over one of them a thread.
#pragma once

#include "gemm/skinny/stream.cuh"

namespace octofuse::skinny {

__device__ inline int32_t dot(const uint4& a, const uint4& b) {
  int32_t sum = __dp4a(static_cast<int>(a.x), static_cast<int>(b.x), 0);
  sum = __dp4a(static_cast<int>(a.y), static_cast<int>(b.y), sum);
  sum = __dp4a(static_cast<int>(a.z), static_cast<int>(b.z), sum);
  return __dp4a(static_cast<int>(a.w), static_cast<int>(b.w), sum);
}

struct NoDigits {
  __device__ void load(int) {}
  template <class Weights>
  __device__ void multiply(const Weights&) {}
};

// One token's outliers as digits, most of which are zero: a warp's sums of a digit and channel, [digit][kPitch], in
// shared memory, since registers bound how many weights are on their way.
template <int kChannels, int kPitch>
struct DigitSums {
  static constexpr int kDigits = kDigitRows - 1;
  const KernelArgs& args;
  int32_t* sums;
  bool any = false;
  uint4 digits[kDigits];

  __device__ DigitSums(const KernelArgs& args, int32_t* sums) : args(args), sums(sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kDigits * kChannels) sums[lane / kChannels * kPitch + lane % kChannels] = 0;
    __syncwarp();
  }

  // Of columns k to k + 15, while their weights are still on their way.
  __device__ void load(int k) {
    any = reinterpret_cast<const uint16_t*>(args.factors + 2)[k / 16] != 0;  // a bit for each column
    if (!any) return;
#pragma unroll
    for (int i = 0; i < kDigits; ++i) digits[i] = load_or_zero(args.x + (i + 1) * args.ldx + k, true);
  }

  __device__ void multiply(const uint4 (&w)[kChannels]) {
    if (!any) return;
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
#pragma unroll
      for (int channel = 0; channel < kChannels; ++channel) {
        atomicAdd(sums + i * kPitch + channel, dot(w[channel], digits[i]));
      }
    }
  }
};

// A warp's channels, in steps of kSpan bytes times the warps that share K.
template <int kTokens, int kChannels>
struct WeightStream {
  const KernelArgs& args;
  int channels, k, step;  // this warp's channels that exist; this lane's column, and from one to the next
  const int8_t* row;      // of the first channel
  uint4 w[kChannels];
  int32_t acc[kChannels][kTokens] = {};

  __device__ WeightStream(const KernelArgs& args, int n, int k)
      : args(args),
        channels(min(args.warp_channels, args.output.n - n)),
        k(k),
        step(kSpan << args.log_k_warps),
        row(args.w + static_cast<int64_t>(n) * args.ldw) {}

  __device__ void load() {
    const int8_t* at = row + k;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      w[i] = load_once_or_zero(at, i < channels && k < args.k);
      at += args.ldw;
    }
  }

  __device__ void multiply(const int8_t* tokens, int64_t ldx) {
    NoDigits none;
    multiply(tokens, ldx, none);
  }

  // digits: of outliers, multiplied by the same weights.
  template <class Digits>
  __device__ void multiply(const int8_t* tokens, int64_t ldx, Digits& digits) {
#pragma unroll 1
    while (k < args.k) {
      uint4 x[kTokens];
#pragma unroll
      for (int m = 0; m < kTokens; ++m) x[m] = load_or_zero(tokens + m * ldx + k, m < args.output.m);
      digits.load(k);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
          acc[i][m] = __dp4a(static_cast<int>(w[i].x), static_cast<int>(x[m].x), acc[i][m]);
          acc[i][m] = __dp4a(static_cast<int>(w[i].y), static_cast<int>(x[m].y), acc[i][m]);
          acc[i][m] = __dp4a(static_cast<int>(w[i].z), static_cast<int>(x[m].z), acc[i][m]);
          acc[i][m] = __dp4a(static_cast<int>(w[i].w), static_cast<int>(x[m].w), acc[i][m]);
        }
      }
      digits.multiply(w);
      k += step;
      load();
    }
    __syncwarp();
  }

  // The warp's sums to `sums` ([token][pitch]), lane by lane.
  __device__ void store(int32_t* sums, int pitch, int lane) {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      int32_t mine = 0;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        const int32_t sum = __reduce_add_sync(kFullWarp, acc[i][m]);
        if (lane == i) mine = sum;
      }
      if (lane < kChannels) sums[m * pitch + lane] = mine;
    }
  }
};

// What the vector warp loads: the tile's vectors, those of the weights before earlier kernels have to be
// finished, and its residual in fp32, [token][channel].
template <int kTokens, int kChannels>
__device__ void load_vector_warp(const KernelArgs& args, int n0, int channels, int lane, float* residuals,
                                 TileVectors<kTokens, kChannels>& vectors) {
  const EpilogueArgs& e = args.epilogue;
  const TileOutput& output = args.output;
  PendingVectors<32, kTokens, kChannels> pending;
  if (!args.constant_weight) wait_for_predecessors();
  pending.load_channels(e, output, n0, lane);
  if (!args.constant_weight) pending.load_tokens(e, output, 0, lane);  // in flight together
  pending.store_channels(e, output, n0, lane, vectors);
  if (args.constant_weight) {
    wait_for_predecessors();
    pending.load_tokens(e, output, 0, lane);
  }
  const bool half = e.residual_type != DType::kFloat32;
#pragma unroll 4
  for (int i = lane; e.residual != nullptr && i < output.m << args.log_channels; i += 32) {
    const int m = i >> args.log_channels;
    const int n = i & ((1 << args.log_channels) - 1);
    const int64_t at = m * e.residual_ld + min(n0 + n, output.n - 1);
    const uint32_t bits =
        half ? static_cast<const uint16_t*>(e.residual)[at] : static_cast<const uint32_t*>(e.residual)[at];
    if (n < channels) residuals[m * channels + n] = bias_of(bits, e.residual_type);
  }
  pending.store_tokens(e, output, 0, lane, vectors);
}

template <class Out, class Sum>
__device__ void finish_one(const EpilogueArgs& e, Out* out, Sum sum, const Operands<1>& operands, float out_inverse,
                           bool stores) {
  Sum acc[1] = {sum};
  Out values[1];
  const auto activate = [&](auto& t) { activate_by<Out, false>(e.activation, t); };
  epilogue<Out>(acc, operands, activate, e.clamp_low, out_inverse, values);
  if (stores) *out = values[0];
}

template <class Sum>
__device__ inline void finish_one(const EpilogueArgs& e, const TileOutput& output, int64_t at, Sum sum,
                                  const Operands<1>& operands, float out_inverse, bool stores) {
  switch (output.type) {
    case DType::kFloat16:
      return finish_one(e, static_cast<__half*>(output.out) + at, sum, operands, out_inverse, stores);
    case DType::kBFloat16:
      return finish_one(e, static_cast<__nv_bfloat16*>(output.out) + at, sum, operands, out_inverse, stores);
    case DType::kFloat32:
      return finish_one(e, static_cast<float*>(output.out) + at, sum, operands, out_inverse, stores);
    case DType::kInt8:
      return finish_one(e, static_cast<int8_t*>(output.out) + at, sum, operands, out_inverse, stores);
    default:
      if (stores) static_cast<int32_t*>(output.out)[at] = static_cast<int32_t>(sum);
  }
}

}  // namespace octofuse::skinny
