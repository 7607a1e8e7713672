// Several tokens on their way to shared memory, as an operand's bytes: the integers and scales that gemv.cuh makes of
// a token alone, with less work for each. A lane has 8 neighbouring columns, and exchanges half of these with the lane
// beside it, so that each has two registers of a product's columns.
#pragma once

#include "lowbit/gemv.cuh"

namespace octofuse::lowbit {

// The K slices of a block: all 16, or, where two blocks of a cluster divide them, every other four. Then its warps form
// two teams, each with row tiles of its own.
struct OwnSlices {
  int log_count, rank;

  __device__ OwnSlices(int log_divide, int rank) : log_count(kLogSlices - log_divide), rank(rank) {}
  __device__ int count() const { return 1 << log_count; }
  __device__ int own_of(int warp) const { return warp & (count() - 1); }
  __device__ int team_of(int warp) const { return warp >> log_count; }
  __device__ int slice_of(int warp) const { return is_divided() ? (warp & 4) * 2 + rank * 4 + (warp & 3) : warp; }

  // Pairs of neighbouring k-blocks, counted among the block's own, and in all of K.
  __device__ int pairs(int of_all) const {
    return is_divided() ? of_all / 4 * 2 + min(max(of_all % 4 - 2 * rank, 0), 2) : of_all;
  }
  __device__ int pair_of(int own) const { return is_divided() ? (own >> 1) * 4 + rank * 2 + (own & 1) : own; }

 private:
  __device__ bool is_divided() const { return log_count < kLogSlices; }
};

// A lane's 8 columns of a k-block as integers. pairs: of columns 2 j and 2 j + 1 their low bytes, then their high ones.
struct Converted {
  uint32_t pairs[4];
  uint32_t flips;  // what the low bytes lack to be signed
  float scale;     // the value that the integer 1 stands for
  int sum;

  // kHigh: they are the high bytes.
  template <bool kHigh>
  __device__ void take_bytes(const uint4& share) {
    scale = kHigh ? 1.0F / 256.0F : 1.0F;
    flips = 0;
    sum = __dp4a(static_cast<int>(share.x), 0x01010101, __dp4a(static_cast<int>(share.y), 0x01010101, 0));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      constexpr int kSelectors[2] = {kHigh ? 0x1044 : 0x4410, kHigh ? 0x3244 : 0x4432};
      pairs[j] = __byte_perm(j < 2 ? share.x : share.y, 0, kSelectors[j % 2]);
    }
  }

  // What becomes of a k-block with a value that is NaN or infinite does not matter: its scale is NaN.
  __device__ void take(const uint4& share, bool is_half, const PowerOfTwo& power) {
    const uint32_t words[4] = {share.x, share.y, share.z, share.w};
    float v[8];
    if (is_half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[j]));
        v[2 * j] = two.x;
        v[2 * j + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[2 * j] = __uint_as_float(words[j] << 16);
        v[2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000U);
      }
    }
    scale = power.inverse();
    flips = 0x80808080U;
    uint32_t total = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t first = Integers::raw_of(v[2 * j], power);
      const uint32_t second = Integers::raw_of(v[2 * j + 1], power);
      pairs[j] = __byte_perm(first, second, 0x5140);
      total += first + second;
    }
    sum = static_cast<int>(total - 8 * Integers::kRawZero);
  }
};

// A warp has one of the tokens, of it every kStep-th of the block's pairs of k-blocks.
template <class Operand, int kLogTokens, int kSegments>
class SeveralTokens {
  // As Operand::of_int8() has them.
  static constexpr bool kInt8IsHigh = std::is_same_v<Operand, CodebookOperand>;
  static constexpr int kTokens = 1 << kLogTokens;
  static constexpr int kStep = kSlices >> kLogTokens;
  static constexpr int kAhead = 4;               // pairs requested at once
  static constexpr int kLanes = 16 / kSegments;  // that have a segment
  const GemvArgs& args_;
  const OwnSlices own_;
  const int lane_, token_;
  const bool is_odd_;  // columns 8 to 15 of 16
  const int first_;    // of the block's pairs
  const char* row_;
  char* to_;  // this lane's k-block of the first pair
  ScaleAndSum* scale_to_;
  int at_[4];  // there, of each of a lane's four registers
  bool swaps_[2];
  uint4 share_[kAhead];

