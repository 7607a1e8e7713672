// Tensor maps, shared memory and the launch of the wgmma kernel.
#include "wgmma/launch.h"

#include <cudaTypedefs.h>

#include <algorithm>
#include <mutex>

#include "kernels/launch.h"
#include "wgmma/tiles.h"

namespace octofuse::wgmma {

#define OCTOFUSE_DECLARE(warpgroups, cols, swap) \
  template <>                                    \
  KernelInfo kernel_info<warpgroups, cols, swap>();
OCTOFUSE_WGMMA_TILES(OCTOFUSE_DECLARE)
#undef OCTOFUSE_DECLARE

namespace {

constexpr int kAllTiles = static_cast<int>(sizeof(kTiles) / sizeof(kTiles[0]));
constexpr int kSharedPerSm = 228 * 1024;  // compute capability 9.0; 1 KB of it goes to each block's system use
constexpr int kMaxStages = 32;

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw_launch_error("wgmma", "the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(pointer);
  }();
  return function;
}

// [rows, k] int8 with row stride ld, read in pieces of box_rows x 128 bytes; zeros beyond the edges.
CUtensorMap operand_map(const int8_t* data, int64_t rows, int64_t k, int64_t ld, int box_rows) {
  CUtensorMap map;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(ld)};
  const cuuint32_t box[] = {128, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult status = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<int8_t*>(data), extents, strides,
                                    box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw_launch_error("wgmma", "cuTensorMapEncodeTiled refused an operand");
  return map;
}

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

void run(int tile, int split, int blocks_per_sm, const GemmArgs& args, int device, cudaStream_t stream) {
  static const KernelInfo infos[] = {
#define OCTOFUSE_INFO(warpgroups, cols, swap) kernel_info<warpgroups, cols, swap>(),
      OCTOFUSE_WGMMA_TILES(OCTOFUSE_INFO)
#undef OCTOFUSE_INFO
  };
  const KernelInfo& info = infos[tile];
  const auto [rows, cols, swap] = kTiles[tile];
  const auto map = [&](bool weights, int box_rows) {
    return weights ? operand_map(args.w, args.n, args.k, args.ldw, box_rows)
                   : operand_map(args.x, args.m, args.k, args.ldx, box_rows);
  };
  KernelArgs kernel{};
  kernel.a_map = map(swap, rows);
  kernel.b_map = map(!swap, cols);
  kernel.epilogue = args.epilogue;
  kernel.output = output_of(args);
  const bool chained = is_chained(stream, device);
  kernel.constant_weight = chained && args.constant_weight;
  kernel.k_blocks = ceil_div(args.k, 128);
  kernel.k_share = ceil_div(kernel.k_blocks, split);
  kernel.split = split;
  const int budget = kSharedPerSm / blocks_per_sm - 1024 - info.fixed_bytes;
  kernel.stages = std::clamp(std::min(budget / info.stage_bytes, kernel.k_share), 1, kMaxStages);
  const int shared = info.fixed_bytes + std::max(kernel.stages * info.stage_bytes, info.epilogue_bytes);

  static DeviceFlags raised[kAllTiles];
  allow_shared_memory(info.function, kSharedPerSm - 1024, device, raised[tile]);
  const auto blocks = [](int64_t extent, int of_tile) { return static_cast<unsigned>(ceil_div(extent, of_tile)); };
  const dim3 cluster(1, 1, static_cast<unsigned>(split));
  const dim3 grid(blocks(swap ? args.m : args.n, cols), blocks(swap ? args.n : args.m, rows), cluster.z);
  launch_kernel("wgmma", info.function, grid, dim3(static_cast<unsigned>(info.threads)), shared, cluster, chained,
                &kernel, stream);
}

}  // namespace octofuse::wgmma
