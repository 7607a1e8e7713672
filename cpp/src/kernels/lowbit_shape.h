// How lowbit_gemm.cu cuts its work into blocks.
#pragma once

#include <algorithm>
#include <type_traits>

namespace octofuse::lowbit {

constexpr int kMostSplit = 4;      // blocks of a cluster
constexpr int kFewRows = 64 * 66;  // so that blocks of 64, two of which share K, fit an SM each

// A block has so many tokens and rows; so many blocks share K, a cluster. K has 4 parts a block of 64 rows, 2 of 128
// and 1 of 192: how many there are in all depends on N and K alone, and so do a token's bits. Sizes are those of an
// H200, 132 SMs with room for 66 clusters of 2 or 30 of 4, whatever the GPU: the same bits on all.
struct Shape {
  int tokens = 32, rows = 64, split = 1;

  // every: all kinds of blocks are there, else those of up to 64 tokens and 64 or 128 rows.
  Shape(int m, int n, int chunks, bool every) {
    if (is_split_by_4(n, chunks)) {
      split = 4;
    } else if (n <= kFewRows) {
      split = chunks >= 8 ? 2 : 1;
    } else if (n <= 2 * kFewRows) {  // 4 parts; with more rows in a block tokens are read less often
      const bool by_192 = every && n <= kClusters[4] * 192;
      if (m > 32) rows = by_192 ? 192 : 128;
      if (m > 32) split = by_192 ? 4 : 2;
    } else {  // 2 parts
      const bool by_192 = every && rounds(n, 192, 2) * 192 < rounds(n, 128, 1) * 128 * 2;
      rows = by_192 ? 192 : 128;
      split = by_192 ? 2 : 1;
    }
    // Few tokens in each of many blocks where SMs have room for these at once.
    while (tokens < std::min(m, every ? 128 : 64) &&
           blocks_of(n, rows) * ((m + tokens - 1) / tokens) > kClusters[split]) {
      tokens *= 2;
    }
  }

  static bool is_split_by_4(int n, int chunks) { return n <= kClusters[4] * 64 && chunks >= 16; }

 private:
  static constexpr int kClusters[kMostSplit + 1] = {0, 132, 66, 39, 30};  // at once, of so many blocks

  static int blocks_of(int n, int rows) { return (n + rows - 1) / rows; }
  static int rounds(int n, int rows, int split) {
    return (blocks_of(n, rows) + kClusters[split] - 1) / kClusters[split];
  }
};

// f(tokens, rows), integral constants.
template <bool kEvery, class F>
void with_shape(const Shape& shape, F f) {
  const auto with_rows = [&](auto tokens) {
    if (shape.rows == 64) return f(tokens, std::integral_constant<int, 64>());
    if constexpr (kEvery) {
      if (shape.rows == 192) return f(tokens, std::integral_constant<int, 192>());
    }
    f(tokens, std::integral_constant<int, 128>());
  };
  if (shape.tokens == 32) return with_rows(std::integral_constant<int, 32>());
  if constexpr (kEvery) {
    if (shape.tokens == 128) return with_rows(std::integral_constant<int, 128>());
  }
  with_rows(std::integral_constant<int, 64>());
}

}  // namespace octofuse::lowbit
