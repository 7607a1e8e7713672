// How gemm_many and gemm_split cut their work. Pure: selection and launches both ask here.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "lowbit/shape.h"

namespace octofuse::lowbit {

constexpr int kSharing = 2;  // blocks of a cluster, which share tokens

// Tiles that a kind of weight has: uniform codes of 4 and 8 bits all, others that are common most, the rest those of
// whole 64 tokens alone, to keep the library small.
enum class TileSet { kFew, kMore, kAll };
constexpr TileSet tile_set_of(LowbitFormat format, int bits) {
  if (format == LowbitFormat::kUniform && (bits == 4 || bits == 8)) return TileSet::kAll;
  return has_every_block(format, bits) ? TileSet::kMore : TileSet::kFew;
}

// A block's tile; whether both blocks of a cluster have it and divide K; the smallest set that has it. ns on an H200:
// of a k-block, and of a tile behind its k-blocks, beside divided K with the exchange of sums.
struct ManyTile {
  int tokens, channels;
  bool splits_k;
  TileSet set;
  int of_block, end;
};
constexpr auto kFew = TileSet::kFew, kMore = TileSet::kMore, kAll = TileSet::kAll;
constexpr ManyTile kManyTiles[] = {
    {96, 128, false, kMore, 605, 1300},  {96, 192, false, kMore, 860, 1700},   {112, 128, false, kMore, 668, 1500},
    {112, 192, false, kAll, 920, 1900},  {128, 128, false, kFew, 730, 1640},   {128, 192, false, kFew, 1040, 2070},
    {128, 256, false, kFew, 1500, 2920}, {144, 128, false, kAll, 785, 1640},   {144, 192, false, kAll, 1130, 2100},
    {160, 128, false, kMore, 870, 1640}, {160, 192, false, kAll, 1250, 2100},  {176, 128, false, kAll, 950, 1620},
    {192, 128, false, kFew, 1030, 1610}, {208, 128, false, kMore, 1110, 1750}, {224, 128, false, kMore, 1190, 1850},
    {256, 128, false, kFew, 1390, 1980}, {96, 128, true, kMore, 600, 2450},    {96, 192, true, kMore, 870, 3300},
    {112, 128, true, kAll, 680, 2500},   {112, 192, true, kAll, 970, 3350},    {128, 128, true, kFew, 750, 2550},
    {128, 192, true, kFew, 1060, 3380},  {144, 128, true, kAll, 815, 2500},    {144, 192, true, kAll, 1180, 3400},
    {160, 128, true, kMore, 880, 2500},  {160, 192, true, kAll, 1300, 3400},   {176, 128, true, kAll, 965, 2500},
    {192, 128, true, kFew, 1040, 2500},  {208, 128, true, kAll, 1125, 2500},   {224, 128, true, kMore, 1210, 2500},
};

// The tile by which all tokens are multiplied in the least time. But for splits_k no sum depends on it.
struct ManyShape {
  int tokens = 0, channels = 0;
  int token_tiles = 0, channel_pairs = 0;  // of the whole output; two tiles of channels are a cluster's
  bool splits_k = false;                   // its blocks have the same tile: then a pair is one tile of channels
  bool shares = false;                     // clusters share the tiles that are left over behind whole rounds
  int64_t time = 0;                        // ns on an H200

  static constexpr int kStart = 2000;     // ns: of the kernel
  static constexpr int kLeastShared = 8;  // k-blocks of a block's tile, of which clusters may share some

  // ns in which a cluster gets another's sums of a tile and gives its own to a third: the bytes of all through L2, and
  // a part more that begins and ends.
  static constexpr int64_t handover_time(int tile_tokens, int tile_channels) {
    return 1500 + int64_t{tile_tokens} * tile_channels / 4;
  }

  constexpr ManyShape() = default;
  // splits: blocks divide K.
  constexpr ManyShape(int64_t m, int64_t n, int k_blocks, TileSet set, bool splits = false) : splits_k(splits) {
    for (const ManyTile& tile : kManyTiles) {
      if (tile.splits_k == splits && tile.set <= set) consider(tile, m, n, k_blocks);
    }
  }
  constexpr int64_t tiles() const { return int64_t{token_tiles} * channel_pairs; }

 private:
  // Takes the tile if it is the fastest so far.
  constexpr void consider(const ManyTile& tile, int64_t m, int64_t n, int64_t k_blocks) {
    const int64_t down = ceil_div(m, tile.tokens);
    const int64_t pairs = ceil_div(n, tile.channels * (splits_k ? 1 : kSharing));
    if (splits_k) k_blocks = ceil_div(k_blocks, kSharing);
    const int64_t rounds = ceil_div(down * pairs, kManyClusters);
    const int64_t ends = rounds * tile.end + kStart;
    const int64_t whole = rounds * k_blocks * tile.of_block + ends;
    const int64_t shared =
        down * pairs * k_blocks * tile.of_block / kManyClusters + ends + handover_time(tile.tokens, tile.channels);
    const bool may_share = down * pairs > kManyClusters && k_blocks >= kLeastShared;
    const int64_t takes = may_share ? std::min(whole, shared) : whole;
    if (tokens != 0 && takes >= time) return;
    tokens = tile.tokens;
    channels = tile.channels;
    token_tiles = static_cast<int>(down);
    channel_pairs = static_cast<int>(pairs);
    shares = takes < whole;
    time = takes;
  }
};

// f(place in kManyTiles, an integral constant) for each that a kind of weight has.
template <TileSet kSet, bool kSplitsK, class F>
void for_each_many_tile(F f) {
  for_each_index<std::size(kManyTiles)>([&](auto place) {
    constexpr ManyTile kTile = kManyTiles[place.value];
    if constexpr (kTile.splits_k == kSplitsK && kTile.set <= kSet) f(place);
  });
}

}  // namespace octofuse::lowbit
