// 16 positions of the cache, a warp's at a time: their scores with up to 8 query heads, and these heads' weighted sums
// of the values, on tensor cores.
//
// mma.sync has positions as the 16 rows and heads as the 8 columns of scores; channels as the 16 rows and heads as the
// 8 columns of sums. A lane, group g = lane / 4 and member t = lane % 4, reads 8 consecutive channels at a time:
//   keys     of positions g and g + 8, channels 32 * c + 8 * t on;
//   values   of positions 2 * t, 2 * t + 1, 2 * t + 8 and 2 * t + 9, channels 64 * c + 8 * g on.
// The order of channels inside a product is free as long as both operands keep it, and so is that of a product's rows.
// A value's neighbours in K are other positions: two registers are rearranged into two (prmt).
#pragma once

#include "decode/heads.cuh"
#include "device/mma.cuh"

namespace octofuse::decode {

constexpr int kTile = 16;       // positions
constexpr int kMostHeads = 8;   // of a block
constexpr int kFloat8Bias = 8;  // e4m3 in the bits of fp16 stands for 2^-8 of its value

// The type of the operands of products: a cache in 8 bits is widened to fp16, which has all of its values.
template <class T, CacheType kCache>
using Operand = std::conditional_t<kCache == CacheType::kFloat, T, __half>;

// 8 elements as the cache has them.
template <CacheType kCache>
using Word = std::conditional_t<kCache == CacheType::kFloat, uint4, uint2>;

// Four 8-bit elements to four fp16, in order.
template <CacheType kCache>
__device__ inline void widen_four(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (kCache == CacheType::kInt8) {
    const uint32_t above = four ^ 0x80808080U;  // q + 128, in the mantissa of 1024
    const __half2 offset = __float2half2_rn(1152.0F);
    uint32_t pair = __byte_perm(above, 0x64646464U, 0x4140);
    __half2 value = __hsub2(*reinterpret_cast<__half2*>(&pair), offset);
    low = *reinterpret_cast<uint32_t*>(&value);
    pair = __byte_perm(above, 0x64646464U, 0x4342);
    value = __hsub2(*reinterpret_cast<__half2*>(&pair), offset);
    high = *reinterpret_cast<uint32_t*>(&value);
  } else {
    const auto move = [](uint32_t pair) { return (pair & 0x80008000U) | ((pair & 0x7F007F00U) >> 1); };
    low = move(__byte_perm(four, 0, 0x1404));
    high = move(__byte_perm(four, 0, 0x3424));
  }
}

template <CacheType kCache>
__device__ inline uint4 widen(const Word<kCache>& word) {
  if constexpr (kCache == CacheType::kFloat) {
    return word;
  } else {
    uint4 wide;
    widen_four<kCache>(word.x, wide.x, wide.y);
    widen_four<kCache>(word.y, wide.z, wide.w);
    return wide;
  }
}

// The transpose of an 8 x 8 matrix of 16-bit elements that a warp holds: lane has columns 2 * t and 2 * t + 1 of row g.
__device__ inline uint32_t transpose(uint32_t pair) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

template <class M>
__device__ inline uint32_t pack(float low, float high) {
  const M pair[2] = {rows::from_float<M>(low), rows::from_float<M>(high)};
  return *reinterpret_cast<const uint32_t*>(pair);
}

// The factor that rescales a partial softmax to a common highest score. It is 0 for one over no positions, whose
// highest score is -inf: exp2f(-inf - -inf) would be NaN.
__device__ inline float rescale(float highest, float common) {
  return highest == -INFINITY ? 0.0F : exp2f(highest - common);
}

template <class T, CacheType kCache, int kBlocks>
struct Tile {
  using M = Operand<T, kCache>;
  using Element = Stored<T, kCache>;
  static constexpr int kPitch = kBlocks * kBlockChannels + 8;  // of a query in shared memory: rows in different banks

  Word<kCache> key[2 * kBlocks][2] = {};
  Word<kCache> value[kBlocks][4] = {};
  float key_scale[2] = {1.0F, 1.0F};
  float value_scale[2] = {1.0F, 1.0F};

  __device__ static int group() { return static_cast<int>(threadIdx.x) % 32 / 4; }
  __device__ static int member() { return static_cast<int>(threadIdx.x) % 4; }
  __device__ static int value_position(int j) { return 2 * member() + j % 2 + j / 2 * 8; }

  // Of the tile at `position` what earlier steps have left in the cache, positions first to newest - 1, whose row 0 is
  // `row` of the cache.
  __device__ void load_keys(const HeadsArgs& args, int64_t row, int position, int first, int newest) {
    const auto* const keys = static_cast<const Element*>(args.keys);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int p = position + group() + 8 * j;
      const bool there = p >= first && p < newest;
#pragma unroll
      for (int c = 0; c < 2 * kBlocks; ++c) {
        const int channel = 32 * c + 8 * member();
        key[c][j] = Word<kCache>{};
        if (there && channel < args.head_size) {
          key[c][j] = *reinterpret_cast<const Word<kCache>*>(keys + (row + p) * args.head_size + channel);
        }
      }
      if constexpr (kCache != CacheType::kFloat) {
        key_scale[j] = there ? args.key_scales[row + p] : 1.0F;
        value_scale[j] = there ? args.value_scales[row + p] : 1.0F;
      }
    }
  }

