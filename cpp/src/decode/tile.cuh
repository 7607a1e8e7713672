// 16 positions of the cache, a warp's at a time: their scores with up to 8 query heads, and these heads' weighted sums
// of the values, on tensor cores.
//
// Keys, then values, of a tile come through slots of shared memory, a ring of them for each warp. Pieces of 16 bytes
// lie in a row in an order of the row's own, so that what a warp reads at once lies in different banks.
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

constexpr int kTile = 16;           // positions
constexpr int kMostHeads = 8;       // of a block
constexpr float kOffset = 1152.0F;  // of int8 elements in fp16, see widen_four()
// e4m3 in the bits of fp16 stands for 2^-8 of its value, where no instruction converts it.
#if __CUDA_ARCH__ >= 890
constexpr int kFloat8Bias = 0;
#else
constexpr int kFloat8Bias = 8;
#endif

// The type of the operands of products: a cache in 8 bits is widened to fp16, which has all of its values.
template <class T, CacheType kCache>
using Operand = std::conditional_t<kCache == CacheType::kFloat, T, __half>;

// Elements from one query to the next in shared memory: rows in different banks.
template <int kBlocks>
constexpr int kQueryPitch = kBlocks * kBlockChannels + 8;

// 8 elements as the cache has them.
template <CacheType kCache>
using Word = std::conditional_t<kCache == CacheType::kFloat, uint4, uint2>;

// Four 8-bit elements to four fp16, in order. int8 elements come kOffset too large: a subtraction for two of them would
// be half of the work, and what the offset adds to a product is known from the other operand alone.
template <CacheType kCache>
__device__ inline void widen_four(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (kCache == CacheType::kInt8) {
    const uint32_t above = four ^ 0x80808080U;  // q + 128, in the mantissa of 1024
    low = __byte_perm(above, 0x64646464U, 0x4140);
    high = __byte_perm(above, 0x64646464U, 0x4342);
  } else {
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<uint16_t>(four)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<uint16_t>(four >> 16)));
#else
    const auto move = [](uint32_t pair) { return (pair & 0x80008000U) | ((pair & 0x7F007F00U) >> 1); };
    low = move(__byte_perm(four, 0, 0x1404));
    high = move(__byte_perm(four, 0, 0x3424));
#endif
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

// 2^x and log2(x) in one instruction each; denormal numbers count as zero.
__device__ inline float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ inline float logarithm(float x) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// The highest score of no positions: below every other, but finite, so that differences of two are numbers.
constexpr float kLowest = -1e30F;

// Where a warp's keys or values of a tile lie.
template <class T, CacheType kCache, int kBlocks>
struct Slot {
  using Element = Stored<T, kCache>;
  static constexpr int kElement = static_cast<int>(sizeof(Element));
  static constexpr int kRowBytes = kBlocks * kBlockChannels * kElement;
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr bool kScaled = kCache != CacheType::kFloat;
  static constexpr int kBytes = kTile * kRowBytes + (kScaled ? 2 * kTile * 4 : 0);

  char* data;

  __device__ static int lane() { return static_cast<int>(threadIdx.x & 31); }
  __device__ static int group() { return static_cast<int>(threadIdx.x >> 2 & 7); }
  __device__ static int member() { return static_cast<int>(threadIdx.x & 3); }
  // Where a byte of a row lies. Of rows and bytes that are made of parts with no bit in common it is the XOR of the
  // parts': what depends on the lane is computed once, the rest is known to the compiler.
  __device__ static constexpr int order(int row) { return ((row & 1) << 2 ^ (row & 6)) & (kPieces - 1); }
  __device__ static constexpr int place(int row, int byte) {
    return row * kRowBytes + ((byte >> 4 ^ order(row)) << 4) + (byte & 15);
  }
  // The place `rows` rows and `bytes` bytes on, which share no bit with those of `from`.
  __device__ char* at(int from, int rows, int bytes) const {
    return data + (from ^ (bytes >> 4 ^ order(rows)) << 4) + rows * kRowBytes;
  }
  // 8 channels.
  __device__ uint4 read(int from, int rows, int channels) const {
    return widen<kCache>(*reinterpret_cast<const Word<kCache>*>(at(from, rows, channels * kElement)));
  }
  // Of keys beside the keys: their scales, then those of the values.
  __device__ float* scales() const { return reinterpret_cast<float*>(data + kTile * kRowBytes); }

