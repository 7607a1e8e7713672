// The tiles of the wgmma kernels, in one list for the kernels and for select(). One costs about 2 s to compile.
#pragma once

#include "octofuse/gemm.h"

// X(row_blocks, cols, form, arithmetic): 64 * row_blocks rows on wgmma's M side, cols on its N side. The lists are cut
// so that the files compile side by side. Tiles that promote sums have room for two sets of them, and channels that
// divide a block of 128.
#define OCTOFUSE_WGMMA_NARROW_TILES(X) \
  X(1, 32, kTokens, kInt8)             \
  X(1, 48, kTokens, kInt8)             \
  X(1, 64, kTokens, kInt8)             \
  X(1, 80, kTokens, kInt8)             \
  X(1, 96, kTokens, kInt8)             \
  X(1, 112, kTokens, kInt8)            \
  X(1, 128, kTokens, kInt8)            \
  X(1, 160, kTokens, kInt8)            \
  X(1, 224, kTokens, kInt8)            \
  X(2, 64, kTokens, kInt8)             \
  X(2, 96, kTokens, kInt8)

#define OCTOFUSE_WGMMA_BROAD_TILES(X) \
  X(2, 128, kTokens, kInt8)           \
  X(2, 144, kTokens, kInt8)           \
  X(2, 160, kTokens, kInt8)           \
  X(2, 192, kTokens, kInt8)

#define OCTOFUSE_WGMMA_FEW_TOKEN_TILES(X) \
  X(1, 16, kSwapped, kInt8)               \
  X(1, 32, kSwapped, kInt8)               \
  X(1, 64, kSwapped, kInt8)               \
  X(1, 80, kSwapped, kInt8)               \
  X(1, 96, kSwapped, kInt8)               \
  X(1, 112, kSwapped, kInt8)              \
  X(1, 128, kSwapped, kInt8)

#define OCTOFUSE_WGMMA_SWAPPED_TILES(X) \
  X(2, 80, kSwapped, kInt8)             \
  X(2, 96, kSwapped, kInt8)             \
  X(2, 112, kSwapped, kInt8)            \
  X(2, 128, kSwapped, kInt8)

#define OCTOFUSE_WGMMA_PINGPONG_TILES(X) \
  X(1, 112, kPingpong, kInt8)            \
  X(1, 128, kPingpong, kInt8)            \
  X(2, 96, kPingpong, kInt8)             \
  X(2, 112, kPingpong, kInt8)            \
  X(2, 128, kPingpong, kInt8)

#define OCTOFUSE_WGMMA_COOPERATIVE_TILES(X) X(2, 256, kCooperative, kInt8)

// Their sums leave too few registers for columns with outliers.
#define OCTOFUSE_WGMMA_LARGEST_TILES(X) \
  X(2, 224, kTokens, kInt8)             \
  X(2, 240, kTokens, kInt8)             \
  X(2, 256, kTokens, kInt8)             \
  X(2, 192, kSwapped, kInt8)            \
  X(2, 160, kPingpong, kInt8)           \
  X(2, 192, kPingpong, kInt8)

#define OCTOFUSE_WGMMA_FLOAT8_TILES(X) \
  X(1, 16, kTokens, kFloat8)           \
  X(1, 32, kTokens, kFloat8)           \
  X(1, 64, kTokens, kFloat8)           \
  X(1, 128, kTokens, kFloat8)          \
  X(2, 64, kTokens, kFloat8)           \
  X(2, 128, kTokens, kFloat8)          \
  X(1, 16, kSwapped, kFloat8)          \
  X(1, 32, kSwapped, kFloat8)          \
  X(1, 64, kSwapped, kFloat8)          \
  X(2, 16, kSwapped, kFloat8)          \
  X(2, 32, kSwapped, kFloat8)          \
  X(2, 64, kSwapped, kFloat8)

#define OCTOFUSE_WGMMA_FLOAT8_FAST_TILES(X) \
  X(1, 16, kTokens, kFloat8Fast)            \
  X(1, 32, kTokens, kFloat8Fast)            \
  X(1, 56, kTokens, kFloat8Fast)            \
  X(1, 64, kTokens, kFloat8Fast)            \
  X(1, 80, kTokens, kFloat8Fast)            \
  X(1, 112, kTokens, kFloat8Fast)           \
  X(1, 128, kTokens, kFloat8Fast)           \
  X(1, 224, kTokens, kFloat8Fast)           \
  X(2, 64, kTokens, kFloat8Fast)            \
  X(2, 80, kTokens, kFloat8Fast)            \
  X(2, 96, kTokens, kFloat8Fast)            \
  X(2, 128, kTokens, kFloat8Fast)           \
  X(2, 160, kTokens, kFloat8Fast)           \
  X(2, 192, kTokens, kFloat8Fast)           \
  X(2, 224, kTokens, kFloat8Fast)           \
  X(2, 256, kTokens, kFloat8Fast)           \
  X(1, 16, kSwapped, kFloat8Fast)           \
  X(1, 32, kSwapped, kFloat8Fast)           \
  X(1, 64, kSwapped, kFloat8Fast)           \
  X(1, 96, kSwapped, kFloat8Fast)           \
  X(1, 128, kSwapped, kFloat8Fast)          \
  X(2, 16, kSwapped, kFloat8Fast)           \
  X(2, 32, kSwapped, kFloat8Fast)           \
  X(2, 64, kSwapped, kFloat8Fast)

