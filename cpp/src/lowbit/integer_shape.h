// How the kernels of int8 tokens cut their work. Sums are exact: every cut gives the same bits, and that with the least
// time is taken. Pure: selection and launches both ask here.
#pragma once

#include <algorithm>
#include <iterator>
#include <limits>
#include <type_traits>

#include "lowbit/many_shape.h"

namespace octofuse::lowbit {

// Of gemm_integer.cu, which has the first two, and of gemm_many_integer.cu.
enum class IntegerKernel { kGemm, kStream, kMany };

// A block's tile; so many blocks of a cluster divide K. ns on an H200 (132 SMs): of a call, of a tile, and of a
// k-block, of uniform codes and of two levels, whose integers take more to make.
struct IntegerTile {
  IntegerKernel kernel;
  int tokens, channels, split;
  int start, round, of_block, of_two_levels;

  constexpr bool is_many() const { return kernel == IntegerKernel::kMany; }
  constexpr bool streams() const { return kernel == IntegerKernel::kStream; }
};

// Streams of 32 and 64 tokens were no faster than gemm_many's tiles.
constexpr auto kByGemm = IntegerKernel::kGemm, kByStream = IntegerKernel::kStream, kByMany = IntegerKernel::kMany;
constexpr IntegerTile kIntegerTiles[] = {
    {kByGemm, 16, 64, 1, 700, 2450, 115, 135},    {kByGemm, 16, 64, 2, 750, 2800, 135, 145},
    {kByGemm, 16, 128, 1, 1200, 2550, 140, 255},  {kByGemm, 16, 192, 2, 1450, 3250, 225, 430},
    {kByGemm, 32, 64, 1, 850, 2750, 115, 135},    {kByGemm, 32, 64, 2, 800, 3000, 135, 145},
    {kByGemm, 32, 128, 1, 1500, 3150, 145, 255},  {kByGemm, 32, 192, 2, 1550, 3700, 230, 425},
    {kByGemm, 64, 64, 1, 500, 4050, 130, 150},    {kByGemm, 64, 64, 2, 700, 3900, 140, 155},
    {kByGemm, 64, 192, 2, 1300, 5250, 270, 455},  {kByGemm, 96, 64, 1, 500, 7050, 135, 205},
    {kByGemm, 96, 64, 2, 850, 5850, 150, 215},    {kByGemm, 96, 192, 2, 750, 8150, 340, 485},
    {kByGemm, 128, 64, 1, 200, 7750, 175, 220},   {kByGemm, 128, 64, 2, 350, 6550, 185, 225},
    {kByGemm, 128, 192, 2, 200, 8450, 470, 545},  {kByStream, 16, 128, 1, 3700, 200, 250, 281},
    {kByMany, 32, 128, 1, 3650, 950, 195, 355},   {kByMany, 32, 256, 1, 2900, 1000, 325, 560},
    {kByMany, 64, 128, 1, 3450, 1500, 230, 380},  {kByMany, 64, 256, 1, 6200, 2500, 370, 650},
    {kByMany, 96, 128, 1, 3000, 1850, 265, 400},  {kByMany, 96, 128, 2, 3250, 2500, 265, 370},
    {kByMany, 96, 192, 1, 3800, 2000, 350, 525},  {kByMany, 128, 128, 1, 3150, 1850, 325, 430},
    {kByMany, 128, 128, 2, 3250, 3050, 305, 410}, {kByMany, 128, 192, 1, 3050, 2150, 505, 605},
    {kByMany, 128, 192, 2, 2850, 4600, 440, 535}, {kByMany, 160, 128, 1, 3100, 2050, 400, 475},
    {kByMany, 160, 128, 2, 2850, 3650, 380, 445}, {kByMany, 192, 128, 1, 2400, 2000, 495, 520},
    {kByMany, 192, 128, 2, 2800, 3700, 515, 530}, {kByMany, 224, 128, 1, 1500, 3400, 575, 590},
    {kByMany, 224, 128, 2, 2550, 4550, 555, 560}, {kByMany, 256, 128, 1, 1500, 3150, 660, 665},
    {kByMany, 256, 128, 2, 2700, 5100, 620, 620}, {kByMany, 128, 256, 1, 1850, 3950, 695, 965},
};

// Which widths have all of them. The others do without most, to keep the library small.
constexpr bool has_every_integer_tile(LowbitFormat format, int bits) {
  return format == LowbitFormat::kTwoLevel || bits == 4;
}
constexpr bool has_integer_tile(LowbitFormat format, int bits, const IntegerTile& tile) {
  if (has_every_integer_tile(format, bits)) return true;
  if (tile.streams()) return false;
  if (tile.is_many()) return tile.channels == 128 && tile.split == 1 && (tile.tokens == 128 || tile.tokens == 256);
  return tile.channels <= 128 && (tile.tokens == 32 || tile.tokens == 64);
}

// Tiles that are multiplied at a time, and those of a whole output.
constexpr int64_t integer_tiles_at_once(const IntegerTile& tile) {
  return kSms / (tile.is_many() ? kSharing : tile.split);
}
constexpr int64_t integer_tiles_of(const IntegerTile& tile, int64_t m, int64_t n) {
  const int sharing = tile.is_many() && tile.split == 1 ? kSharing : 1;  // blocks with neighbouring channels
  return ceil_div(m, tile.tokens) * ceil_div(n, tile.channels * sharing);
}

struct IntegerChoice {
  IntegerTile tile{};
  bool shares = false;  // as in ManyShape; a stream does
  int64_t time = std::numeric_limits<int64_t>::max();
};

// A tile, and whether blocks share, by its ns. A k-block takes as long as its products, or as its bytes: the fewer SMs
// read, the more each of them gets.
constexpr IntegerChoice integer_choice_by(const IntegerTile& tile, const LowbitProblem& problem) {
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
  if (tile.streams()) return {tile, true, ends + products(at_once) * tiles / at_once};
  const int64_t whole = ends + tiles / at_once * products(at_once) + (rest == 0 ? 0 : products(rest));
  const bool may_share = tile.is_many() && k_blocks >= ManyShape::kLeastShared;
  if (!may_share || rest == 0 || tiles < at_once) return {tile, false, whole};
  const int64_t shared =
      ends + products(at_once) * tiles / at_once + ManyShape::handover_time(tile.tokens, tile.channels);
  return {tile, shared < whole, std::min(whole, shared)};
}

// The fastest of gemm_many_integer.cu's, or of gemm_integer.cu's.
inline IntegerChoice integer_choice(const LowbitProblem& problem, bool is_many) {
  IntegerChoice best;
  for (const IntegerTile& tile : kIntegerTiles) {
    if (tile.is_many() != is_many || !has_integer_tile(problem.format, problem.bits, tile)) continue;
    if (!is_many && ceil_div(problem.m, tile.tokens) > 65535) continue;  // a grid has no more blocks in z
    if (tile.streams() && (problem.m > tile.tokens || !streams(problem))) continue;
    // K in several k-blocks for each of those that divide it.
    if (tile.split > 1 && k_blocks_of(problem.k) < 2 * tile.split) continue;
    const IntegerChoice choice = integer_choice_by(tile, problem);
    if (choice.time < best.time) best = choice;
  }
  return best;
}

// f(place in kIntegerTiles, an integral constant) for each of one kernel's that a kind of weight has.
template <LowbitFormat kFormat, int kBits, bool kMany, class F>
void for_each_integer_tile(F f) {
  for_each_index<std::size(kIntegerTiles)>([&](auto place) {
    constexpr IntegerTile kTile = kIntegerTiles[place.value];
    if constexpr (kTile.is_many() == kMany && has_integer_tile(kFormat, kBits, kTile)) f(place);
  });
}

// gemm_many_integer.cu's, in the form of its launch.
inline ManyShape integer_many_shape(const LowbitProblem& problem) {
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
