// The sm_90a tile of CUTLASS: the configuration that the int8 peers use, kept to be measured beside the wgmma kernels.
// fp16 output alone: no other output of it was ever the fastest, and each costs 45 s and 30 KB of a wheel.
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

}  // namespace octofuse::sm90
