// The products of a few tokens with low-bit weights, in int8 (of float8 weights: in fp16). gemv_int8.cu has the kernels
// for up to 4 tokens, gemv_several.cu those for 2 to 8.
#pragma once

#include "device/mma.cuh"
#include "lowbit/gemv.cuh"
#include "lowbit/integers.cuh"

namespace octofuse::lowbit {

// By which a token's scales are multiplied.
template <class Traits>
__device__ inline float factor_of(const GemvArgs& args) {
  constexpr float kOfFormat = kFactor<Traits::kFormat>;
  return Traits::Code::kCodebook ? kOfFormat * args.levels.unit : kOfFormat;
}

constexpr int stages_in(int bytes, int stage) {
  return bytes < 3 * stage ? 3 : bytes > 16 * stage ? 16 : bytes / stage;
}

// What a kernel makes of its tokens: kNorm: it normalises them itself. kIntegers: they are int8, and so is the weight
// (has_integers()): sums of all of K are integers.
enum class Kind { kPlain, kNorm, kIntegers };

// A kernel at compile time. kTable: of a codebook's levels; else these are in registers. kSets: of tokens.
template <LowbitFormat kFormat_, int kBits, int kGroups, int kRowTiles_, Kind kKind = Kind::kPlain, bool kTable = false,
          int kSets_ = 1>
struct Traits {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kSets = kSets_;
  static constexpr bool kNorm = kKind == Kind::kNorm;
  static constexpr bool kIntegers = kKind == Kind::kIntegers;
  using Total = std::conditional_t<kIntegers, int32_t, float>;  // of groups
  static constexpr int kShares = 4;
  static constexpr int kNormShares = 2;
  using Code = Codes<kFormat, kBits>;
  // Integers with one scale a row are scaled once, when all of K has been added up.
  static constexpr bool kHasScales = !kIntegers || kFormat == LowbitFormat::kTwoLevel;
  using Stage = lowbit::Stage<Code, kGroups, kRowTiles, kHasScales>;
  static constexpr int kBytes = Stage::kBytes;
  // Many bytes on their way keep memory busy while tokens are converted. Below 4 bits instructions bound the kernel,
  // and a deeper ring was slower.
  static constexpr int kDeep = stages_in((Stage::kTile < 1024 ? 112 : 160) << 10, kSlices* kBytes);
  static constexpr bool kShallowForOneStage = true;
  static constexpr int kTableBytes = kTable ? kIntegerTableBytes : 0;
  using LevelsInUse = std::conditional_t<kTable, LevelTable, LevelBytes>;
  using Levels = std::conditional_t<Code::kCodebook, LevelsInUse, NoLevels>;
  using OfLevels = std::conditional_t<kTable, PairedOperand, CodebookOperand>;
  using Operand =
      std::conditional_t<Code::kCodebook, OfLevels, std::conditional_t<Code::kFloat8, HalfOperand, Int8Operand>>;
  using Sum = typename Operand::Sum;
  using Reader = typename Operand::template Reader<kSets>;
};

// Adds the products of a step's 32 columns; `words`: this lane's codes of each row tile.
template <class Traits>
__device__ void multiply_step(const Int8Operand::Reader<Traits::kSets>& x, const NoLevels& /*levels*/, int step,
                              const uint32_t (&words)[Traits::kRowTiles][Traits::Code::kWords],
                              int32_t (&acc)[Traits::kRowTiles * Traits::kSets][4]) {
  using Code = typename Traits::Code;
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
    uint32_t a[4];
    codes_of_step<Traits::kFormat, Code::kPlanes ? 1 : Code::kWidth>(words[tile], step, a);
#pragma unroll
    for (int set = 0; set < Traits::kSets; ++set) {
      mma_int8<Code::kSparse>(a, x.of(set, step, 0), x.of(set, step, 1), acc[tile * Traits::kSets + set]);
    }
  }
}

template <class Traits>
__device__ void multiply_step(const PairedOperand::Reader<1>& x, const LevelTable& levels, int step,
                              const uint32_t (&words)[Traits::kRowTiles][Traits::Code::kWords],
                              int32_t (&acc)[Traits::kRowTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t b[2];
    x.operand(step, half, b);
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
      uint32_t a[4];
      levels.operand(words[tile][step * 2 + half], a);
      mma_int8<true>(a, b[0], b[1], acc[tile]);
    }
  }
}

template <class Traits>
__device__ void multiply_step(const Int8Operand::Reader<Traits::kSets>& x, const LevelBytes& levels, int step,
                              const uint32_t (&words)[Traits::kRowTiles][Traits::Code::kWords],
                              int32_t (&acc)[Traits::kRowTiles * Traits::kSets * 2][4]) {
  constexpr int kTables = LevelBytes::kTables;
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
    uint32_t parts[4][kTables];  // of an operand's register
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[tile][step * 2 + i / 2];
      levels.look_up(i % 2 == 0 ? word : word >> 16, parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kTables; ++i) {
      const int part = i % 2 * 2 + i / 2;  // neighbouring products add to different sums
      const uint32_t a[4] = {parts[0][part], parts[1][part], parts[2][part], parts[3][part]};
#pragma unroll
      for (int set = 0; set < Traits::kSets; ++set) {
        mma_int8<true>(a, x.of(set, step, 0), x.of(set, step, 1), acc[(tile * Traits::kSets + set) * 2 + part / 2]);
      }
    }
  }
}

