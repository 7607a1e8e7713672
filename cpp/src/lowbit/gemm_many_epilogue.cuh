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

template <class Traits>
constexpr int kPart = Traits::kTokens % 32 == 0 ? 32 : 16;  // tokens
template <class Traits>
constexpr int kSumsOfPart = kPart<Traits> / 2;  // of a thread
constexpr int kStagingBytes = 32 * 64 * 4;      // a warpgroup's: two parts in 16 bits, or the sums of one
constexpr int kMostTokens = 256;                // of a tile
constexpr int kManyStagingBytes = kStagingBytes + 2 * kMostTokens * 4;  // and behind it two tiles' token scales

// Drops the sums of the first part: registers have no addresses.
template <class Traits>
__device__ inline void drop_part(typename Traits::Sum (&sums)[Traits::kSums]) {
#pragma unroll
  for (int i = 0; i + kSumsOfPart<Traits> < Traits::kSums; ++i) sums[i] = sums[i + kSumsOfPart<Traits>];
}

// The first of a thread's two channels in those of its warpgroup; the other is 8 further.
__device__ inline int first_channel(int thread) { return thread / 32 * kTileRows + thread % 32 / 4; }

// What both of them have in a row of [n], read before there are sums, and looked at behind them: until then nothing
// waits for it.
class ChannelPair {
  uint16_t first_ = 0, second_ = 0;

 public:
  // row: null for none. n: the warpgroup's first channel.
  __device__ ChannelPair(const uint16_t* row, const GemmArgs& args, int n) {
    if (row == nullptr) return;
    const int channel = n + first_channel(static_cast<int>(threadIdx.x) % 128);
    first_ = row[min(channel, args.n - 1)];
    second_ = row[min(channel + 8, args.n - 1)];
  }
  __device__ float2 as_floats(DType type) const { return {half_of(first_, type), half_of(second_, type)}; }
};

// Of sum i: what the first or the second channel has.
__device__ inline float of_channel(float2 pair, int i) { return i / 2 % 2 == 0 ? pair.x : pair.y; }

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

// The same conversion of many: where the compiler does not know the type, one branch instead of one for each.
template <int kCount>
__device__ inline void halves_of(const uint16_t (&bits)[kCount], DType type, float (&values)[kCount]) {
  const auto convert = [&](DType known) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = half_of(bits[i], known);
  };
  type == DType::kFloat16 ? convert(DType::kFloat16) : convert(DType::kBFloat16);
}

