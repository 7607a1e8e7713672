// What the host hands to the wgmma kernel, and its launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/launch.h"
#include "octofuse/gemm.h"

namespace octofuse::wgmma {

struct KernelArgs {
  CUtensorMap a_map, b_map;  // K-major operands: wgmma's rows (a) and columns (b)
  EpilogueArgs epilogue;
  TileOutput output;
  bool constant_weight;   // the weights may be read before earlier kernels have finished
  int k_blocks, k_share;  // of 128 bytes: in all, and of one block of the cluster
  int stages;
  int split;  // blocks that share a tile's K: a cluster
};

// What the host has to know of an instantiation of the kernel.
struct KernelInfo {
  const void* function;
  int threads;
  int fixed_bytes, stage_bytes,
      epilogue_bytes;  // shared memory: always, per stage, and in the stages' place at the end
};

template <int kWarpgroups, int kCols, bool kSwap>
KernelInfo kernel_info();  // specialised in kernels_*.cu

// `tile` is an index into kTiles; blocks_per_sm decides how deep a block's ring of stages is.
void run(int tile, int split, int blocks_per_sm, const GemmArgs& args, int device, cudaStream_t stream);

}  // namespace octofuse::wgmma
