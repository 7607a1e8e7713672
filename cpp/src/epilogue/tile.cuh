// From the accumulators of a tile in shared memory to finished output rows, for kernels that run this code once per
// block: there, waiting for scales and fetching instructions cost more than the arithmetic. So the vectors are read
// early into shared memory, and the loops are short and rolled, with every run-time switch outside.
#pragma once

#include "device/chain.cuh"
#include "epilogue/formula.cuh"
#include "epilogue/output.h"

namespace octofuse {

// The vectors of a tile, widened to 32 bits and neutral where absent: bias -0 (adding it changes no value, not even the
// sign of a zero), zero point and sum 0. kZeros: there are zero points.
template <int kTokens, int kChannels, bool kZeros_ = true>
struct TileVectors {
  static constexpr bool kZeros = kZeros_;
  alignas(16) float w_scale[kChannels];
  alignas(16) float bias[kChannels];
  alignas(16) int32_t minus_w_sum[kZeros ? kChannels : 1];
  alignas(16) float x_scale[kTokens];
  alignas(16) int32_t x_zero[kZeros ? kTokens : 1];
  float out_inverse;  // 1 / out_scale of an output in 8 bits
};

__device__ inline float bias_of(uint32_t bits, DType type) {
  switch (type) {
    case DType::kFloat16:
      return to_float(__ushort_as_half(static_cast<uint16_t>(bits)));
    case DType::kBFloat16:
      return to_float(__ushort_as_bfloat16(static_cast<uint16_t>(bits)));
    default:
      return __uint_as_float(bits);
  }
}

// The vectors of the tile at (m0, n0) on their way from global memory into the registers of kThreads threads. Nothing
// here uses what it loads, so that all loads are in flight together, and beside whatever stands between load() and
// store(). The weights' vectors may come before earlier kernels have finished, where nothing in flight writes them.
template <int kThreads, int kTokens, int kChannels>
struct PendingVectors {
  static constexpr int kOfChannels = (kChannels + kThreads - 1) / kThreads;
  static constexpr int kOfTokens = (kTokens + kThreads - 1) / kThreads;
  float w_scale[kOfChannels];
  uint32_t bias[kOfChannels];
  float x_scale[kOfTokens];
  float out_scale;

  __device__ void load(const EpilogueArgs& e, const TileOutput& output, int m0, int n0, bool constant_weight,
                       int thread) {
    if (!constant_weight) wait_for_predecessors();
    load_channels(e, output, n0, thread);
    wait_for_predecessors();
    load_tokens(e, output, m0, thread);
  }

  __device__ void load_channels(const EpilogueArgs& e, const TileOutput& output, int n0, int thread) {
#pragma unroll
    for (int i = 0; i < kOfChannels; ++i) {
      w_scale[i] = scale_at(e.w_scale, min(n0 + thread + kThreads * i, output.n - 1));
    }
    load_bias(e, output, n0 + thread);
  }

  __device__ void load_tokens(const EpilogueArgs& e, const TileOutput& output, int m0, int thread) {
#pragma unroll
    for (int i = 0; i < kOfTokens; ++i) x_scale[i] = scale_at(e.x_scale, min(m0 + thread + kThreads * i, output.m - 1));
    out_scale = scale_at(e.out_scale, 0);
  }

  __device__ void load_bias(const EpilogueArgs& e, const TileOutput& output, int first) {
    const bool half = e.bias_type != DType::kFloat32;
#pragma unroll
    for (int i = 0; i < kOfChannels; ++i) {
      const int n = min(first + kThreads * i, output.n - 1);
      bias[i] = 0;
      if (e.bias == nullptr) continue;
      bias[i] = half ? static_cast<const uint16_t*>(e.bias)[n] : static_cast<const uint32_t*>(e.bias)[n];
    }
  }

  template <class Vectors>
  __device__ void store(const EpilogueArgs& e, const TileOutput& output, int m0, int n0, int thread,
                        Vectors& vectors) const {
    store_channels(e, output, n0, thread, vectors);
    store_tokens(e, output, m0, thread, vectors);
  }

  template <class Vectors>
  __device__ void store_channels(const EpilogueArgs& e, const TileOutput& output, int n0, int thread,
                                 Vectors& vectors) const {
    for (int i = thread; Vectors::kZeros && i < kChannels; i += kThreads) {
      vectors.minus_w_sum[i] = e.w_sum != nullptr ? -e.w_sum[min(n0 + i, output.n - 1)] : 0;
    }
#pragma unroll
    for (int i = 0; i < kOfChannels; ++i) {
      const int n = thread + kThreads * i;
      if (n >= kChannels) break;
      vectors.w_scale[n] = w_scale[i];
      vectors.bias[n] = e.bias == nullptr ? -0.0F : bias_of(bias[i], e.bias_type);
    }
  }