template <int kCount>
__device__ inline void pairs_of(const float (&values)[2 * kCount], DType type, uint32_t (&pairs)[kCount]) {
  if (type == DType::kFloat16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      pairs[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      pairs[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
}

template <class Traits>
class FragmentEpilogue {
  static_assert(Traits::kTokens % 16 == 0);  // whole parts, of the half of a tile too
  static constexpr int kPart = lowbit::kPart<Traits>, kSumsOfPart = kPart / 2;
  const ManyArgs& args_;
  int thread_;
  char* staging_;
  int n_, channel_;        // the first channel, of the warpgroup and of this thread
  float2 bias_, w_scale_;  // of its two channels
  const float* x_scale_;   // of the tile's tokens
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
        bias_(args.epilogue.bias != nullptr ? bias.as_floats(type()) : float2{-0.0F, -0.0F}),
        w_scale_(w_scale.as_floats(type())),
        x_scale_(x_scale) {
    w_scale_.x *= args.epilogue.w_unit;
    w_scale_.y *= args.epilogue.w_unit;
  }

  // token: the tile's first.
  __device__ void finish(typename Traits::Sum (&sums)[Traits::kSums], int token) {
    // Two buffers in turn: a warp reads one while it fills the other. Where a tile has an odd number of parts the next
    // one begins with the buffer that was last, behind all products.
    const bool is_plain = args_.epilogue.activation == Activation::kNone;
    if (is_plain && args_.epilogue.residual == nullptr) return finish_plain<false>(sums, token);
    if (args_.epilogue.residual != nullptr) load_residual(token);
    if (is_plain) return finish_plain<true>(sums, token);
#pragma unroll 1
    for (int part = 0; part < Traits::kTokens / kPart; ++part) {
      finish_part<true, true>(sums, 0, token, part);
      drop_part<Traits>(sums);
    }
  }

 private:
  // Of the outputs. Known to the compiler but where tokens are int8.
  __device__ DType type() const {
    if constexpr (Traits::kIntegers) return args_.epilogue.type;
    return Traits::kType;
  }
  __device__ int token_of(int i) const { return i / 4 * 8 + thread_ % 4 * 2 + i % 2; }

  template <bool kResidual>
  __device__ void finish_plain(typename Traits::Sum (&sums)[Traits::kSums], int token) {
#pragma unroll
    for (int part = 0; part < Traits::kTokens / kPart; ++part) {
      finish_part<false, kResidual>(sums, part * kSumsOfPart, token, part);
    }
  }

  // Elements outside read their nearest neighbour inside; what comes of them is not stored.
  __device__ void load_residual(int token) {
    const Epilogue& e = args_.epilogue;
#pragma unroll
    for (int i = 0; i < kSumsOfPart; ++i) {
      const int row = min(token + token_of(i), args_.m - 1);
      residual_[i] = e.residual[row * e.residual_ld + min(channel_ + i / 2 % 2 * 8, args_.n - 1)];
    }
  }

  // What the formula goes on from: of a part's sums, which begin at `first`.
  __device__ void dequantize(const typename Traits::Sum (&sums)[Traits::kSums], int first, int part,
                             float (&t)[kSumsOfPart]) const {
#pragma unroll
    for (int i = 0; i < kSumsOfPart; ++i) {
      if constexpr (Traits::kIntegers) {
        t[i] = __fmul_rn(static_cast<float>(static_cast<int>(sums[first + i])), of_channel(w_scale_, i));
      } else {
        t[i] = sums[first + i];
      }
    }
    if (x_scale_ != nullptr) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; i += 4) {
        const float2 scale = *reinterpret_cast<const float2*>(x_scale_ + part * kPart + token_of(i));
#pragma unroll
        for (int j = 0; j < 4; ++j) t[i + j] = __fmul_rn(t[i + j], j % 2 == 0 ? scale.x : scale.y);
      }
    } else if (args_.epilogue.x_scale.value != 1.0F) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) t[i] = __fmul_rn(t[i], args_.epilogue.x_scale.value);
    }
  }

  // kResidual: it may have one. tile: its first token.
  template <bool kActivates, bool kResidual>
  __device__ void finish_part(const typename Traits::Sum (&sums)[Traits::kSums], int first, int tile, int part) {
    const Epilogue& e = args_.epilogue;
    const int token = tile + part * kPart;
    float t[kSumsOfPart];
    float of_bias[kSumsOfPart];
    float of_residual[kSumsOfPart];
    dequantize(sums, first, part, t);
#pragma unroll
    for (int i = 0; i < kSumsOfPart; ++i) {
      of_bias[i] = of_channel(bias_, i);
      of_residual[i] = -0.0F;
    }
    if (kResidual && e.residual != nullptr) {
      halves_of(residual_, type(), of_residual);
      load_residual(token + kPart);  // the next part's, meanwhile
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
    uint32_t pairs[kSumsOfPart / 2];
    pairs_of(y, type(), pairs);
#pragma unroll
    for (int i = 0; i < kSumsOfPart / 2; i += 4) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                   :
                   : "r"(to + i / 4 * 16 * 32), "r"(pairs[i]), "r"(pairs[i + 1]), "r"(pairs[i + 2]), "r"(pairs[i + 3])
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
};

// ---- all others ----

// Where a warpgroup's sum of a token and channel lies in its staging: a token's quads of channels are exchanged so that
// neither writes nor reads meet in a bank.
__device__ inline int staged_at(int token, int channel) {
  return token * 64 + ((channel / 4) ^ (token / 2 % 4 * 2)) * 4 + channel % 4;
}

// Finishes a part's tokens from `token` on. n: the warpgroup's first channel.
template <class Traits>
__device__ inline void finish_quads(const ManyArgs& args, const typename Traits::Sum (&sums)[Traits::kSums], int token,
                                    int n, int warpgroup, char* memory) {
  using Stored = std::conditional_t<Traits::kIntegers, int32_t, float>;
  struct alignas(16) Four {
    Stored values[4];
  };
  auto* const staging = reinterpret_cast<Stored*>(memory);
  constexpr int kTurns = kPart<Traits> / 8;  // a thread has 4 channels of every eighth token
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int i = 0; i < kSumsOfPart<Traits>; ++i) {
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
