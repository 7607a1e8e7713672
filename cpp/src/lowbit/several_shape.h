// How gemv_several.cu, the kernel for a few tokens whose bits are those of one, cuts its work, and where it is the
// fastest. Pure.
#pragma once

#include "lowbit/shape.h"

namespace octofuse::lowbit {

constexpr int kMostTokensOfOneSet = 4;                                            // gemv_int8.cu takes no more
constexpr int kMostSeveral = 8;                                                   // tokens
constexpr bool several_takes_groups(int bits) { return bits == 4 || bits == 8; }  // of 32 and 64 columns

// Whether there is a kernel for this kind of weight.
constexpr bool several_takes(const LowbitProblem& problem) {
  const bool wide = problem.n % 16 == 0 && problem.aligned;
  return problem.format == LowbitFormat::kUniform && !problem.is_integer && wide && problem.m > 2 &&
         problem.m <= kMostSeveral && (segments_of(problem.group) == 1 || several_takes_groups(problem.bits));
}

// Row tiles of a warp, 0 where nothing fits, and whether two blocks divide the K slices: two tiles share a read of the
// tokens, and two blocks have half of these each. No sum depends on it.
struct SeveralShape {
  int row_tiles = 0;
  bool divides = false;

  // clusters: the GPU and its kernels have them.
  constexpr SeveralShape(const LowbitProblem& problem, int shared_memory, bool clusters) {
    const bool may_divide = clusters && k_blocks_of(problem.k) > kSlices;  // else it has little to share
    for (int tiles = 2; tiles > 0; --tiles) {
      for (int apart = may_divide ? 1 : 0; apart >= 0; --apart) {
        if (least_shared(problem, tiles, apart) > shared_memory) continue;
        row_tiles = tiles;
        divides = apart == 1;
        return;
      }
    }
  }

  // ns on an H200, of 5 to 8 tokens.
  constexpr int64_t time(int bits, int64_t n, int k_blocks) const {
    // What a warp takes for a k-block: of two row tiles, and of one.
    constexpr int kOfBlock[2][9] = {{0, 850, 890, 1090, 930, 1150, 1210, 1300, 1400},
                                    {0, 560, 560, 745, 560, 700, 700, 740, 750}};
    constexpr int kPairs = 66;  // of blocks
    const int64_t rounds = ceil_div(ceil_div(n, 2 * kTileRows * row_tiles), kPairs);
    const int64_t of_slices = int64_t{k_blocks} * kOfBlock[row_tiles == 2 ? 0 : 1][bits] / kSlices;
    return 3300 + int64_t{own_k_blocks(k_blocks, 1)} * 77 + rounds * (of_slices + 600);
  }

 private:
  static constexpr int least_shared(const LowbitProblem& problem, int tiles, int log_divide) {
    const int segments = segments_of(problem.group);
    return SharedLayout(own_k_blocks(k_blocks_of(problem.k), log_divide), segments, 1 << log_slots(problem.m), tiles,
                        kShallowStages, stage_bytes(problem.format, problem.bits, segments, tiles), 0, true)
        .bytes;
  }
};

constexpr int kLeastBlocksOfSeveral = 24;  // of 1 and 2 thousand columns gemm was always as fast, or faster

// An H200's: where bits are at stake, what is chosen depends on no GPU.
constexpr int kWholeSharedMemory = 227 << 10;

// Whether 5 to 8 tokens are faster so than by gemm. N, K and the kind of weight alone decide, since the two add in
// different orders.
inline bool is_faster_by_several(const LowbitProblem& problem) {
  const SeveralShape shape(problem, kWholeSharedMemory, true);
  const int k_blocks = k_blocks_of(problem.k);
  const GemmShape gemm(kMostSeveral, static_cast<int>(problem.n), k_blocks,
                       has_every_block(problem.format, problem.bits));
  return shape.row_tiles > 0 && k_blocks >= kLeastBlocksOfSeveral &&
         shape.time(problem.bits, problem.n, k_blocks) < gemm.time_of_few(problem.bits, problem.n, k_blocks);
}

// Whether 3 or 4 tokens are faster so than by gemv_int8.cu, whose blocks all convert all of a token. Narrow codes of
// wide layers are bound by instructions, of which that kernel has fewer.
constexpr bool takes_several(const LowbitProblem& problem, int shared_memory, bool clusters) {
  if (!several_takes(problem) || SeveralShape(problem, shared_memory, clusters).row_tiles == 0) return false;
  if (problem.m > kMostTokensOfOneSet || least_int8_gemv(problem) > shared_memory) return true;
  return clusters && k_blocks_of(problem.k) >= 40 && (problem.bits > 3 || problem.n <= 16384);
}

}  // namespace octofuse::lowbit
