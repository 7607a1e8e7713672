// The tiles of the skinny kernel, in one list for the kernels and for select().
#pragma once

namespace octofuse::skinny {

// A block computes all tokens (up to `tokens`) of `channels` outputs.
// X(tokens, channels): dot products with dp4a; a warp holds `channels`, and a block 8 / (warps that share K) times as
// many.
#define OCTOFUSE_ONE_TOKEN_TILES(X) \
  X(1, 8)                           \
  X(1, 4)

#define OCTOFUSE_GEMV_TILES(X) \
  OCTOFUSE_ONE_TOKEN_TILES(X)  \
  X(2, 8)                      \
  X(2, 4)                      \
  X(4, 4)

// X(tokens, channels, depth): mma.sync; a thread keeps twice `depth` 16-byte loads of each 8 channels in flight.
#define OCTOFUSE_SKINNY_TILES(X) \
  X(8, 8, 4)                     \
  X(8, 8, 1)                     \
  X(16, 16, 2)                   \
  X(16, 16, 1)                   \
  X(32, 16, 1)                   \
  X(32, 16, 2)

struct TileShape {
  int tokens, channels, depth;
};

// depth 0: the dp4a kernel
inline constexpr TileShape kTiles[] = {
#define OCTOFUSE_ROW(tokens, channels) {tokens, channels, 0},
    OCTOFUSE_GEMV_TILES(OCTOFUSE_ROW)
#undef OCTOFUSE_ROW
#define OCTOFUSE_ROW(tokens, channels, depth) {tokens, channels, depth},
        OCTOFUSE_SKINNY_TILES(OCTOFUSE_ROW)
#undef OCTOFUSE_ROW
};

#define OCTOFUSE_ONE(...) +1
inline constexpr int kGemvTiles = 0 OCTOFUSE_GEMV_TILES(OCTOFUSE_ONE);           // they come first
inline constexpr int kOneTokenTiles = 0 OCTOFUSE_ONE_TOKEN_TILES(OCTOFUSE_ONE);  // of these the first
#undef OCTOFUSE_ONE

}  // namespace octofuse::skinny
