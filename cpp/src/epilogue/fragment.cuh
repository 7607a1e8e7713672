// From wgmma's accumulators in registers to finished output rows, a piece of the tile at a time: a warpgroup's 64
// tokens by kCols channels, through a small staging buffer, so that global stores are whole sectors. For kernels that
// work through many tiles beside running tensor cores: there an instruction of the epilogue takes about 5 cycles
// (measured on an H200) and a branch 70, so every usual combination of the formula's switches is a kernel of its own,
// without a branch (8192 x 3072 x 768: 59 us with a branch for each switch, 44 without); all other calls share one body
// with the branches. A kernel that runs its epilogue once is faster with epilogue/tile.cuh: it would fetch this much
// code cold.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/ptx.cuh"
#include "epilogue/tile.cuh"

namespace octofuse {

// Thread t of 128 holds, in wgmma's order, accumulator i at token 16 * (t / 32) + t % 32 / 4 + i / 2 % 2 * 8 and
// channel t % 4 * 2 + i / 4 * 8 + i % 2 of the piece.
template <int kCols>
struct Piece {
  static constexpr int kSize = kCols / 2;  // accumulators of a thread
  static constexpr int kTokens = 64;
  static constexpr int kOctets = kCols / 8;  // 8 channels each, of a token
  // Bytes between staged tokens: 16 more than their length spreads a fragment's tokens over all banks.
  static constexpr int pitch(int element) { return kCols * element + 16; }
  static constexpr int kStagingBytes = kTokens * pitch(2);  // four-byte outputs are not staged

  int m0, n0;          // the tile's first token and channel
  int token, channel;  // the piece's first ones, in the tile
  int thread;          // of the warpgroup's 128
  uint32_t barrier;    // the warpgroup's own
  uint8_t* staging;    // kStagingBytes, at a multiple of 1024 bytes
  const CUtensorMap* out_map;

