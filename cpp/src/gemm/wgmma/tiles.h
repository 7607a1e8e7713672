// The tiles of the wgmma kernels, in one list for the kernels and for select(). One costs about 2 s to compile.
#pragma once

// X(row_blocks, cols, form): 64 * row_blocks rows on wgmma's M side, cols on its N side. The lists are cut so that the
// files compile side by side.
#define OCTOFUSE_WGMMA_NARROW_TILES(X) \
  X(1, 64, kTokens)                    \
  X(1, 96, kTokens)                    \
  X(1, 128, kTokens)                   \
  X(2, 64, kTokens)                    \
  X(2, 96, kTokens)

#define OCTOFUSE_WGMMA_BROAD_TILES(X) \
  X(2, 128, kTokens)                  \
  X(2, 144, kTokens)                  \
  X(2, 192, kTokens)                  \
  X(2, 240, kTokens)                  \
  X(2, 256, kTokens)

#define OCTOFUSE_WGMMA_FEW_TOKEN_TILES(X) \
  X(1, 16, kSwapped)                      \
  X(1, 32, kSwapped)                      \
  X(1, 64, kSwapped)                      \
  X(1, 80, kSwapped)                      \
  X(1, 96, kSwapped)                      \
  X(1, 112, kSwapped)                     \
  X(1, 128, kSwapped)

#define OCTOFUSE_WGMMA_SWAPPED_TILES(X) \
  X(2, 80, kSwapped)                    \
  X(2, 96, kSwapped)                    \
  X(2, 112, kSwapped)                   \
  X(2, 128, kSwapped)                   \
  X(2, 192, kSwapped)

#define OCTOFUSE_WGMMA_PINGPONG_TILES(X) \
  X(2, 128, kPingpong)                   \
  X(1, 128, kPingpong)

#define OCTOFUSE_WGMMA_TILES(X)  \
  OCTOFUSE_WGMMA_NARROW_TILES(X) \
  OCTOFUSE_WGMMA_BROAD_TILES(X)  \
  OCTOFUSE_WGMMA_FEW_TOKEN_TILES(X) OCTOFUSE_WGMMA_SWAPPED_TILES(X) OCTOFUSE_WGMMA_PINGPONG_TILES(X)

namespace octofuse::wgmma {

enum class Form {
  kTokens,    // rows are tokens; a block computes one tile
  kSwapped,   // cols are tokens; a block computes one tile
  kPingpong,  // rows are tokens; a block works through many tiles, its two warpgroups taking turns
};

struct TileShape {
  int rows, cols;
  Form form;
};

inline constexpr TileShape kTiles[] = {
#define OCTOFUSE_ROW(row_blocks, cols, form) {64 * (row_blocks), cols, Form::form},
    OCTOFUSE_WGMMA_TILES(OCTOFUSE_ROW)
#undef OCTOFUSE_ROW
};

}  // namespace octofuse::wgmma
