// How the kernels of int8 tokens cut their work. Sums are exact: every cut gives the same bits, and that with the least
// time is taken. Pure: selection and launches both ask here.
#pragma once

#include <algorithm>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>

#include "lowbit/shape.h"

namespace octofuse::lowbit {

// A block's tile; so many blocks of a cluster divide K. is_many: of gemm_many_integer.cu, else of gemm_integer.cu. ns
// on an H200 (132 SMs): of a call, of a tile, and of a k-block, of uniform codes and of two levels, whose integers take
// more to make.
struct IntegerTile {
  bool is_many;
  int tokens, channels, split;
  int start, round, of_block, of_two_levels;
};

constexpr IntegerTile kIntegerTiles[] = {
    {false, 16, 64, 1, 0, 2000, 120, 120},     {false, 16, 64, 2, 0, 2900, 135, 135},
    {false, 16, 128, 1, 0, 2600, 170, 220},    {false, 16, 192, 2, 0, 3400, 220, 280},
    {false, 32, 64, 1, 0, 2300, 130, 130},     {false, 32, 64, 2, 0, 3000, 145, 145},
    {false, 32, 128, 1, 0, 3300, 190, 240},    {false, 32, 192, 2, 0, 3700, 280, 320},
    {false, 64, 64, 1, 0, 3200, 150, 160},     {false, 64, 64, 2, 0, 3500, 170, 180},
    {false, 64, 192, 2, 0, 4400, 410, 500},    {false, 128, 64, 1, 0, 6750, 180, 210},
    {false, 128, 64, 2, 0, 6000, 190, 230},    {false, 128, 192, 2, 0, 8000, 470, 550},
    {true, 32, 128, 1, 0, 2500, 260, 300},     {true, 32, 256, 1, 3300, 100, 390, 450},
    {true, 64, 128, 1, 0, 3000, 300, 350},     {true, 64, 256, 1, 0, 4800, 460, 540},
    {true, 128, 128, 1, 2000, 1600, 460, 480}, {true, 128, 128, 2, 2000, 2250, 475, 505},
    {true, 128, 192, 1, 2000, 3700, 560, 590}, {true, 128, 192, 2, 2000, 3500, 600, 630},
    {true, 192, 128, 1, 2000, 3300, 490, 520}, {true, 192, 128, 2, 2000, 3400, 525, 555},
    {true, 256, 128, 1, 2000, 4150, 600, 620}, {true, 256, 128, 2, 2000, 4200, 640, 640},
    {true, 128, 256, 1, 2000, 5800, 610, 820},
};

// Which widths have all of them. The others do without most, to keep the library small.
constexpr bool has_every_integer_tile(LowbitFormat format, int bits) {
  return format == LowbitFormat::kTwoLevel || bits == 4;
}
constexpr bool has_integer_tile(LowbitFormat format, int bits, const IntegerTile& tile) {
  if (has_every_integer_tile(format, bits)) return true;
  if (tile.is_many) return tile.channels == 128 && tile.split == 1 && (tile.tokens == 128 || tile.tokens == 256);
  return tile.channels <= 128 && (tile.tokens == 32 || tile.tokens == 64);
}

// Tiles that are multiplied at a time, and those of a whole output.
constexpr int64_t integer_tiles_at_once(const IntegerTile& tile) {
  constexpr int kSms = 132;
  return kSms / (tile.is_many ? kSharing : tile.split);
}
constexpr int64_t integer_tiles_of(const IntegerTile& tile, int64_t m, int64_t n) {
  const int sharing = tile.is_many && tile.split == 1 ? kSharing : 1;  // blocks with neighbouring channels
  return ceil_div(m, tile.tokens) * ceil_div(n, tile.channels * sharing);
}

struct IntegerChoice {
  IntegerTile tile{};
  bool shares = false;  // as in ManyShape
  int64_t time = std::numeric_limits<int64_t>::max();
};

// By its ns. A k-block takes as long as its products, or as its bytes: the fewer SMs read, the more each of them gets.
constexpr IntegerChoice integer_time(const IntegerTile& tile, const LowbitProblem& problem) {
  constexpr int64_t kBytesOfSm = 32'600'000;  // a ms
  const int64_t k_blocks = ceil_div(k_blocks_of(problem.k), tile.split);
  const int64_t bytes = int64_t{tile.channels} * kBlockK * problem.bits / 8;
  const int64_t of_block = problem.format == LowbitFormat::kTwoLevel ? tile.of_two_levels : tile.of_block;
  const int64_t at_once = integer_tiles_at_once(tile);
  const int64_t tiles = integer_tiles_of(tile, problem.m, problem.n);
  const auto products = [&](int64_t some) {
    return k_blocks * std::max(of_block, bytes * 1'000'000 / kBytesOfSm * some / at_once);
  };
  const int64_t rest = tiles % at_once;
  const int64_t ends = tile.start + ceil_div(tiles, at_once) * tile.round;
  const int64_t whole = ends + tiles / at_once * products(at_once) + (rest == 0 ? 0 : products(rest));
  constexpr int kLeastTokens = 128;  // fewer were not measured
  const bool may_share = tile.is_many && tile.tokens >= kLeastTokens && k_blocks >= ManyShape::kLeastShared;
  if (!may_share || rest == 0 || tiles < at_once) return {tile, false, whole};
  const int64_t shared =
      ends + products(at_once) * tiles / at_once + ManyShape::handover_time(tile.tokens, tile.channels);
  return {tile, shared < whole, std::min(whole, shared)};
}

// The fastest of one of the two kernels.
constexpr IntegerChoice integer_choice(const LowbitProblem& problem, bool is_many) {
  IntegerChoice best;
  for (const IntegerTile& tile : kIntegerTiles) {
    if (tile.is_many != is_many || !has_integer_tile(problem.format, problem.bits, tile)) continue;
    if (!is_many && ceil_div(problem.m, tile.tokens) > 65535) continue;  // a grid has no more blocks in z
    // K in several k-blocks for each of those that divide it.
    if (tile.split > 1 && k_blocks_of(problem.k) < 2 * tile.split) continue;
    const IntegerChoice choice = integer_time(tile, problem);
    if (choice.time < best.time) best = choice;
  }
  return best;
}

// f(place in kIntegerTiles, an integral constant) for each of one kernel's that a kind of weight has.
template <LowbitFormat kFormat, int kBits, bool kMany, class F, size_t... i>
void for_each_integer_tile(F f, std::index_sequence<i...>) {
  const auto with = [&](auto place) {
    constexpr IntegerTile kTile = kIntegerTiles[place.value];
    if constexpr (kTile.is_many == kMany && has_integer_tile(kFormat, kBits, kTile)) f(place);
  };
  (with(std::integral_constant<size_t, i>()), ...);
}
template <LowbitFormat kFormat, int kBits, bool kMany, class F>
void for_each_integer_tile(F f) {
  for_each_integer_tile<kFormat, kBits, kMany>(f, std::make_index_sequence<std::size(kIntegerTiles)>());
}

// gemm_many_integer.cu's, in the form of its launch.
constexpr ManyShape integer_many_shape(const LowbitProblem& problem) {
  const IntegerChoice choice = integer_choice(problem, true);
  const IntegerTile& tile = choice.tile;
  ManyShape shape;
  shape.shares = choice.shares;
  shape.tokens = tile.tokens;
  shape.channels = tile.channels;
  shape.splits_k = tile.split > 1;
  shape.token_tiles = static_cast<int>(ceil_div(problem.m, tile.tokens));
  shape.channel_pairs = static_cast<int>(ceil_div(problem.n, tile.channels * (shape.splits_k ? 1 : kSharing)));
  return shape;
}

}  // namespace octofuse::lowbit