  // Of this thread's accumulator i, in the piece.
  __device__ int token_of(int i) const { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
  __device__ int channel_of(int i) const { return thread % 4 * 2 + i / 4 * 8 + i % 2; }
};

// acc -= x_zero * w_sum
template <class P, class Vectors>
__device__ inline void subtract_zero_points(const P&, const Vectors&, float (&)[P::kSize]) {}  // float8 has none

template <class P, class Vectors>
__device__ inline void subtract_zero_points(const P& piece, const Vectors& vectors, int32_t (&acc)[P::kSize]) {
  const int32_t* zero = vectors.x_zero + piece.token;
  const int32_t* minus_sum = vectors.minus_w_sum + piece.channel;
#pragma unroll
  for (int i = 0; i < P::kSize; ++i) acc[i] += zero[piece.token_of(i)] * minus_sum[piece.channel_of(i)];
}

// t = float(acc) * w_scale * x_scale + bias
template <class P, class Vectors, class Sum>
__device__ inline void dequantize(const P& piece, const Vectors& vectors, const Sum (&acc)[P::kSize],
                                  float (&t)[P::kSize]) {
  const float x_scale[2] = {vectors.x_scale[piece.token + piece.token_of(0)],
                            vectors.x_scale[piece.token + piece.token_of(2)]};
#pragma unroll
  for (int i = 0; i < P::kSize; i += 4) {
    const int n = piece.channel + piece.channel_of(i);
    const float2 w_scale = *reinterpret_cast<const float2*>(vectors.w_scale + n);
    const float2 bias = *reinterpret_cast<const float2*>(vectors.bias + n);
#pragma unroll
    for (int j = i; j < i + 4; ++j) {
      const float scaled = __fmul_rn(float_of_sum(acc[j]), j % 2 == 0 ? w_scale.x : w_scale.y);
      t[j] = __fadd_rn(__fmul_rn(scaled, x_scale[j / 2 % 2]), j % 2 == 0 ? bias.x : bias.y);
    }
  }
}

// t += residual, by pairs of channels where they can be read at once. Elements outside read their nearest neighbour
// inside; what comes of them is not stored.
template <class T, class P>
__device__ inline void add_residual_as(const P& piece, const EpilogueArgs& e, const TileOutput& output, bool wide,
                                       float (&t)[P::kSize]) {
  struct alignas(2 * sizeof(T)) Pair {
    T x, y;
  };
#pragma unroll
  for (int i = 0; i < P::kSize; i += 2) {
    const int64_t m = min(piece.m0 + piece.token + piece.token_of(i), output.m - 1);
    const int n = piece.n0 + piece.channel + piece.channel_of(i);
    const T* row = static_cast<const T*>(e.residual) + m * e.residual_ld;
    Pair pair;
    if (wide) {
      pair = *reinterpret_cast<const Pair*>(row + min(n, output.n - 2));
    } else {
      pair = {row[min(n, output.n - 1)], row[min(n + 1, output.n - 1)]};
    }
    t[i] = __fadd_rn(t[i], to_float(pair.x));
    t[i + 1] = __fadd_rn(t[i + 1], to_float(pair.y));
  }
}

template <class P>
__device__ inline void add_residual(const P& piece, const EpilogueArgs& e, const TileOutput& output,
                                    float (&t)[P::kSize]) {
  switch (e.residual_type) {
    case DType::kFloat16:
      return add_residual_as<__half>(piece, e, output, output.wide, t);
    case DType::kBFloat16:
      return add_residual_as<__nv_bfloat16>(piece, e, output, output.wide, t);
    default:
      return add_residual_as<float>(piece, e, output, output.wide, t);
  }
}

// Four-byte outputs: a fragment's pairs of channels straight to memory, where a quad of threads writes a whole sector.
template <class Out, class P>
__device__ inline void store_pairs(const P& piece, const TileOutput& output, const Out (&values)[P::kSize]) {
  struct alignas(8) Pair {
    Out x, y;
  };
#pragma unroll
  for (int i = 0; i < P::kSize; i += 2) {
    const int m = piece.m0 + piece.token + piece.token_of(i);
    const int n = piece.n0 + piece.channel + piece.channel_of(i);
    Out* out = static_cast<Out*>(output.out) + m * output.ldo + n;
    if (m >= output.m || n >= output.n) continue;
    if (output.wide) {
      *reinterpret_cast<Pair*>(out) = {values[i], values[i + 1]};
    } else {
      out[0] = values[i];
      if (n + 1 < output.n) out[1] = values[i + 1];
    }
  }
}

// Through the staging buffer, 8 channels of a token at a time.
template <class Out, class P>
__device__ inline void store_staged(const P& piece, const TileOutput& output, bool wide,
                                    const Out (&values)[P::kSize]) {
  constexpr int kPitch = P::pitch(sizeof(Out));
  struct alignas(2 * sizeof(Out)) Pair {
    Out x, y;
  };
  struct alignas(8 * sizeof(Out)) Octet {
    Out values[8];
  };
  uint8_t* first = piece.staging + piece.token_of(0) * kPitch + piece.channel_of(0) * static_cast<int>(sizeof(Out));
#pragma unroll
  for (int i = 0; i < P::kSize; i += 2) {
    *reinterpret_cast<Pair*>(first + i / 2 % 2 * 8 * kPitch + i / 4 * 8 * static_cast<int>(sizeof(Out))) = {
        values[i], values[i + 1]};
  }
  cutlass::arch::NamedBarrier::sync(128, piece.barrier);
#pragma unroll
  for (int i = 0; i < P::kTokens * P::kOctets / 128; ++i) {
    const int octet = piece.thread + 128 * i;
    const int token = octet / P::kOctets;
    const int m = piece.m0 + piece.token + token;
    const int n = piece.n0 + piece.channel + octet % P::kOctets * 8;
    const uint8_t* from = piece.staging + token * kPitch + octet % P::kOctets * static_cast<int>(sizeof(Octet));
    if (m >= output.m || n >= output.n) continue;
    const Octet values_of_octet = *reinterpret_cast<const Octet*>(from);
    Out* out = static_cast<Out*>(output.out) + m * output.ldo + n;
    if (wide) {
      *reinterpret_cast<Octet*>(out) = values_of_octet;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (n + j < output.n) out[j] = values_of_octet.values[j];
      }
    }
  }
}

// Through the staging buffer by the copy engine, which leaves out what lies beyond the edges: 16-bit outputs, `values`
// as stmatrix takes them, in the swizzle that out_map has. Beside running tensor cores this is 3 % of a product's time
// less than store_staged (8192 x 4096 x 4096 on an H200): shared memory has half of its traffic. When it returns, the
// buffer that the next piece takes has been read.
template <class Out, class P>
__device__ inline void store_copied(const P& piece, const Out (&values)[P::kSize]) {
  constexpr int kRowBytes = P::kOctets * 16;
  const int lane = piece.thread % 32;
  const int row = piece.thread / 32 * 16 + lane % 16;
  const int turned = row * kRowBytes / 128 % P::kOctets;
  const uint32_t to = shared_address(piece.staging) + static_cast<uint32_t>(row * kRowBytes);
  const auto pair = [&](int i) { return *reinterpret_cast<const uint32_t*>(&values[2 * i]); };
#pragma unroll
  for (int i = 0; i < P::kSize / 2; i += 4) {  // 16 channels
    const int octet = (i / 2 + lane / 16) ^ turned;
    store_matrices(to + static_cast<uint32_t>(octet * 16), pair(i), pair(i + 1), pair(i + 2), pair(i + 3));
  }
  cute::tma_store_fence();
  if (piece.thread == 0) cute::tma_store_wait<0>();
  __syncwarp();
  cutlass::arch::NamedBarrier::sync(128, piece.barrier);
  if (piece.thread == 0) {
    cute::SM90_TMA_STORE_2D::copy(piece.out_map, piece.staging, piece.n0 + piece.channel, piece.m0 + piece.token);
    cute::tma_store_arrive();
  }
}

// The formula over one piece with a branch for each switch. Consecutive pieces of a warpgroup take two staging buffers
// in turn: then the barrier inside also says that the one before the last has been read.
struct AnyEpilogue {
  static constexpr bool kUnrolled = false;
  static constexpr bool kCopied = false;

