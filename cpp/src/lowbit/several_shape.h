// How gemv_several.cu, the kernel for a few tokens whose bits are those of one, cuts its work, and where it is the
// fastest. Pure.
#pragma once

#include "lowbit/shape.h"

namespace octofuse::lowbit {

constexpr int kLeastSeveral = 2;  // tokens; gemv_int8.cu takes up to kTokensOfSet
constexpr int kMostSeveral = 8;

// Beside a codebook two sets of tokens were slower than gemm, with 4,096 to 18,944 columns and channels.
constexpr int most_several(LowbitFormat format) {
  return format == LowbitFormat::kCodebook ? kTokensOfSet : kMostSeveral;
}
constexpr int least_several(LowbitFormat format) { return format == LowbitFormat::kCodebook ? kLeastSeveral : 3; }
constexpr int log_several_slots(int64_t m) { return m > kTokensOfSet ? 3 : 2; }   // for tokens, as a power of two
constexpr bool several_takes_groups(int bits) { return bits == 4 || bits == 8; }  // of 32 and 64 columns

// Whether there is a kernel for this kind of weight.
constexpr bool several_takes(const LowbitProblem& problem) {
  const bool wide = problem.n % 16 == 0 && problem.aligned;
  const bool has_codes = problem.format == LowbitFormat::kUniform || problem.format == LowbitFormat::kCodebook;
  return has_codes && !problem.is_integer && wide && problem.m >= least_several(problem.format) &&
         problem.m <= most_several(problem.format) &&
         (segments_of(problem.group) == 1 || several_takes_groups(problem.bits));
}

// Row tiles of a warp, 0 where nothing fits, and whether two blocks divide the K slices: two tiles share a read of the
// tokens, and two blocks have half of these each. Of tiles that fit those with the least time; no sum depends on it.
struct SeveralShape {
  int row_tiles = 0;
  bool divides = false;

  // clusters: the GPU and its kernels have them.
  constexpr SeveralShape(const LowbitProblem& problem, int shared_memory, bool clusters) {
    const int k_blocks = k_blocks_of(problem.k);
    divides = clusters && k_blocks > kSlices;  // else there is little to share
    int64_t least = 0;
    for (int tiles = 1; tiles <= 2; ++tiles) {
      if (least_shared(problem, tiles, divides ? 1 : 0) > shared_memory) continue;
      const int64_t takes = time(problem, tiles);
      if (row_tiles > 0 && takes > least) continue;
      row_tiles = tiles;
      least = takes;
    }
  }

  constexpr int64_t time(const LowbitProblem& problem) const { return time(problem, row_tiles); }

 private:
  // ns on an H200, of 5 to 8 tokens, beside a codebook of 3 and 4.
  static constexpr int64_t time(const LowbitProblem& problem, int tiles) {
    // What a warp takes for a k-block: of two row tiles, and of one.
    constexpr int kOfBlock[2][9] = {{0, 850, 890, 1090, 930, 1150, 1210, 1300, 1400},
                                    {0, 560, 560, 745, 560, 700, 700, 740, 750}};
    constexpr int kOfCodebook[2] = {1280, 710};
    const int which = tiles == 2 ? 0 : 1;
    const int of_block = problem.format == LowbitFormat::kCodebook ? kOfCodebook[which] : kOfBlock[which][problem.bits];
    const int k_blocks = k_blocks_of(problem.k);
    const int64_t rounds = ceil_div(ceil_div(problem.n, 2 * kTileRows * tiles), kManyClusters);
    const int64_t of_slices = int64_t{k_blocks} * of_block / kSlices;
    return 3300 + int64_t{own_k_blocks(k_blocks, 1)} * 77 + rounds * (of_slices + 600);
  }

  static constexpr int least_shared(const LowbitProblem& problem, int tiles, int log_divide) {
    const int segments = segments_of(problem.group);
    return SharedLayout(own_k_blocks(k_blocks_of(problem.k), log_divide), segments, 1 << log_several_slots(problem.m),
                        tiles, kShallowStages, stage_bytes(problem.format, problem.bits, segments, tiles), 0, true)
        .bytes;
  }
};

constexpr int kLeastBlocksOfSeveral = 24;  // with K of 768 to 2,048 gemm was always as fast, or faster

// Whether 5 to 8 tokens are faster so than by gemm. N, K and the kind of weight alone decide, on any GPU as on an H200,
// since the two add in different orders.
inline bool is_faster_by_several(const LowbitProblem& problem) {
  const SeveralShape shape(problem, kMostShared, true);
  const int k_blocks = k_blocks_of(problem.k);
  const GemmShape gemm(kMostSeveral, static_cast<int>(problem.n), k_blocks,
                       has_every_block(problem.format, problem.bits));
  return shape.row_tiles > 0 && k_blocks >= kLeastBlocksOfSeveral &&
         shape.time(problem) < gemm.time_of_few(problem.bits, problem.n, k_blocks);
}

// Beside a codebook, whose table leaves gemv_int8's blocks little room: of 3 and 4 tokens up to 1.8 times as fast from
// 4096 x 4096 to 12288 x 12288, 0.87 to 0.93 times at 18,944 and 28,672 channels with K up to 4,096; of two 1.07 to 1.5
// times from K = 14,336 on, and else as fast or slower (H200).
constexpr bool is_faster_beside_codebook(const LowbitProblem& problem) {
  constexpr int kShortBlocks = 24, kLongBlocks = 64, kLongBlocksOfTwo = 112;
  constexpr int kWide = 13312;
  const int k_blocks = k_blocks_of(problem.k);
  if (problem.m == 2) return k_blocks >= kLongBlocksOfTwo;
  return k_blocks >= kLongBlocks || (k_blocks >= kShortBlocks && problem.n < kWide);
}

// Whether gemv_several.cu takes a call of gemv_int8's. Of 3 or 4 tokens those whose K is long, since every block of the
// other kernel converts all of it (measured: the same from K = 3,584 to 4,096, 1.03 to 1.5 times as fast from 5,120
// on); but narrow codes of wide layers are bound by instructions, of which the other kernel has fewer.
constexpr bool takes_several(const LowbitProblem& problem, int shared_memory, bool clusters) {
  if (!several_takes(problem) || SeveralShape(problem, shared_memory, clusters).row_tiles == 0) return false;
  if (problem.format == LowbitFormat::kCodebook) return clusters && is_faster_beside_codebook(problem);
  if (problem.m > kTokensOfSet || least_int8_gemv(problem) > shared_memory) return true;
  constexpr int kLongBlocks = 40;
  constexpr int kNarrowBits = 3;
  constexpr int kWide = 16384;
  return clusters && k_blocks_of(problem.k) >= kLongBlocks && (problem.bits > kNarrowBits || problem.n <= kWide);
}

}  // namespace octofuse::lowbit