  // A row that is in shared memory already, and its scales.
  __device__ void replace(int r, const Element* from, const float* new_scales) const {
    if (lane() < kPieces) {
      *reinterpret_cast<uint4*>(data + place(r, lane() * 16)) = reinterpret_cast<const uint4*>(from)[lane()];
    }
    if (kScaled && new_scales != nullptr && lane() < 2) scales()[lane() * kTile + r] = new_scales[lane()];
    __syncwarp();
  }
};

// A lane's part in copying tiles of a head of the cache: it copies 16 bytes of every kRows-th position.
template <class T, CacheType kCache, int kBlocks>
class Copier {
  using WarpSlot = Slot<T, kCache, kBlocks>;
  static constexpr int kRows = 32 / WarpSlot::kPieces;
  const char* keys_;  // its bytes of position 0
  const char* values_;
  const float* scales_;  // of 16 lanes for keys, of the others for values
  int bytes_;            // of a position
  int place_;            // of its bytes in a slot
  int first_, row_;      // the first position that is there; its own first one in a tile
  uint32_t count_;       // positions that are there
  uint32_t rows_;        // the same, but 0 where a row is shorter than a slot's

 public:
  // row: of position 0 in the cache. Positions first to newest - 1 are there.
  __device__ Copier(const HeadsArgs& args, int64_t row, int first, int newest)
      : bytes_(args.head_size * WarpSlot::kElement),
        first_(first),
        row_(WarpSlot::lane() / WarpSlot::kPieces),
        count_(static_cast<uint32_t>(newest - first)) {
    const int byte = WarpSlot::lane() % WarpSlot::kPieces * 16;
    place_ = WarpSlot::place(row_, byte);
    rows_ = byte < bytes_ ? count_ : 0;
    keys_ = static_cast<const char*>(args.keys) + (row + row_) * bytes_ + byte;
    values_ = static_cast<const char*>(args.values) + (row + row_) * bytes_ + byte;
    if constexpr (WarpSlot::kScaled) {
      const float* const scales = WarpSlot::lane() < kTile ? args.key_scales : args.value_scales;
      scales_ = scales + row + WarpSlot::lane() % kTile;
    }
  }

  // Starts to copy 16 positions of keys or values, with the keys the scales of both; what is not there becomes zero.
  __device__ void copy(const WarpSlot& to, bool values, int position) const {
    const char* from = (values ? values_ : keys_) + static_cast<int64_t>(position) * bytes_;
    const uint32_t behind = static_cast<uint32_t>(position - first_);
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      const bool there = behind + row_ + i * kRows < rows_;
      copy_async_or_zero(to.at(place_, i * kRows, 0), from, there ? 16 : 0);
      from += kRows * bytes_;
    }
    if (!WarpSlot::kScaled || values) return;
    const bool there = behind + WarpSlot::lane() % kTile < count_;
    copy_async_four(to.scales() + WarpSlot::lane(), there ? scales_ + position : scales_, there);
  }
};

// Products of queries and keys. Element i: of position group() + i / 2 * 8 with head 2 * member() + i % 2. offsets:
// what these heads' products are too large by; read for int8 keys alone.
template <class T, CacheType kCache, int kBlocks>
__device__ inline void multiply_keys(const Slot<T, kCache, kBlocks>& keys, const Operand<T, kCache>* queries,
                                     const float (&offsets)[2], float (&products)[4]) {
  const int group = keys.group();
  const int member = keys.member();
  const int place = keys.place(group, 8 * member * keys.kElement);
  float others[4] = {};  // two sums, so that a product waits for every second one before it alone
#pragma unroll
  for (int c = 0; c < 2 * kBlocks; ++c) {
    const uint4 query = *reinterpret_cast<const uint4*>(queries + group * kQueryPitch<kBlocks> + 8 * member + 32 * c);
    float (&sum)[4] = c % 2 == 0 ? products : others;
    mma_quads<Operand<T, kCache>>(keys.read(place, 0, 32 * c), keys.read(place, 8, 32 * c), query, sum);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) products[i] += others[i];
  if constexpr (kCache != CacheType::kFloat) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kCache == CacheType::kInt8) products[i] -= offsets[i % 2];
      products[i] *= keys.scales()[group + i / 2 * 8] * (kCache == CacheType::kFloat8 ? 1 << kFloat8Bias : 1);
    }
  }
}

