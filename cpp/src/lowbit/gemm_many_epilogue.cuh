// The end of a tile of gemm_many: from a consumer warpgroup's sums in registers to 64 channels of output rows, kPart
// tokens at a time through shared memory. Thread t of the warpgroup holds sum i of token i / 4 * 8 + t % 4 * 2 + i % 2
// and channel t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8.
//
// Outputs of 16 bits are finished where they are, and stmatrix transposes them to rows; all others cross shared memory
// as sums and are finished four channels at a time, which takes several times as long: an instruction beside running
// tensor cores takes 4 to 5 cycles.
#pragma once

#include "lowbit/gemm_many_producer.cuh"

namespace octofuse::lowbit {

constexpr int kPart = 32;                      // tokens
constexpr int kSumsOfPart = kPart / 2;         // of a thread
constexpr int kStagingBytes = kPart * 64 * 4;  // a warpgroup's: two parts in 16 bits, or the sums of one
constexpr int kMostTokens = 256;               // of a tile
constexpr int kManyStagingBytes = kStagingBytes + 2 * kMostTokens * 4;  // and behind it two tiles' token scales

// Drops the sums of the first part: registers have no addresses.
template <class Sum, int kSums>
__device__ inline void drop_part(Sum (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i + kSumsOfPart < kSums; ++i) sums[i] = sums[i + kSumsOfPart];
}

// The first of a thread's two channels in those of its warpgroup; the other is 8 further.
__device__ inline int first_channel(int thread) { return thread / 32 * kTileRows + thread % 32 / 4; }

// What both of them have in a row of [n], read before there are sums.
class ChannelPair {
  uint32_t bits_ = 0;

 public:
  // row: null for none. n: the warpgroup's first channel.
  __device__ ChannelPair(const uint16_t* row, const GemmArgs& args, int n) {
    if (row == nullptr) return;
    const int channel = n + first_channel(static_cast<int>(threadIdx.x) % 128);
    bits_ = row[min(channel, args.n - 1)] | static_cast<uint32_t>(row[min(channel + 8, args.n - 1)]) << 16;
  }
  // Of sum i.
  __device__ uint16_t of(int i) const { return static_cast<uint16_t>(bits_ >> (i / 2 % 2 * 16)); }
};

// The scales of a tile's tokens, read before there are sums: each would be a new line of memory to wait for at the end.
// A thread has those of two neighbouring tokens.
class TokenScales {
  float2 scales_{};

 public:
  __device__ TokenScales(const ManyArgs& args, int token) {
    const ScaleView& scales = args.epilogue.x_scale;
    if (scales.data == nullptr) return;
    const int first = token + static_cast<int>(threadIdx.x) % 128 * 2;
    scales_ = make_float2(scale_at(scales, min(first, args.m - 1)), scale_at(scales, min(first + 1, args.m - 1)));
  }
  // For the whole warpgroup. Two buffers in turn: all have read one before any of them writes it again.
  __device__ const float* spread(char* staging, int turn, int warpgroup) const {
    auto* const to = reinterpret_cast<float*>(staging + kStagingBytes) + turn % 2 * kMostTokens;
    reinterpret_cast<float2*>(to)[threadIdx.x % 128] = scales_;
    cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));
    return to;
  }
};

// ---- outputs of 16 bits ----

template <class Traits>
class FragmentEpilogue {
  const ManyArgs& args_;
  int thread_;
  char* staging_;
  int n_, channel_;  // the first channel, of the warpgroup and of this thread
  ChannelPair bias_, w_scale_;
  const float* x_scale_;  // of the tile's tokens
  uint16_t residual_[kSumsOfPart];

 public:
  // staging: this warpgroup's. n: its first channel. x_scale: of the tile's tokens, if each has one.
  __device__ FragmentEpilogue(const ManyArgs& args, char* staging, int n, ChannelPair bias, ChannelPair w_scale,
                              const float* x_scale)
      : args_(args),
        thread_(static_cast<int>(threadIdx.x) % 128),
        staging_(staging),
        n_(n),
        channel_(n + first_channel(thread_)),
        bias_(bias),
        w_scale_(w_scale),
        x_scale_(x_scale) {}

  // token: the tile's first.
  __device__ void finish(typename Traits::Sum (&sums)[Traits::kSums], int token) {
    // Two buffers in turn: a warp reads one while it fills the other. Where a tile has an odd number of parts the next
    // one begins with the buffer that was last, behind all products.
    if (args_.epilogue.residual != nullptr) load_residual(token);
    if (args_.epilogue.activation == Activation::kNone) {
#pragma unroll
      for (int part = 0; part < Traits::kTokens / kPart; ++part) {
        float t[kSumsOfPart];
#pragma unroll
        for (int i = 0; i < kSumsOfPart; ++i) t[i] = value_of(sums[part * kSumsOfPart + i], i);
        finish_part<false>(t, token, part);
      }
    } else {
#pragma unroll 1
      for (int part = 0; part < Traits::kTokens / kPart; ++part) {
        float t[kSumsOfPart];
#pragma unroll
        for (int i = 0; i < kSumsOfPart; ++i) t[i] = value_of(sums[i], i);
        drop_part(sums);
        finish_part<true>(t, token, part);
      }
    }
  }