  template <class P, class Vectors, class Sum>
  __device__ static void finish(const P& piece, const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                                Sum (&acc)[P::kSize]) {
    constexpr bool kFloats = std::is_same_v<Sum, float>;
    if constexpr (!kFloats) {
      if (output.type == DType::kInt32) return store_pairs(piece, output, acc);
    }
    float t[P::kSize];
    if (e.w_sum != nullptr) subtract_zero_points(piece, vectors, acc);
    dequantize(piece, vectors, acc, t);
    // fp32 outputs evaluate gelu and silu in double: select() sends them elsewhere.
    if (output.type == DType::kInt8) {
      activate_by<int8_t, false>(e.activation, t);
    } else {
      activate_by<__half, false>(e.activation, t);
    }
    if (e.residual != nullptr) add_residual(piece, e, output, t);
    if constexpr (kFloats) {
      if (output.type == DType::kE4M3) return store<__nv_fp8_e4m3>(piece, e, output, vectors, t);
    }
    switch (output.type) {
      case DType::kFloat16:
        return store<__half>(piece, e, output, vectors, t);
      case DType::kBFloat16:
        return store<__nv_bfloat16>(piece, e, output, vectors, t);
      case DType::kInt8:
        return store<int8_t>(piece, e, output, vectors, t);
      default:
        return store_pairs(piece, output, t);
    }
  }

  template <class Out, class P, class Vectors>
  __device__ static void store(const P& piece, const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                               const float (&t)[P::kSize]) {
    Out values[P::kSize];
    round_to(t, e.clamp_low, vectors.out_inverse, values);
    store_staged(piece, output, output.wide, values);
  }
};

// Symmetric, wide, and with no switch left.
template <class Out, Activation kActivation, bool kResidual>
struct UsualEpilogue {
  // Straight code for all pieces of a tile where it is short.
  static constexpr bool kUnrolled = kActivation == Activation::kNone || kActivation == Activation::kRelu;
  static constexpr bool kCopied = sizeof(Out) == 2;

  template <class P, class Vectors, class Sum>
  __device__ static void finish(const P& piece, const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                                Sum (&acc)[P::kSize]) {
    float t[P::kSize];
    dequantize(piece, vectors, acc, t);
    if constexpr (kActivation == Activation::kGelu) {
      activate_all<kActivation, Out>(t);  // long: a rolled loop
    } else if constexpr (kActivation != Activation::kNone) {
#pragma unroll
      for (int i = 0; i < P::kSize; ++i) t[i] = ActivationOf<kActivation>::template evaluate<Out>(t[i]);
    }
    if constexpr (kResidual) add_residual_as<Out>(piece, e, output, true, t);
    Out values[P::kSize];
    round_to(t, e.clamp_low, kIsScaled<Out> ? vectors.out_inverse : 0.0F, values);
    if constexpr (kCopied) {
      store_copied(piece, values);
    } else {
      store_staged(piece, output, true, values);
    }
  }
};

}  // namespace octofuse
