// A layer or RMS norm of up to 4 tokens in shared memory, in every block of a gemv kernel for itself: that takes less
// time than a kernel in front would. Sums have the order of rows/reduce.cuh and each step is rounded as in
// rows/pass.cuh, so the bits are those of the norm as a kernel of its own.
#pragma once

#include "lowbit/codes.cuh"
#include "lowbit/norm.h"
#include "rows/pass.cuh"

namespace octofuse::lowbit {

// A warp's share of the tokens' values: 256 columns of one token, which lie as two k-blocks, 8 columns in a lane. They
// are a group of rows/reduce.cuh's sums, and what the same warp loads before and converts afterwards.
struct TokenPair {
  static constexpr int kColumns = 2 * kBlockK;
  int token, group;

  __device__ TokenPair(int pair, int log_tokens) : token(pair & ((1 << log_tokens) - 1)), group(pair >> log_tokens) {}

  // The k-block of this lane's 8 columns, and the first of these.
  __device__ int k_block(int lane) const { return 2 * group + lane / 16; }
  __device__ int column(int lane) const { return group * kColumns + lane * 8; }
  __host__ __device__ static int count(int k_blocks, int log_tokens) { return (k_blocks + 1) / 2 << log_tokens; }
};

#ifdef __CUDACC__

// kWarps warps share the tokens.
template <int kWarps>
class TokenNorm {
  const NormArgs& args_;
  DType type_;
  int k_, k_blocks_, groups_, log_tokens_, lane_, warp_;
  uint4 weight_[2], bias_[2];  // of this warp's next two shares: on their way while earlier kernels run

 public:
  __device__ TokenNorm(const NormArgs& args, DType type, int k, int k_blocks, int log_tokens)
      : args_(args),
        type_(type),
        k_(k),
        k_blocks_(k_blocks),
        groups_((k_blocks + 1) / 2),
        log_tokens_(log_tokens),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)) {}

  // Requests what no earlier kernel writes: the norm's weight and bias.
  __device__ void prefetch() {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_affine(warp_ + i * kWarps, i);
  }

  // Once each warp's own values are there. memory: the tokens' k-blocks of 256 bytes, [k-block][token]; they are
  // normalised in place, and each warp may read its own ones afterwards. sums: two sets of floats in shared memory, the
  // second `apart` floats behind the first.
  __device__ void run(char* memory, float* sums, int apart) {
    const bool centred = args_.kind == Norm::kLayer;
    float* const squares = sums + apart;
    if (centred) sum_groups<false>(memory, nullptr, sums);
    sum_groups<true>(memory, centred ? sums : nullptr, squares);
#pragma unroll 1
    for (int i = warp_; i < count(); i += kWarps) {
      const TokenPair pair(i, log_tokens_);
      const float mean = centred ? mean_of(sums, pair.token) : 0.0F;
      const float root = rows::inverse_root(total_of(squares, pair.token), k_, args_.eps);
      if (pair.column(lane_) < k_) normalise(mean, root, values_of(memory, pair));
      weight_[0] = weight_[1];
      bias_[0] = bias_[1];
      load_affine(i + 2 * kWarps, 1);
    }
    __syncwarp();
  }

 private:
  __device__ int count() const { return TokenPair::count(k_blocks_, log_tokens_); }

  // This lane's 8 values of a share.
  __device__ uint4& values_of(char* memory, const TokenPair& pair) const {
    const int item = pair.k_block(lane_) << log_tokens_ | pair.token;
    return *reinterpret_cast<uint4*>(memory + item * 2 * kBlockK + lane_ % 16 * 16);
  }

  // What is absent is neutral: a weight of 1, a bias of -0.
  __device__ void load_affine(int i, int slot) {
    const uint32_t one = type_ == DType::kFloat16 ? 0x3C003C00U : 0x3F803F80U;
    weight_[slot] = make_uint4(one, one, one, one);
    bias_[slot] = make_uint4(0x80008000U, 0x80008000U, 0x80008000U, 0x80008000U);
    const int column = TokenPair(i, log_tokens_).column(lane_);
    if (column >= k_) return;
    if (args_.weight != nullptr) weight_[slot] = static_cast<const uint4*>(args_.weight)[column / 8];
    if (args_.bias != nullptr) bias_[slot] = static_cast<const uint4*>(args_.bias)[column / 8];
  }

  __device__ void widen(const uint4& packed, float (&v)[rows::kPack]) const {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int j = 0; j < rows::kPack; ++j) v[j] = half_of(static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16)), type_);
  }

  // The sum of each group to to[token][group]: of the values, or of their squares once the means are subtracted, which
  // follow from `values` where there are any. Ends with a barrier of the block.
  template <bool kSquares>
  __device__ void sum_groups(char* memory, const float* values, float* to) const {
#pragma unroll 1
    for (int i = warp_; i < count(); i += kWarps) {
      const TokenPair pair(i, log_tokens_);
      const float mean = kSquares && values != nullptr ? mean_of(values, pair.token) : 0.0F;
      float v[rows::kPack] = {};
      if (pair.column(lane_) < k_) {
        widen(values_of(memory, pair), v);
#pragma unroll
        for (float& value : v) {
          if constexpr (kSquares) {
            value = __fsub_rn(value, mean);
            value = __fmul_rn(value, value);
          }
        }
      }
      const float sum = rows::warp_sum(rows::tree_sum(v));
      if (lane_ == 0) to[pair.token * groups_ + pair.group] = sum;
    }
    __syncthreads();
  }

  __device__ float total_of(const float* sums, int token) const {
    const float* const of_group = sums + token * groups_;
    if (groups_ <= 8) return rows::few_groups_sum(of_group, groups_);
    float mine = 0.0F;
#pragma unroll 1
    for (int i = lane_; i < groups_; i += 32) mine = __fadd_rn(mine, of_group[i]);
    __syncwarp();
    return rows::warp_sum(mine);
  }

  __device__ float mean_of(const float* sums, int token) const {
    return __fdiv_rn(total_of(sums, token), static_cast<float>(k_));
  }

  __device__ void normalise(float mean, float root, uint4& packed) const {
    float v[rows::kPack];
    float factor[rows::kPack];
    float term[rows::kPack];
    widen(packed, v);
    widen(weight_[0], factor);
    widen(bias_[0], term);
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t bits[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = 2 * j + h;
        const float scaled = __fmul_rn(__fmul_rn(__fsub_rn(v[at], mean), root), factor[at]);
        bits[h] = half_bits(__fadd_rn(scaled, term[at]), type_);
      }
      words[j] = bits[0] | bits[1] << 16;
    }
    packed = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

#endif

}  // namespace octofuse::lowbit