#define OCTOFUSE_WGMMA_FLOAT8_PINGPONG_TILES(X) \
  X(1, 112, kPingpong, kFloat8Fast)             \
  X(1, 128, kPingpong, kFloat8Fast)             \
  X(2, 96, kPingpong, kFloat8Fast)              \
  X(2, 112, kPingpong, kFloat8Fast)             \
  X(2, 128, kPingpong, kFloat8Fast)             \
  X(2, 160, kPingpong, kFloat8Fast)             \
  X(2, 192, kPingpong, kFloat8Fast)

#define OCTOFUSE_WGMMA_FLOAT8_COOPERATIVE_TILES(X) \
  X(2, 128, kCooperative, kFloat8)                 \
  X(2, 256, kCooperative, kFloat8Fast)

#define OCTOFUSE_WGMMA_E5M2_TILES(X) \
  X(1, 32, kTokens, kE5M2)           \
  X(1, 64, kTokens, kE5M2)           \
  X(2, 128, kTokens, kE5M2)          \
  X(1, 16, kSwapped, kE5M2)          \
  X(1, 64, kSwapped, kE5M2)

// The tiles that have two more kernels, for outliers as digits and for gathered ones; and those that have the latter.
#define OCTOFUSE_WGMMA_DIGIT_TILES(X) \
  OCTOFUSE_WGMMA_NARROW_TILES(X)      \
  OCTOFUSE_WGMMA_FEW_TOKEN_TILES(X)   \
  OCTOFUSE_WGMMA_SWAPPED_TILES(X)

#define OCTOFUSE_WGMMA_GATHERED_TILES(X) \
  OCTOFUSE_WGMMA_BROAD_TILES(X)          \
  OCTOFUSE_WGMMA_PINGPONG_TILES(X)       \
  OCTOFUSE_WGMMA_COOPERATIVE_TILES(X)

#define OCTOFUSE_WGMMA_OUTLIER_TILES(X) OCTOFUSE_WGMMA_DIGIT_TILES(X) OCTOFUSE_WGMMA_GATHERED_TILES(X)

#define OCTOFUSE_WGMMA_OTHER_TILES(X)     \
  OCTOFUSE_WGMMA_LARGEST_TILES(X)         \
  OCTOFUSE_WGMMA_FLOAT8_TILES(X)          \
  OCTOFUSE_WGMMA_FLOAT8_FAST_TILES(X)     \
  OCTOFUSE_WGMMA_FLOAT8_PINGPONG_TILES(X) \
  OCTOFUSE_WGMMA_FLOAT8_COOPERATIVE_TILES(X) OCTOFUSE_WGMMA_E5M2_TILES(X)

#define OCTOFUSE_WGMMA_TILES(X) OCTOFUSE_WGMMA_OUTLIER_TILES(X) OCTOFUSE_WGMMA_OTHER_TILES(X)

namespace octofuse::wgmma {

enum class Form {
  kTokens,       // rows are tokens; a block computes one tile
  kSwapped,      // cols are tokens; a block computes one tile
  kPingpong,     // rows are tokens; a block works through many tiles, its two warpgroups taking turns
  kCooperative,  // the same, the warpgroups sharing every tile
};

struct TileShape {
  int rows, cols;
  Form form;
  Arithmetic arithmetic;
  bool takes_gathered, takes_digits;
};

// Channels that a persistent kernel finishes at a time.
constexpr int piece_cols(int cols) { return cols % 32 == 0 ? 32 : 16; }

inline constexpr TileShape kTiles[] = {
#define OCTOFUSE_ROW(row_blocks, cols, form, arithmetic, outliers, digits) \
  {64 * (row_blocks), cols, Form::form, Arithmetic::arithmetic, outliers, digits},
#define OCTOFUSE_DIGIT_ROW(...) OCTOFUSE_ROW(__VA_ARGS__, true, true)
#define OCTOFUSE_GATHERED_ROW(...) OCTOFUSE_ROW(__VA_ARGS__, true, false)
#define OCTOFUSE_OTHER_ROW(...) OCTOFUSE_ROW(__VA_ARGS__, false, false)
    OCTOFUSE_WGMMA_DIGIT_TILES(OCTOFUSE_DIGIT_ROW) OCTOFUSE_WGMMA_GATHERED_TILES(OCTOFUSE_GATHERED_ROW)
        OCTOFUSE_WGMMA_OTHER_TILES(OCTOFUSE_OTHER_ROW)
#undef OCTOFUSE_OTHER_ROW
#undef OCTOFUSE_GATHERED_ROW
#undef OCTOFUSE_DIGIT_ROW
#undef OCTOFUSE_ROW
};

}  // namespace octofuse::wgmma