// sums[c][r][i] += weights * values: of channel 64 * c + 8 * group() + 2 * r + i / 2 and head 2 * member() + i % 2.
// weights: as multiply_keys() has its products; for int8 values of_weights[i] += theirs.
template <class T, CacheType kCache, int kBlocks>
__device__ inline void add_values(const Slot<T, kCache, kBlocks>& values, const float (&weights)[4],
                                  float (&sums)[kBlocks][4][4], float (&of_weights)[2]) {
  using M = Operand<T, kCache>;
  const uint32_t low = transpose(pack<M>(weights[0], weights[1]));
  const uint32_t high = transpose(pack<M>(weights[2], weights[3]));
  if constexpr (kCache == CacheType::kInt8) {
    constexpr uint32_t kOnes = 0x3C003C00U;
    float sum[4] = {};
    mma_half<M>({kOnes, kOnes, kOnes, kOnes}, low, high, sum);
    of_weights[0] += sum[0];
    of_weights[1] += sum[1];
  }
  const int place = values.place(2 * values.member(), 8 * values.group() * values.kElement);
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) {
    uint4 wide[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      wide[j] = values.read(place, j % 2 + j / 2 * 8, 64 * c);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const auto of = [&](int j) { return r == 0 ? wide[j].x : r == 1 ? wide[j].y : r == 2 ? wide[j].z : wide[j].w; };
      const uint32_t a[4] = {__byte_perm(of(0), of(1), 0x5410), __byte_perm(of(0), of(1), 0x7632),
                             __byte_perm(of(2), of(3), 0x5410), __byte_perm(of(2), of(3), 0x7632)};
      mma_half<M>(a, low, high, sums[c][r]);
    }
  }
}

// The softmax over the positions that a warp has seen, of heads 2 * member() and the one behind it, in powers of two:
// the highest score (a value's scale counted), this lane's sum of the weights 2^(score - highest), and the sums of the
// values, each times its weight.
template <class T, CacheType kCache, int kBlocks>
struct Softmax {
  float highest[2] = {kLowest, kLowest};
  float weight[2] = {};
  float sums[kBlocks][4][4] = {};
  float of_weights[2] = {};  // of weights as they met int8 values

  // scores: as multiply_keys() has its products; -inf for positions that are not seen. They become the weights of the
  // values.
  __device__ void weigh(const Slot<T, kCache, kBlocks>& keys, float (&scores)[4]) {
    float of_scale[2] = {};  // a value's scale, as a power of two: the weights that meet the values are then at most 1
    if constexpr (kCache != CacheType::kFloat) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        of_scale[j] =
            logarithm(keys.scales()[kTile + keys.group() + 8 * j]) + (kCache == CacheType::kFloat8 ? kFloat8Bias : 0);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(scores[h] + of_scale[0], scores[2 + h] + of_scale[1]);
#pragma unroll
      for (int offset = 16; offset >= 4; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
      const float before = highest[h];
      highest[h] = fmaxf(before, most);
      const float factor = power_of_two(before - highest[h]);
      weight[h] *= factor;
      if constexpr (kCache == CacheType::kInt8) of_weights[h] *= factor;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float score = scores[2 * j + h] - highest[h];
        weight[h] += power_of_two(score);
        scores[2 * j + h] = power_of_two(score + of_scale[j]);
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
  }

  // The weights of all lanes, and sums of the values themselves.
  __device__ void finish() {
    if constexpr (kCache == CacheType::kInt8) {
#pragma unroll
      for (int i = 0; i < kBlocks * 16; ++i) {
        float& sum = sums[i / 16][i / 4 % 4][i % 4];
        sum = fmaf(-kOffset, of_weights[i % 2], sum);
      }
    }
#pragma unroll
    for (float& sum : weight) {
#pragma unroll
      for (int offset = 16; offset >= 4; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
  }
};

}  // namespace octofuse::decode
