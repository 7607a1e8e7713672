// The end of a tile of gemm_many.cu: from a consumer warpgroup's sums in registers to 64 channels of output rows, kPart
// tokens at a time through shared memory. Thread t of the warpgroup holds sum i of token i / 4 * 8 + t % 4 * 2 + i % 2
// and channel t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8.
//
// Outputs of 16 bits are finished where they are, and stmatrix transposes them to rows; all others cross shared memory
// as sums and are finished four channels at a time, which takes several times as long: an instruction beside running
// tensor cores takes 4 to 5 cycles.
#pragma once

#include "lowbit/gemm_many_producer.cuh"

namespace octofuse::lowbit {

constexpr int kPart = 32;                          // tokens
constexpr int kSumsOfPart = kPart / 2;             // of a thread
constexpr int kManyStagingBytes = kPart * 64 * 4;  // a warpgroup's: two parts in 16 bits, or the sums of one

// Drops the sums of the first part: registers have no addresses.
template <int kSums>
__device__ inline void drop_part(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i + kSumsOfPart < kSums; ++i) sums[i] = sums[i + kSumsOfPart];
}

// ---- outputs of 16 bits ----

template <class Traits>
class FragmentEpilogue {
  static constexpr DType kType = Traits::kType;
  const ManyArgs& args_;
  int thread_;
  char* staging_;
  int n_, channel_;  // the first channel, of the warpgroup and of this thread
  uint32_t bias_;
  uint16_t residual_[kSumsOfPart];

 public:
  // Of both channels of a thread, read before there are sums. n: the warpgroup's first channel.
  __device__ static uint32_t load_bias(const ManyArgs& args, int n) {
    const uint16_t* const bias = args.epilogue.bias;
    if (bias == nullptr) return 0;
    const int channel = n + first_channel(static_cast<int>(threadIdx.x) % 128);
    return bias[min(channel, args.n - 1)] | static_cast<uint32_t>(bias[min(channel + 8, args.n - 1)]) << 16;
  }

  // staging: this warpgroup's.
  __device__ FragmentEpilogue(const ManyArgs& args, char* staging, int n, uint32_t bias)
      : args_(args),
        thread_(static_cast<int>(threadIdx.x) % 128),
        staging_(staging),
        n_(n),
        channel_(n + first_channel(thread_)),
        bias_(bias) {}

  // token: the tile's first.
  __device__ void finish(float (&sums)[Traits::kSums], int token) {
    static_assert(Traits::kTokens / kPart % 2 == 0);  // two buffers in turn: a warp reads one while it fills the other
    if (args_.epilogue.residual != nullptr) load_residual(token);
    if (args_.epilogue.activation == Activation::kNone) {
#pragma unroll
      for (int part = 0; part < Traits::kTokens / kPart; ++part) {
        float t[kSumsOfPart];
#pragma unroll
        for (int i = 0; i < kSumsOfPart; ++i) t[i] = sums[part * kSumsOfPart + i];
        finish_part<false>(t, token + part * kPart, part % 2);
      }
    } else {
#pragma unroll 1
      for (int part = 0; part < Traits::kTokens / kPart; ++part) {
        float t[kSumsOfPart];
#pragma unroll
        for (int i = 0; i < kSumsOfPart; ++i) t[i] = sums[i];
        drop_part(sums);
        finish_part<true>(t, token + part * kPart, part % 2);
      }
    }
  }

 private:
  __device__ static int first_channel(int thread) { return thread / 32 * kTileRows + thread % 32 / 4; }
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

  template <bool kActivates>
  __device__ void finish_part(float (&t)[kSumsOfPart], int token, int buffer) {
    const Epilogue& e = args_.epilogue;
    float of_residual[kSumsOfPart];
    float of_bias[kSumsOfPart];
    if (e.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) of_residual[i] = half_of(residual_[i], kType);
      load_residual(token + kPart);  // the next part's, meanwhile
    } else {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) of_residual[i] = -0.0F;
    }
    if (e.x_scale.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) {
        t[i] = __fmul_rn(t[i], scale_at(e.x_scale, min(token + token_of(i), args_.m - 1)));
      }
    } else if (e.x_scale.value != 1.0F) {
#pragma unroll
      for (int i = 0; i < kSumsOfPart; ++i) t[i] = __fmul_rn(t[i], e.x_scale.value);
    }
#pragma unroll
    for (int i = 0; i < kSumsOfPart; ++i) {
      of_bias[i] = e.bias != nullptr ? half_of(static_cast<uint16_t>(bias_ >> (i / 2 % 2 * 16)), kType) : -0.0F;
    }
    const auto activate = [&](float (&values)[kSumsOfPart]) {
      if constexpr (kActivates) activate_by<__half, false>(e.activation, values);
    };
    float unrounded[kSumsOfPart];
    octofuse::finish(t, of_bias, activate, of_residual, 0, 0.0F, unrounded);
    store(unrounded, token, staging_ + (thread_ / 32 * 2 + buffer) * (kPart * 32));
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

  __device__ static uint32_t pair_of(float x, float y) {
    if constexpr (kType == DType::kFloat16) {
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
template <int kSums>
__device__ inline void finish_quads(const ManyArgs& args, const float (&sums)[kSums], int token, int n, int warpgroup,
                                    float* staging) {
  constexpr int kTurns = kPart / 8;  // a thread has 4 channels of every eighth token
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
  for (int i = 0; i < kSumsOfPart; ++i) {
    const int channel = thread / 32 * kTileRows + thread % 32 / 4 + i / 2 % 2 * 8;
    staging[staged_at(i / 4 * 8 + thread % 4 * 2 + i % 2, channel)] = sums[i];
  }
  const int quad = thread % 16 * 4;
  cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));
#pragma unroll 1
  for (int i = 0; i < kTurns; ++i) {
    const int row = thread / 16 + i * 8;
    if (n + quad >= args.n || token + row >= args.m) continue;
    const Addends<4> addends = args.epilogue.load<4>(token + row, n + quad);
    const float4 sum = *reinterpret_cast<const float4*>(staging + staged_at(row, quad));
    const float y[4] = {sum.x, sum.y, sum.z, sum.w};
    args.epilogue.store(y, addends, token + row, n + quad);
  }
  __syncwarp();
  cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));  // the staging may change
}

}  // namespace octofuse::lowbit
