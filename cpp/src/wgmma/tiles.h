// The tiles of the wgmma kernel, in one list for the kernels and for select(). One costs about 8 s to compile.
#pragma once

// X(warpgroups, cols, swap): 64 * warpgroups rows on wgmma's M side, cols on its N side. Tokens are rows, or with swap
// columns. The lists are cut so that four files compile side by side.
#define OCTOFUSE_WGMMA_NARROW_TILES(X) \
  X(1, 64, false)                      \
  X(1, 96, false)                      \
  X(1, 128, false)                     \
  X(2, 64, false)                      \
  X(2, 96, false)

#define OCTOFUSE_WGMMA_BROAD_TILES(X) \
  X(2, 128, false)                    \
  X(2, 144, false)                    \
  X(2, 192, false)                    \
  X(2, 240, false)                    \
  X(2, 256, false)

#define OCTOFUSE_WGMMA_FEW_TOKEN_TILES(X) \
  X(1, 16, true)                          \
  X(1, 32, true)                          \
  X(1, 64, true)                          \
  X(2, 48, true)

#define OCTOFUSE_WGMMA_SWAPPED_TILES(X) \
  X(2, 96, true)                        \
  X(2, 128, true)                       \
  X(2, 192, true)

#define OCTOFUSE_WGMMA_TILES(X)  \
  OCTOFUSE_WGMMA_NARROW_TILES(X) \
  OCTOFUSE_WGMMA_BROAD_TILES(X) OCTOFUSE_WGMMA_FEW_TOKEN_TILES(X) OCTOFUSE_WGMMA_SWAPPED_TILES(X)

namespace octofuse::wgmma {

struct TileShape {
  int rows, cols;
  bool swap;
};

inline constexpr TileShape kTiles[] = {
#define OCTOFUSE_ROW(warpgroups, cols, swap) {64 * (warpgroups), cols, swap},
    OCTOFUSE_WGMMA_TILES(OCTOFUSE_ROW)
#undef OCTOFUSE_ROW
};

}  // namespace octofuse::wgmma