  __device__ void load_values(const HeadsArgs& args, int64_t row, int position, int first, int newest) {
    const auto* const values = static_cast<const Element*>(args.values);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int p = position + value_position(j);
      const bool there = p >= first && p < newest;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const int channel = 64 * c + 8 * group();
        value[c][j] = Word<kCache>{};
        if (there && channel < args.head_size) {
          value[c][j] = *reinterpret_cast<const Word<kCache>*>(values + (row + p) * args.head_size + channel);
        }
      }
    }
  }

  // Position `at` of the tile is the new token's: its key and value, zeros behind their ends, and their scales.
  __device__ void replace(int at, const Element* new_key, const Element* new_value, const float* scales) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (group() + 8 * j != at) continue;
#pragma unroll
      for (int c = 0; c < 2 * kBlocks; ++c) {
        key[c][j] = *reinterpret_cast<const Word<kCache>*>(new_key + 32 * c + 8 * member());
      }
      key_scale[j] = scales[0];
      value_scale[j] = scales[1];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (value_position(j) != at) continue;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        value[c][j] = *reinterpret_cast<const Word<kCache>*>(new_value + 64 * c + 8 * group());
      }
    }
  }

  // Element i: the product of position group() + i / 2 * 8 with head 2 * member() + i % 2. queries: kMostHeads rows of
  // kPitch.
  __device__ void multiply_keys(const M* queries, float (&products)[4]) const {
#pragma unroll
    for (int c = 0; c < 2 * kBlocks; ++c) {
      const uint4 query = *reinterpret_cast<const uint4*>(queries + group() * kPitch + 32 * c + 8 * member());
      mma_quads<M>(widen<kCache>(key[c][0]), widen<kCache>(key[c][1]), query, products);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kCache != CacheType::kFloat) products[i] *= key_scale[i / 2];
      if constexpr (kCache == CacheType::kFloat8) products[i] *= 1 << kFloat8Bias;
    }
  }

  // sums[c][r][i] += weights * values: of channel 64 * c + 8 * group() + 2 * r + i / 2 and head 2 * member() + i % 2.
  // weights: as multiply_keys() has its products.
  __device__ void add_values(const float (&weights)[4], float (&sums)[kBlocks][4][4]) const {
    const uint32_t low = transpose(pack<M>(weights[0], weights[1]));
    const uint32_t high = transpose(pack<M>(weights[2], weights[3]));
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      uint4 wide[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) wide[j] = widen<kCache>(value[c][j]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const auto of = [&](int j) { return r == 0 ? wide[j].x : r == 1 ? wide[j].y : r == 2 ? wide[j].z : wide[j].w; };
        const uint32_t a[4] = {__byte_perm(of(0), of(1), 0x5410), __byte_perm(of(0), of(1), 0x7632),
                               __byte_perm(of(2), of(3), 0x5410), __byte_perm(of(2), of(3), 0x7632)};
        mma_half<M>(a, low, high, sums[c][r]);
      }
    }
  }
};

// The softmax over the positions that a warp has seen, of heads 2 * member() and the one behind it, in powers of two:
// the highest score (a value's scale counted), this lane's sum of the weights 2^(score - highest), and the sums of the
// values, each times its weight.
template <class T, CacheType kCache, int kBlocks>
struct Softmax {
  float highest[2] = {-INFINITY, -INFINITY};
  float weight[2] = {};
  float sums[kBlocks][4][4] = {};

  // scores: as Tile::multiply_keys() has its products; -inf for positions that are not seen.
  __device__ void take(const Tile<T, kCache, kBlocks>& tile, const float (&scores)[4]) {
    float of_scale[2] = {};  // a value's scale, as a power of two: the weights that meet the values are then at most 1
    if constexpr (kCache != CacheType::kFloat) {
#pragma unroll
      for (int j = 0; j < 2; ++j) of_scale[j] = log2f(tile.value_scale[j]);
    }
    float weights[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(scores[h] + of_scale[0], scores[2 + h] + of_scale[1]);
#pragma unroll
      for (int offset = 16; offset >= 4; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
      const float before = highest[h];
      highest[h] = fmaxf(before, most);
      const float factor = rescale(before, highest[h]);
      weight[h] *= factor;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float score = scores[2 * j + h];
        const bool seen = score != -INFINITY;
        weight[h] += seen ? exp2f(score - highest[h]) : 0.0F;
        weights[2 * j + h] = seen ? exp2f(score + of_scale[j] - highest[h]) : 0.0F;
      }
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          sums[c][r][h] *= factor;
          sums[c][r][2 + h] *= factor;
        }
      }
    }
    tile.add_values(weights, sums);
  }

  // The weights of all lanes.
  __device__ void finish() {
#pragma unroll
    for (float& sum : weight) {
#pragma unroll
      for (int offset = 16; offset >= 4; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
  }
};

}  // namespace octofuse::decode