  template <class Vectors>
  __device__ void store_tokens(const EpilogueArgs& e, const TileOutput& output, int m0, int thread,
                               Vectors& vectors) const {
    for (int i = thread; Vectors::kZeros && i < kTokens; i += kThreads) {
      vectors.x_zero[i] = e.w_sum != nullptr ? zero_at(e.x_zero, min(m0 + i, output.m - 1)) : 0;
    }
#pragma unroll
    for (int i = 0; i < kOfTokens; ++i) {
      const int m = thread + kThreads * i;
      if (m < kTokens) vectors.x_scale[m] = x_scale[i];
    }
    if (size_of(output.type) == 1 && thread == 0) vectors.out_inverse = reciprocal(out_scale);
  }
};

template <int kThreads, int kTokens, int kChannels, bool kZeros>
__device__ void load_vectors(const EpilogueArgs& e, const TileOutput& output, int m0, int n0, bool constant_weight,
                             int thread, TileVectors<kTokens, kChannels, kZeros>& vectors) {
  PendingVectors<kThreads, kTokens, kChannels> pending;
  pending.load(e, output, m0, n0, constant_weight, thread);
  pending.store(e, output, m0, n0, thread, vectors);
}

// What one of kThreads threads finishes: kPiece channels, always the same, of every step-th token of a part of the
// tile.
template <int kTokens, int kChannels, int kThreads, int kPiece_ = 8>
struct TileShare {
  static constexpr int kPiece = kPiece_;
  static constexpr int kPieces = kChannels / kPiece;  // of a token
  static constexpr int step = kThreads / kPieces;     // tokens that the threads cover at once
  int m, m_end, n;                                    // in the tile; nothing to do where m >= m_end
  int m0, n0;                                         // the tile's first token and channel
  bool stores = true;

  // Part `part` of `parts` of the tile's tokens.
  __device__ TileShare(const TileOutput& output, int m0, int n0, int part, int parts, int thread) : m0(m0), n0(n0) {
    const int tokens = max(0, min(kTokens, output.m - m0));
    const int size = (tokens + parts - 1) / parts;
    m = part * size + thread / kPieces;
    n = thread % kPieces * kPiece;
    m_end = thread < step * kPieces && n0 + n < output.n ? min((part + 1) * size, tokens) : 0;
  }

  // One token, nothing stored, residuals not read: for the sake of the epilogue's code, which is in the instruction
  // cache afterwards, while operands are still on their way.
  __device__ void rehearse() {
    m = 0;
    m_end = 1;
    n = 0;
    stores = false;
  }
};

// Wide accesses, and of the run-time switches the residual's alone; `accs` is [tokens][kPitch], activate(t) the
// activation of 8 values.
template <class Out, int kPitch, class Share, class Vectors, class Sum, class Activate>
__device__ void finish_wide(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors, const Share& share,
                            const Sum* accs, Activate activate) {
  constexpr int kPiece = Share::kPiece;
  Operands<kPiece> operands;
  Coordinates<kPiece> at;
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    operands.w_scale[j] = vectors.w_scale[share.n + j];
    operands.bias[j] = vectors.bias[share.n + j];
    operands.minus_w_sum[j] = vectors.minus_w_sum[share.n + j];
    operands.residual[j] = -0.0F;
    at.n[j] = share.n0 + share.n + j;
  }
  const bool adds = !std::is_same_v<Out, int32_t> && e.residual != nullptr && share.stores;
  Out* out = static_cast<Out*>(output.out) + output.offset(share.m0 + share.m, at.n[0]);
#pragma unroll 2
  for (int m = share.m; m < share.m_end; m += share.step) {
    struct alignas(16) Sums {
      Sum acc[kPiece];
    } sums = *reinterpret_cast<const Sums*>(accs + m * kPitch + share.n);
    const float x_scale = vectors.x_scale[m];
    const int32_t x_zero = vectors.x_zero[m];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      operands.x_scale[j] = x_scale;
      operands.x_zero[j] = x_zero;
      at.m[j] = share.m0 + m;
    }
    if (adds) load_residual_row<true>(at, e, operands.residual);
    Out values[kPiece];
    epilogue<Out>(sums.acc, operands, activate, e.clamp_low, vectors.out_inverse, values);
    if (share.stores) store_piece<true>(out, at, values);
    out += share.step * output.ldo;
  }
}

