// Up to how many tokens gemm and gemm_split take a weight, before gemm_many does. N, K and the kind of weight alone
// decide, since the three add in different orders: a token's bits may not depend on how many stand beside it.
#pragma once

#include <array>
#include <cstddef>

#include "lowbit/many_shape.h"

namespace octofuse::lowbit {

constexpr int64_t kLeastManyTokens = 65;

// 0 for none: the two blocks of a cluster divide K ("gemm_split"), where otherwise many SMs would be idle: where a
// cluster has one tile of 128 x 128 at most, and on from there as long as the model finds it faster.
inline int64_t most_split_tokens(int64_t n, int k_blocks, TileSet set) {
  constexpr int64_t kTile = 128, kStep = 32, kMost = 1024;
  constexpr int kLeastBlocks = 8;  // of K: fewer take no longer than the exchange of sums
  if (n < 1 || k_blocks < kLeastBlocks) return 0;
  const auto time = [&](int64_t m, bool splits) { return ManyShape(m, n, k_blocks, set, splits).time; };
  int64_t m = kManyClusters / ceil_div(n, kTile) * kTile;
  while (m < kMost && time(m + kStep, true) < time(m + kStep, false)) m += kStep;
  return m;
}

// 64 at least: gemm_split or gemm_many take 65 tokens where they are 5 % faster with 96 and 128, more where they are no
// more than 5 % slower.
inline int64_t most_gemm_tokens(int64_t n, int k_blocks, TileSet set, int64_t most_split) {
  constexpr int64_t kStep = 128;
  constexpr int64_t kMost = 8 * kStep;
  const auto by_gemm = [&](int64_t m) {
    return GemmShape(static_cast<int>(m), static_cast<int>(n), k_blocks, set != TileSet::kFew).time(m, n, k_blocks);
  };
  const auto by_many = [&](int64_t m) { return ManyShape(m, n, k_blocks, set, m <= most_split).time; };
  if ((by_gemm(96) + by_gemm(kStep)) * 20 >= (by_many(96) + by_many(kStep)) * 21) return kLeastManyTokens - 1;
  for (int64_t m = kStep; m < kMost; m += kStep) {
    if (by_gemm(m + kStep) * 21 >= by_many(m + kStep) * 20) return m;
    // There not gemm_many takes the others, but a weight that is dequantised once.
    const bool splits = m + kStep <= most_split;
    if (!splits && m >= 2 * kStep && GemmShape::is_split_by_4(n, k_blocks)) return m;
  }
  return kMost;
}

struct TokenLimits {
  int64_t n = 0;
  int k_blocks = 0;
  TileSet set = TileSet::kFew;
  int64_t most_split = 0, most_gemm = 0;

  TokenLimits() = default;
  TokenLimits(int64_t channels, int blocks, TileSet tiles)
      : n(channels),
        k_blocks(blocks),
        set(tiles),
        most_split(most_split_tokens(n, k_blocks, set)),
        most_gemm(most_gemm_tokens(n, k_blocks, set, most_split)) {}
};

// Kept: a model asks for the same few again with every call, and finding them takes microseconds.
inline const TokenLimits& limits_of(const LowbitProblem& problem) {
  constexpr size_t kKept = 64;
  thread_local std::array<TokenLimits, kKept> kept;
  const int k_blocks = k_blocks_of(problem.k);
  const TileSet set = tile_set_of(problem.format, problem.bits);
  const auto mixed = static_cast<size_t>(problem.n) * 31 + static_cast<size_t>(k_blocks) * 3 + static_cast<size_t>(set);
  TokenLimits& limits = kept[mixed * 2654435761U / 64 % kKept];
  if (limits.n != problem.n || limits.k_blocks != k_blocks || limits.set != set) {
    limits = TokenLimits(problem.n, k_blocks, set);
  }
  return limits;
}

}  // namespace octofuse::lowbit
