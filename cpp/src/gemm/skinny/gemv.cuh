// What the dp4a kernels share: a warp's way through its weights, the vectors of a block's few outputs, and the formula
// over one of them a thread.
#pragma once

#include "gemm/skinny/outliers.cuh"

namespace octofuse::skinny {

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
    int no_memory = 0;
    NoOutlierSums<kTokens, kChannels> none(args, no_memory);
    multiply(tokens, ldx, none);
  }

  template <class Outliers>
  __device__ void multiply(const int8_t* tokens, int64_t ldx, Outliers& outliers) {
#pragma unroll 1
    while (k < args.k) {
      const uint32_t columns = outliers.columns(k);
      uint4 x[kTokens];
#pragma unroll
      for (int m = 0; m < kTokens; ++m) x[m] = load_or_zero(tokens + m * ldx + k, m < args.output.m);
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
      outliers.add(columns, k, w);
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

// What the vector warp loads_vectors: the tile's vectors, those of the weights before earlier kernels have to be
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

template <class Out>
__device__ void finish_one(const EpilogueArgs& e, Out* out, int32_t sum, const Operands<1>& operands, float out_inverse,
                           bool stores) {
  int32_t acc[1] = {sum};
  Out values[1];
  const auto activate = [&](auto& t) { activate_by<Out, false>(e.activation, t); };
  epilogue<Out>(acc, operands, activate, e.clamp_low, out_inverse, values);
  if (stores) *out = values[0];
}

__device__ inline void finish_one(const EpilogueArgs& e, const TileOutput& output, int64_t at, int32_t sum,
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
      if (stores) static_cast<int32_t*>(output.out)[at] = sum;
  }
}

}  // namespace octofuse::skinny