// Any alignment and any switch.
template <class Out, int kPitch, class Share, class Vectors, class Sum, class Activate>
__device__ void finish_narrow(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                              const Share& share, const Sum* accs, Activate activate) {
  constexpr int kPiece = Share::kPiece;
#pragma unroll 1
  for (int m = share.m; m < share.m_end; m += share.step) {
    Operands<kPiece> operands;
    Coordinates<kPiece> at;
    Sum acc[kPiece];
    at.m_end = output.m;
    at.n_end = output.n;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      acc[j] = accs[m * kPitch + share.n + j];
      at.m[j] = share.m0 + m;
      at.n[j] = share.n0 + share.n + j;
      operands.w_scale[j] = vectors.w_scale[share.n + j];
      operands.bias[j] = vectors.bias[share.n + j];
      operands.minus_w_sum[j] = vectors.minus_w_sum[share.n + j];
      operands.x_scale[j] = vectors.x_scale[m];
      operands.x_zero[j] = vectors.x_zero[m];
      operands.residual[j] = -0.0F;
    }
    if (!std::is_same_v<Out, int32_t> && e.residual != nullptr && share.stores) {
      load_residual(at, e, operands.residual);
    }
    Out values[kPiece];
    epilogue<Out>(acc, operands, activate, e.clamp_low, vectors.out_inverse, values);
    if (!share.stores) continue;
    store_piece<false>(static_cast<Out*>(output.out) + output.offset(at.m[0], at.n[0]), at, values);
  }
}

// finish_narrow with every activation that `Out` can take without double precision.
template <class Out, int kPitch, class Share, class Vectors, class Sum>
__device__ void finish_narrow(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                              const Share& share, const Sum* accs) {
  finish_narrow<Out, kPitch>(e, output, vectors, share, accs,
                             [&](auto& t) { activate_by<Out, false>(e.activation, t); });
}

template <class Out, Activation kActivation, int kPitch, class Share, class Vectors, class Sum>
__device__ void finish_wide(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors, const Share& share,
                            const Sum* accs) {
  finish_wide<Out, kPitch>(e, output, vectors, share, accs, [](auto& t) {
    if constexpr (kActivation != Activation::kNone) activate_all<kActivation, Out>(t);
  });
}

template <class Out, int kPitch, class Share, class Vectors, class Sum>
__device__ void finish_as(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors, const Share& share,
                          const Sum* accs) {
  if (!output.wide) return finish_narrow<Out, kPitch>(e, output, vectors, share, accs);
  // Of fp32 outputs the exact activations alone: select() sends the others elsewhere, where they are evaluated in
  // double.
  if constexpr (!std::is_same_v<Out, int32_t>) {
    switch (e.activation) {
#define OCTOFUSE_ACTIVATION(id, name)                                                         \
  case Activation::k##id:                                                                     \
    if constexpr (!std::is_same_v<Out, float> || ActivationOf<Activation::k##id>::kIsExact) { \
      return finish_wide<Out, Activation::k##id, kPitch>(e, output, vectors, share, accs);    \
    }                                                                                         \
    __trap();
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
      case Activation::kNone:
        break;
    }
  }
  finish_wide<Out, Activation::kNone, kPitch>(e, output, vectors, share, accs);
}

// The formula over a thread's share of the tile, 8 channels at a time.
template <int kPitch, class Share, class Vectors, class Sum>
__device__ void finish_tile(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors, const Share& share,
                            const Sum* accs) {
  static_assert(Share::kPiece == 8);
  if constexpr (std::is_same_v<Sum, float>) {  // float8 operands: an output in float8 too, none that is raw
    if (output.type == DType::kE4M3) return finish_as<__nv_fp8_e4m3, kPitch>(e, output, vectors, share, accs);
  }
  switch (output.type) {
    case DType::kFloat16:
      return finish_as<__half, kPitch>(e, output, vectors, share, accs);
    case DType::kBFloat16:
      return finish_as<__nv_bfloat16, kPitch>(e, output, vectors, share, accs);
    case DType::kFloat32:
      return finish_as<float, kPitch>(e, output, vectors, share, accs);
    case DType::kInt8:
      return finish_as<int8_t, kPitch>(e, output, vectors, share, accs);
    default:
      if constexpr (std::is_same_v<Sum, int32_t>) finish_as<int32_t, kPitch>(e, output, vectors, share, accs);
  }
}

// For tiles of a few outputs: short pieces keep the registers few that bound how many loads an SM has in flight.
template <int kPitch, class Share, class Vectors, class Sum>
__device__ void finish_few(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors, const Share& share,
                           const Sum* accs) {
  switch (output.type) {
    case DType::kFloat16:
      return finish_narrow<__half, kPitch>(e, output, vectors, share, accs);
    case DType::kBFloat16:
      return finish_narrow<__nv_bfloat16, kPitch>(e, output, vectors, share, accs);
    case DType::kFloat32:
      return finish_narrow<float, kPitch>(e, output, vectors, share, accs);
    case DType::kInt8:
      return finish_narrow<int8_t, kPitch>(e, output, vectors, share, accs);
    default:
      return finish_narrow<int32_t, kPitch>(e, output, vectors, share, accs);
  }
}

}  // namespace octofuse
