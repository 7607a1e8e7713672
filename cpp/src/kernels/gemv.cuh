// What the dp4a kernels share: the vectors of a block's few outputs, and the formula over one of them a thread.
#pragma once

#include "kernels/skinny.cuh"

namespace octofuse::skinny {

// What the vector warp brings: the tile's vectors, those of the weights before earlier kernels have to be finished, and
// its residual in fp32, [token][rows].
template <int kTokens, int kChannels>
__device__ void bring_vectors(const KernelArgs& args, int n0, int channels, int lane, float* residuals,
                              TileVectors<kTokens, kChannels>& vectors) {
  const EpilogueArgs& e = args.epilogue;
  const TileOutput& output = args.output;
  PendingVectors<32, kTokens, kChannels> pending;
  if (!args.constant_weight) wait_for_earlier_kernels();
  pending.load_channels(e, output, n0, lane);
  if (!args.constant_weight) pending.load_tokens(e, output, 0, lane);  // in flight together
  pending.store_channels(e, output, n0, lane, vectors);
  if (args.constant_weight) {
    wait_for_earlier_kernels();
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
