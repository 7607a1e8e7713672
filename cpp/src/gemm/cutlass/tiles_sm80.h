// The tiles of the mma.sync kernels, in one list for the kernels and for select(). One costs about 25 s to compile.
#pragma once

// X(tile_m, tile_n, tile_k, warp_m, warp_n, stages, efficiency): efficiency is the share of the tensor cores' peak that
// the main loop reaches on an H200.
#define OCTOFUSE_SM80_TILES(X)     \
  X(128, 128, 64, 64, 64, 4, 0.89) \
  X(64, 64, 64, 32, 32, 5, 0.54)   \
  X(256, 128, 64, 64, 64, 3, 0.83)

namespace octofuse::sm80 {

struct TileShape {
  int m, n, k;
  double efficiency;
};

inline constexpr TileShape kTiles[] = {
#define OCTOFUSE_ROW(m, n, k, warp_m, warp_n, stages, efficiency) {m, n, k, efficiency},
    OCTOFUSE_SM80_TILES(OCTOFUSE_ROW)
#undef OCTOFUSE_ROW
};

}  // namespace octofuse::sm80