template <class Traits>
__device__ void multiply_step(const HalfOperand::Reader<1>& x, const NoLevels& /*levels*/, int step,
                              const uint32_t (&words)[Traits::kRowTiles][Traits::Code::kWords],
                              float (&acc)[Traits::kRowTiles * 2][4]) {
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
    uint32_t codes[4];
    codes_of_step<Traits::kFormat, Traits::Code::kWidth>(words[tile], step, codes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = halves_of_e4m3(codes[half * 2 + i % 2] >> (i / 2 * 16));
      mma_half<__half>(a, x.of(step, half, 0), x.of(step, half, 1), acc[tile * 2 + half]);
    }
  }
}

// Adds the second sums to the first and clears them.
__device__ inline void join_sums(float (&first)[4], float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    first[i] = __fadd_rn(first[i], second[i]);
    second[i] = 0.0F;
  }
}

// Sums of levels' low bytes with a token's high ones stand for as much as those of high with low ones.
__device__ inline void join_sums(int32_t (&high)[4], int32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) high[i + 1] += low[i];
#pragma unroll
  for (int32_t& sum : low) sum = 0;
}

// Adds a segment's products to the sums of integers, of channels lane / 4 and lane / 4 + 8 and one token.
template <class Traits>
__device__ inline void add_integers(const Weight& w, char* stage, int segment, int tile, int lane, int sum,
                                    int32_t (&c)[4], int32_t (&y)[2]) {
  using Stage = typename Traits::Stage;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (Traits::kFormat == LowbitFormat::kTwoLevel) {
      const int at = segment * Stage::kChannels + tile * kTileRows + lane / 4 + row * 8;
      const uint16_t pair = Stage::scales(stage)[at];
      y[row] += (c[row * 2 + 1] - zero_of_pair(pair) * sum) * scale_of_pair(pair);
    } else {
      y[row] += c[row * 2 + 1] - w.twice_zero / 2 * sum;
    }
    c[row * 2] = c[row * 2 + 1] = 0;
  }
}

// The products of a k-block. x: this lane's columns of its tokens; scales_and_sums: of its token of the first set, one
// for each segment.
template <class Traits>
__device__ void multiply(const Weight& w, typename Traits::Reader& x, const typename Traits::Levels& levels,
                         const ScaleAndSum* scales_and_sums, int tokens, char* stage, int lane,
                         typename Traits::Total (&y)[Traits::kRowTiles * Traits::kSets][2]) {
  using Stage = typename Traits::Stage;
  using Code = typename Traits::Code;
  constexpr int kRowTiles = Traits::kRowTiles;
  constexpr int kSets = Traits::kSets;
  constexpr int kSums = Traits::Operand::kSums;
  x.load();
  const int segments = Stage::kGroups > 0 ? Stage::kGroups : w.groups.segments;
  float of_block[kRowTiles * kSets][2] = {};
#pragma unroll
  for (int plane = 0; plane < Code::kCount; ++plane) {
    uint32_t words[kRowTiles][Code::kWords];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      read_words<Code::kWidth>(stage + (tile * Code::kCount + plane) * Code::kBytes, lane, words[tile]);
    }
    typename Traits::Sum acc[kRowTiles * kSets * kSums][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_step<Traits>(x, levels, step, words, acc);
      if ((step + 1) * segments % kSteps != 0) continue;
      const int segment = step * segments / kSteps;
      int sum[kSets];
#pragma unroll
      for (int set = 0; set < kSets; ++set) sum[set] = scales_and_sums[segment * tokens + set * kTokensOfSet].sum;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        if constexpr (Traits::kIntegers) {
          static_assert(kSets == 1);
          add_integers<Traits>(w, stage, segment, tile, lane, sum[0], acc[tile], y[tile]);
          continue;
        }
        float scale[2];
        int twice_zero[2];
        read_scales<Stage>(w.type, stage, segment, plane, tile, lane, scale);
        read_zeros<Stage>(w, stage, segment, tile, lane, twice_zero);
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          const int at = tile * kSets + set;
          if constexpr (kSums == 2) join_sums(acc[at * 2], acc[at * 2 + 1]);
          add_products<Traits::kFormat>(acc[at * kSums], scale, twice_zero, sum[set], of_block[at]);
        }
      }
    }
  }
  if constexpr (!Traits::kIntegers) {
#pragma unroll
    for (int i = 0; i < kRowTiles * kSets * 2; ++i) {
      const float scale = scales_and_sums[i / 2 % kSets * kTokensOfSet].scale;
      y[i / 2][i % 2] = __fmaf_rn(of_block[i / 2][i % 2], scale, y[i / 2][i % 2]);
    }
  }
}

}  // namespace octofuse::lowbit
