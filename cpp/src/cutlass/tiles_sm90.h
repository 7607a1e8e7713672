// The sm_90a tiles, in the order of select.cpp's table. Each is compiled once per output type (45 s), so each must win
// somewhere. 128x256 never won in a first scan; stream-K and split-K lost to their own reduction at small M.
#pragma once

#include <cute/layout.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>

namespace octofuse::sm90 {

// Compute-bound shapes: two consumer warpgroups take turns, one in the main loop while the other is in the epilogue.
struct Tile128x128x128Pingpong2x1 {
  using TileShape = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
  static constexpr int kEpilogueThreads = 128;  // a warpgroup finishes a tile alone
};

// M <= 64, and outputs too small to give every SM a 128-row tile.
struct Tile64x128x128Pingpong1x1 {
  using TileShape = cute::Shape<cute::_64, cute::_128, cute::_128>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
  static constexpr int kEpilogueThreads = 128;  // a warpgroup finishes a tile alone
};

}  // namespace octofuse::sm90