 private:
  // Of the outputs. Known to the compiler but where tokens are int8.
  __device__ DType type() const {
    if constexpr (Traits::kIntegers) return args_.epilogue.type;
    return Traits::kType;
  }
  // What the formula goes on from.
  __device__ float value_of(typename Traits::Sum sum, int i) const {
    if constexpr (!Traits::kIntegers) return sum;
    return __fmul_rn(static_cast<float>(static_cast<int>(sum)), args_.epilogue.scaled(w_scale_.of(i)));
  }
  __device__ int token_of(int i) const { return i / 4 * 8 + thread_ % 4 * 2 + i % 2; }

  // Elements outside read their nearest neighbour inside; what comes of them is not stored.
  __device__ void load_residual(int token) {
    const Epilogue& e = args_.epilogue;
#pragma unroll
    for (int i = 0; i < kSumsOfPart; ++i) {
      const int row = min(token + token_of(i), args_.m - 1);
      residual_[i] = e.residual[row * e.residual_ld + min(channel_ + i / 2 % 2 * 8, args_.n - 1)];
    }
  }

  // tile: its first token.
  template <bool kActivates>
  __device__ void finish_part(float (&t)[kSumsOfPart], int tile, int part) {
    const Epilogue& e = args_.epilogue;
    const int token = tile + part * kPart;
    float of_residual[kSumsOfPart];
    float of_bias[kSumsOfPart];
    if (e.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) of_residual[i] = half_of(residual_[i], type());
      load_residual(token + kPart);  // the next part's, meanwhile
    } else {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) of_residual[i] = -0.0F;
    }
    if (e.x_scale.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) {
        t[i] = __fmul_rn(t[i], x_scale_[part * kPart + token_of(i)]);
      }
    } else if (e.x_scale.value != 1.0F) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) t[i] = __fmul_rn(t[i], e.x_scale.value);
    }
#pragma unroll
    for (int i = 0; i < kSumsOfPart; ++i) {
      of_bias[i] = e.bias != nullptr ? half_of(bias_.of(i), type()) : -0.0F;
    }
    const auto activate = [&](float (&values)[kSumsOfPart]) {
      if constexpr (kActivates) activate_by<__half, false>(e.activation, values);
    };
    float unrounded[kSumsOfPart];
    octofuse::finish(t, of_bias, activate, of_residual, 0, 0.0F, unrounded);
    store(unrounded, token, staging_ + (thread_ / 32 * 2 + part % 2) * (kPart * 32));
  }

  // To rows of outputs: through shared memory of the warp's own, in rows of its 16 channels whose two pieces of 16
  // bytes are exchanged in every other four tokens, so that no two accesses meet in a bank.
  __device__ void store(const float (&y)[kSumsOfPart], int token, char* buffer) const {
    const int lane = thread_ % 32;
    const auto place = [&](int row, int piece) { return row * 32 + (piece ^ (row / 4 % 2)) * 16; };
    const uint32_t to = shared_address(buffer) + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < kSumsOfPart; i += 8) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[j] = pair_of(y[i + 2 * j], y[i + 2 * j + 1]);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                   :
                   : "r"(to + i / 8 * 16 * 32), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                   : "memory");
    }
    __syncwarp();
    const int n = n_ + thread_ / 32 * kTileRows + lane % 2 * 8;
#pragma unroll
    for (int row = lane / 2; row < kPart; row += 16) {
      const uint4 piece = *reinterpret_cast<const uint4*>(buffer + place(row, lane % 2));
      auto* const out = static_cast<uint16_t*>(args_.epilogue.out) + static_cast<int64_t>(token + row) * args_.n + n;
      if (n < args_.n && token + row < args_.m) *reinterpret_cast<uint4*>(out) = piece;
    }
  }

  __device__ uint32_t pair_of(float x, float y) const {
    if (type() == DType::kFloat16) {
      const __half2 pair = __floats2half2_rn(x, y);
      return reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
      return reinterpret_cast<const uint32_t&>(pair);
    }
  }
};

// ---- all others ----

// Where a warpgroup's sum of a token and channel lies in its staging: a token's quads of channels are exchanged so that
// neither writes nor reads meet in a bank.
__device__ inline int staged_at(int token, int channel) {
  return token * 64 + ((channel / 4) ^ (token / 2 % 4 * 2)) * 4 + channel % 4;
}

// Finishes kPart tokens from `token` on. n: the warpgroup's first channel.
template <class Traits>
__device__ inline void finish_quads(const ManyArgs& args, const typename Traits::Sum (&sums)[Traits::kSums], int token,
                                    int n, int warpgroup, char* memory) {
  using Stored = std::conditional_t<Traits::kIntegers, int32_t, float>;
  struct alignas(16) Four {
    Stored values[4];
  };
  auto* const staging = reinterpret_cast<Stored*>(memory);
  constexpr int kTurns = kPart / 8;  // a thread has 4 channels of every eighth token
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int i = 0; i < kSumsOfPart; ++i) {
    const int channel = first_channel(thread) + i / 2 % 2 * 8;
    staging[staged_at(i / 4 * 8 + thread % 4 * 2 + i % 2, channel)] = static_cast<Stored>(sums[i]);
  }
  const int quad = thread % 16 * 4;
  cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));
#pragma unroll 1
  for (int i = 0; i < kTurns; ++i) {
    const int row = thread / 16 + i * 8;
    if (n + quad >= args.n || token + row >= args.m) continue;
    const Addends<4> addends = args.epilogue.load<4>(token + row, n + quad);
    const Four sum = *reinterpret_cast<const Four*>(staging + staged_at(row, quad));
    args.epilogue.store(sum.values, addends, token + row, n + quad);
  }
  __syncwarp();
  cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));  // the staging may change
}

}  // namespace octofuse::lowbit