 public:
  __device__ SeveralTokens(const GemvArgs& args, const OwnSlices& own, int warp, char* memory)
      : args_(args),
        own_(own),
        lane_(static_cast<int>(threadIdx.x % 32)),
        token_(warp & (kTokens - 1)),
        is_odd_(lane_ % 2 == 1),
        first_(warp >> kLogTokens),
        // A slot without a token has the last one's.
        row_(static_cast<const char*>(args.rows.x) +
             min(token_, args.m - 1) * args.rows.ldx * (args.rows.is_int8 ? 1 : 2)) {
    const int slot = (2 * first_ + lane_ / 16) * kTokens + token_;
    to_ = memory + slot * 2 * kBlockK;
    scale_to_ = reinterpret_cast<ScaleAndSum*>(memory + args.layout.scales_and_sums) +
                ((2 * first_ + lane_ / 16) * kSegments + lane_ % 16 / kLanes) * kTokens + token_;
    const int sixteen = lane_ % 16 / 2;  // of the k-block's columns
    // Registers go in an order that puts no two lanes of a warp into the same bank.
    swaps_[0] = lane_ >= 16;
    swaps_[1] = sixteen >= 4;
    const int first = sixteen / 4 * Operand::kHalf + (is_odd_ ? 32 : 0) + sixteen / 2 % 2 * 8 + sixteen % 2 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int item = i ^ (swaps_[0] ? 1 : 0) ^ (swaps_[1] ? 2 : 0);
      at_[i] = first + item % 2 * 16 + item / 2 * Operand::kLow;
    }
  }

  // Requests this warp's first shares.
  __device__ void load() { load_from(first_); }

  __device__ void convert(float factor) {
    const int count = own_.pairs((args_.w.k_blocks + 1) / 2);
#pragma unroll 1
    for (int own = first_; own < count; own += kAhead * kStep) {
      Converted of[kAhead];
      if (args_.rows.is_int8) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) of[i].template take_bytes<kInt8IsHigh>(share_[i]);
      } else {
        make_integers(of);
      }
      if (own + kAhead * kStep < count) load_from(own + kAhead * kStep);
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) of[i].sum += __shfl_xor_sync(kFullWarp, of[i].sum, apart);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        store(of[i], 2 * own_.pair_of(own + i * kStep) + lane_ / 16 < args_.w.k_blocks, factor);
      }
    }
  }

 private:
  // own: a pair's place among the block's own.
  __device__ void load_from(int own) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int column = own_.pair_of(own + i * kStep) * 2 * kBlockK + lane_ * 8;
      share_[i] = make_uint4(0, 0, 0, 0);
      if (column >= args_.rows.k) continue;
      if (args_.rows.is_int8) {
        const uint2 bytes = __ldcg(reinterpret_cast<const uint2*>(row_ + column));
        share_[i] = make_uint4(bytes.x, bytes.y, 0, 0);
      } else {
        share_[i] = __ldcg(reinterpret_cast<const uint4*>(row_ + 2 * column));
      }
    }
  }

  // In the place of the next share.
  __device__ void store(const Converted& of, bool exists, float factor) {
    // The other lane's columns of the same two registers.
    uint32_t words[4];  // high bytes of the first register, of the second, then low ones
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t mine = is_odd_ ? of.pairs[2 + j] : of.pairs[j];
      const uint32_t others = __shfl_xor_sync(kFullWarp, is_odd_ ? of.pairs[j] : of.pairs[2 + j], 1);
      if constexpr (Operand::kCodesInTurn) {
        words[j] = __byte_perm(mine, others, is_odd_ ? 0x3276U : 0x7632U);
        words[2 + j] = __byte_perm(mine, others, is_odd_ ? 0x1054U : 0x5410U) ^ of.flips;
      } else {
        words[j] = __byte_perm(mine, others, is_odd_ ? 0x3726U : 0x7362U);
        words[2 + j] = __byte_perm(mine, others, is_odd_ ? 0x1504U : 0x5140U) ^ of.flips;
      }
    }
    swap(swaps_[0], words[0], words[1]);
    swap(swaps_[0], words[2], words[3]);
    swap(swaps_[1], words[0], words[2]);
    swap(swaps_[1], words[1], words[3]);
    if (exists) {
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to_ + at_[i]) = words[i];
      if (lane_ % kLanes == 0) *scale_to_ = {of.scale * factor, of.sum};
    }
    to_ += 2 * kStep * kTokens * 2 * kBlockK;
    scale_to_ += 2 * kStep * kSegments * kTokens;
  }

  __device__ static void swap(bool swaps, uint32_t& a, uint32_t& b) {
    const uint32_t first = swaps ? b : a;
    b = swaps ? a : b;
    a = first;
  }

  // In the loops of a step one share hides the latency of the others.
  __device__ void make_integers(Converted (&of)[kAhead]) const {
    const bool is_half = args_.rows.type == DType::kFloat16;
    uint32_t most[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) most[i] = largest_of_lane(share_[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t first = __reduce_max_sync(kFullWarp, lane_ < 16 ? most[i] : 0);
      const uint32_t second = __reduce_max_sync(kFullWarp, lane_ < 16 ? 0 : most[i]);
      most[i] = lane_ < 16 ? first : second;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float largest = half_of(static_cast<uint16_t>(most[i]), args_.rows.type);
      of[i].take(share_[i], is_half, Integers::power_of(__float_as_uint(largest)));
    }
  }

  // Magnitudes in 16 bits keep their order as integers, and NaN is above all.
  __device__ static uint32_t largest_of_lane(const uint4& share) {
    constexpr uint32_t kMagnitudes = 0x7FFF7FFFU;
    const uint32_t both = __vmaxu2(__vmaxu2(share.x & kMagnitudes, share.y & kMagnitudes),
                                   __vmaxu2(share.z & kMagnitudes, share.w & kMagnitudes));
    return max(both & 0xFFFFU, both >> 16);
  }
};

}  // namespace octofuse::lowbit
