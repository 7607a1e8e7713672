// The tiles of the skinny kernel, in one list for the kernels and for select().
#pragma once

namespace octofuse::skinny {

// A block computes all tokens (up to `tokens`) of `channels` outputs.
// X(tokens): dot products with dp4a, 8 channels.
#define OCTOFUSE_GEMV_TILES(X) \
  X(1)                         \
  X(2)                         \
  X(4)

// X(tokens, channels, depth): mma.sync; a thread keeps twice `depth` 16-byte loads of each 8 channels in flight.
#define OCTOFUSE_SKINNY_TILES(X) \
  X(8, 8, 4)                     \
  X(8, 8, 2)                     \
  X(8, 8, 1)                     \
  X(16, 8, 2)                    \
  X(16, 8, 1)                    \
  X(16, 16, 2)                   \
  X(16, 16, 1)                   \
  X(32, 16, 1)                   \
  X(32, 32, 1)

struct TileShape {
  int tokens, channels, depth;
};

// depth 0: the dp4a kernel
inline constexpr TileShape kTiles[] = {
#define OCTOFUSE_ROW(tokens) {tokens, 8, 0},
    OCTOFUSE_GEMV_TILES(OCTOFUSE_ROW)
#undef OCTOFUSE_ROW
#define OCTOFUSE_ROW(tokens, channels, depth) {tokens, channels, depth},
        OCTOFUSE_SKINNY_TILES(OCTOFUSE_ROW)
#undef OCTOFUSE_ROW
};

}  // namespace octofuse::skinny
