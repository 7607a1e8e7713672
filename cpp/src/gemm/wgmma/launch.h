// What the host hands to the wgmma kernel, and its launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "epilogue/output.h"
#include "gemm/wgmma/tiles.h"
#include "octofuse/gemm.h"

namespace octofuse::wgmma {

constexpr int kBlockK = 128;  // bytes of K a stage: one row of TMA's widest swizzle
constexpr int kMaxStages = 32;

struct KernelArgs {
  CUtensorMap w_map, x_map;            // whole tiles of the K-major operands
  CUtensorMap x_rest_map, w_rest_map;  // as many rows as the tile that reaches beyond the last one has; w: persistent
  CUtensorMap out_map;                 // persistent tiles with a usual epilogue and a 16-bit output: its pieces
  EpilogueArgs epilogue;
  TileOutput output;
  bool constant_weight;   // the weights may be read before earlier kernels have finished
  int k_blocks, k_share;  // of 128 bytes: in all, and of one block of the cluster
  int stages;
  int split;  // blocks that share a tile's K: a cluster
  // Persistent tiles: blocks that share the weights' tile; tiles of the whole output, and how many of tokens stand side
  // by side in the order of the work.
  int cluster, tiles_m, tiles_n, band;
  BlockScales x_blocks, w_blocks;  // float8 alone
};

// What kernels are told that multiply columns with outliers, too: x's come behind the last block of K, in blocks of 128
// bytes.
struct OutlierKernelArgs : KernelArgs {
  CUtensorMap x_columns_map, x_columns_rest_map;  // as x_map
  OutlierColumns outliers;
};

constexpr int kUsual = 3 * kActivations + 2;
constexpr int kUsualOutliers = 2;  // outputs in fp16 and bf16 without activation and residual

// What the host has to know of a tile's kernel.
struct KernelInfo {
  const void* function;
  int threads;
  int fixed_bytes, stage_bytes,
      epilogue_bytes;  // shared memory: always, per stage, and in the stages' place at the end
  int slices;          // of K, whose warpgroups take turns with the stages
  // Persistent tiles: kernels for the usual epilogues, in the order of usual_epilogue(); `function` serves all others.
  const void* usual[kUsual];
};

template <int kRowBlocks, int kCols, Form kForm, Arithmetic kArithmetic>
KernelInfo kernel_info();  // specialised in kernels_*.cu

// The same tile's kernel with gathered outliers, of whose `usual` there are kUsualOutliers.
template <int kRowBlocks, int kCols, Form kForm>
KernelInfo outlier_kernel_info();

// And that with outliers as digits.
template <int kRowBlocks, int kCols, Form kForm>
KernelInfo digit_kernel_info();

// candidate.tile is an index into kTiles.
void run(const Candidate& candidate, const GemmArgs& args, int device, cudaStream_t stream);

}  // namespace octofuse::wgmma
