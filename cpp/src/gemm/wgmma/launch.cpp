// Tensor maps, shared memory and the launch of the wgmma kernel.
#include "gemm/wgmma/launch.h"

#include <algorithm>
#include <mutex>

#include "device/launch.h"
#include "device/tensor_map.h"
#include "gemm/wgmma/tiles.h"
#include "octofuse/error.h"

namespace octofuse::wgmma {

#define OCTOFUSE_DECLARE(row_blocks, cols, form, arithmetic) \
  template <>                                                \
  KernelInfo kernel_info<row_blocks, cols, Form::form, Arithmetic::arithmetic>();
OCTOFUSE_WGMMA_TILES(OCTOFUSE_DECLARE)
#undef OCTOFUSE_DECLARE
#define OCTOFUSE_DECLARE(row_blocks, cols, form, arithmetic) \
  template <>                                                \
  KernelInfo outlier_kernel_info<row_blocks, cols, Form::form>();
OCTOFUSE_WGMMA_OUTLIER_TILES(OCTOFUSE_DECLARE)
#undef OCTOFUSE_DECLARE
#define OCTOFUSE_DECLARE(row_blocks, cols, form, arithmetic) \
  template <>                                                \
  KernelInfo digit_kernel_info<row_blocks, cols, Form::form>();
OCTOFUSE_WGMMA_DIGIT_TILES(OCTOFUSE_DECLARE)
#undef OCTOFUSE_DECLARE

namespace {

constexpr int kAllTiles = static_cast<int>(sizeof(kTiles) / sizeof(kTiles[0]));
constexpr int kSharedPerSm = 228 * 1024;  // compute capability 9.0; 1 KB of it goes to each block's system use

// [rows, k] in 8 bits with row stride ld, read in pieces of box_rows x 128 bytes.
CUtensorMap operand_map(const int8_t* data, int64_t rows, int64_t k, int64_t ld, int box_rows) {
  return tensor_map({data, rows, k, ld, 1, box_rows, 128, true});
}

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// A kernel of this tile; kTiles lists those with digits of outliers first, then those with gathered ones.
const KernelInfo& info_of(int tile, Outliers outliers) {
  static const KernelInfo infos[] = {
#define OCTOFUSE_INFO(row_blocks, cols, form, arithmetic) \
  kernel_info<row_blocks, cols, Form::form, Arithmetic::arithmetic>(),
      OCTOFUSE_WGMMA_TILES(OCTOFUSE_INFO)
#undef OCTOFUSE_INFO
  };
  static const KernelInfo with_gathered[] = {
#define OCTOFUSE_INFO(row_blocks, cols, form, arithmetic) outlier_kernel_info<row_blocks, cols, Form::form>(),
      OCTOFUSE_WGMMA_OUTLIER_TILES(OCTOFUSE_INFO)
#undef OCTOFUSE_INFO
  };
  static const KernelInfo with_digits[] = {
#define OCTOFUSE_INFO(row_blocks, cols, form, arithmetic) digit_kernel_info<row_blocks, cols, Form::form>(),
      OCTOFUSE_WGMMA_DIGIT_TILES(OCTOFUSE_INFO)
#undef OCTOFUSE_INFO
  };
  if (outliers == Outliers::kDigits) return with_digits[tile];
  return outliers == Outliers::kGathered ? with_gathered[tile] : infos[tile];
}

// What every form of the kernel is told.
OutlierKernelArgs common_args(const GemmArgs& args, bool chained) {
  OutlierKernelArgs kernel{};
  kernel.epilogue = args.epilogue;
  kernel.output = output_of(args);
  kernel.constant_weight = chained && args.constant_weight;
  kernel.k_blocks = ceil_div(args.k, 128);
  kernel.x_blocks = args.x_blocks;
  kernel.w_blocks = args.w_blocks;
  return kernel;
}

// of_tile: rows of x of a whole tile.
void describe_tokens(const GemmArgs& args, int of_tile, KernelArgs& kernel) {
  const int64_t rows = args.x_rows();
  kernel.x_map = operand_map(args.x, rows, args.k, args.ldx, of_tile);
  const auto rest = static_cast<int>(rows % of_tile);
  if (rest != 0) kernel.x_rest_map = operand_map(args.x, rows, args.k, args.ldx, rest);
}

// Where columns with outliers are, of a call that looks for them.
void describe_columns(const GemmArgs& args, int of_tile, OutlierKernelArgs& kernel) {
  kernel.outliers = args.outliers;
  if (args.outliers.kind() != Outliers::kGathered) return;
  constexpr int64_t kRowBytes = 2 * kMostGathered;
  const auto map = [&](int64_t box_rows) {
    const auto* const data = static_cast<const int8_t*>(args.outliers.x_gathered);
    return operand_map(data, args.m, kRowBytes, kRowBytes, static_cast<int>(box_rows));
  };
  kernel.x_columns_map = map(of_tile);
  if (args.m % of_tile != 0) kernel.x_columns_rest_map = map(args.m % of_tile);
}

// One block a tile and slice of K.
void run_tiles(const KernelInfo& info, const TileShape& tile, int split, int blocks_per_sm, const GemmArgs& args,
               bool chained, cudaStream_t stream) {
  const bool swap = tile.form == Form::kSwapped;
  const int tokens = swap ? tile.cols : tile.rows;
  const int channels = swap ? tile.rows : tile.cols;
  OutlierKernelArgs kernel = common_args(args, chained);
  kernel.w_map = operand_map(args.w, args.n, args.k, args.ldw, channels);
  describe_tokens(args, tokens, kernel);
  describe_columns(args, tokens, kernel);
  kernel.k_share = ceil_div(kernel.k_blocks, split);
  kernel.split = split;
  kernel.cluster = 1;
  const int columns = args.outliers.kind() == Outliers::kGathered ? kMostGathered / kOutlierBlock : 0;
  const int budget = kSharedPerSm / blocks_per_sm - 1024 - info.fixed_bytes;
  const int blocks_of_k = kernel.k_share + columns;
  kernel.stages = std::min({budget / info.stage_bytes, blocks_of_k, kMaxStages});
  // A ring that goes round gives each K slice stages of its own. Where two shared one, the slice that ran ahead would
  // wait for the phase behind one that has not ended, and take the end of the phase before both for it. A stage comes
  // free behind the start of the product after its own, so a slice needs two.
  if (kernel.stages < blocks_of_k) {
    kernel.stages -= kernel.stages % info.slices;
    if (kernel.stages < 2 * info.slices) throw RuntimeError("wgmma: stages do not fit");
  }
  const int shared = info.fixed_bytes + std::max(kernel.stages * info.stage_bytes, info.epilogue_bytes);
  const dim3 cluster(1, 1, static_cast<unsigned>(split));
  const auto blocks = [](int64_t extent, int of_tile) { return static_cast<unsigned>(ceil_div(extent, of_tile)); };
  const int64_t rows = args.x_rows();
  const dim3 grid(blocks(swap ? rows : args.n, tile.cols), blocks(swap ? args.n : rows, tile.rows), cluster.z);
  launch_kernel("wgmma", info.function, grid, dim3(static_cast<unsigned>(info.threads)), shared, cluster, chained,
                &kernel, stream);
}

// Index into KernelInfo::usual, or -1: outputs in 16 bits and in the operands' type by type and activation, then with a
// residual of their type.
int usual_epilogue(const EpilogueArgs& e, const TileOutput& output, Arithmetic arithmetic) {
  const DType narrow = arithmetic == Arithmetic::kInt8 ? DType::kInt8 : DType::kE4M3;
  const int type = output.type == DType::kFloat16    ? 0
                   : output.type == DType::kBFloat16 ? 1
                   : output.type == narrow           ? 2
                                                     : -1;
  if (type < 0 || !output.wide || e.w_sum != nullptr) return -1;
  if (e.residual == nullptr) return type * kActivations + static_cast<int>(e.activation);
  const bool plain = e.activation == Activation::kNone && type < 2 && e.residual_type == output.type;
  return plain ? 3 * kActivations + type : -1;
}

// The same with products of outliers, whose type the output has.
int usual_outlier_epilogue(const EpilogueArgs& e, const TileOutput& output) {
  const bool plain = e.activation == Activation::kNone && e.residual == nullptr && output.wide;
  return plain ? (output.type == DType::kFloat16 ? 0 : 1) : -1;
}

// Tiles of tokens that stand side by side in the order of the work. What is read again and again should stay in L2,
// whose halves each keep a copy: all weights where they fit it, else all tokens where they do. Of 8192 x 4096 x 4096 an
// H200 read 100 MB with 16 and 64 MB with one, 2 % faster.
int band_of(const GemmArgs& args, int tiles_m, int cluster) {
  constexpr int64_t kStays = 20 << 20;
  if (args.n * args.k <= kStays) return cluster;
  if (args.m * args.k <= kStays) return static_cast<int>(round_up(tiles_m, cluster));
  return 16;
}

// As many blocks as the device has SMs, in clusters that share the weights of neighbouring tiles.
void run_persistent(const KernelInfo& info, const TileShape& tile, int cluster, const GemmArgs& args, int device,
                    bool chained, cudaStream_t stream) {
  OutlierKernelArgs kernel = common_args(args, chained);
  const bool outliers = args.outliers.kind() != Outliers::kNone;
  const int usual = outliers ? usual_outlier_epilogue(kernel.epilogue, kernel.output)
                             : usual_epilogue(kernel.epilogue, kernel.output, tile.arithmetic);
  const void* function = usual < 0 ? info.function : info.usual[usual];
  static DeviceFlags raised[2][kAllTiles][kUsual + 1];
  allow_shared_memory(function, info.fixed_bytes, device, raised[outliers ? 1 : 0][&tile - kTiles][usual + 1]);
  kernel.w_map = operand_map(args.w, args.n, args.k, args.ldw, tile.cols / cluster);
  const auto rest = static_cast<int>(args.n % (tile.cols / cluster));
  if (rest != 0) kernel.w_rest_map = operand_map(args.w, args.n, args.k, args.ldw, rest);
  describe_tokens(args, tile.rows, kernel);
  describe_columns(args, tile.rows, kernel);
  kernel.cluster = cluster;
  kernel.tiles_m = ceil_div(args.m, tile.rows);
  kernel.tiles_n = ceil_div(args.n, tile.cols);
  kernel.band = band_of(args, kernel.tiles_m, cluster);
  if (usual >= 0 && size_of(args.out_type) == 2) {
    kernel.out_map = tensor_map({args.out, args.m, args.n, 2 * args.ldo, 2, 64, piece_cols(tile.cols), true});
  }
  const int64_t all = static_cast<int64_t>(ceil_div(kernel.tiles_m, cluster)) * kernel.tiles_n;
  const int64_t clusters = std::max<int64_t>(1, std::min<int64_t>(all, device_capability(device).sm_count / cluster));
  launch_kernel("wgmma", function, dim3(static_cast<unsigned>(clusters * cluster)),
                dim3(static_cast<unsigned>(info.threads)), info.fixed_bytes, dim3(static_cast<unsigned>(cluster)),
                chained, &kernel, stream);
}

}  // namespace

void run(const Candidate& candidate, const GemmArgs& args, int device, cudaStream_t stream) {
  const Outliers outliers = args.outliers.kind();
  const KernelInfo& info = info_of(candidate.tile, outliers);
  const TileShape& tile = kTiles[candidate.tile];
  const bool chained = is_chained(stream, device);
  if (tile.form == Form::kPingpong || tile.form == Form::kCooperative) {
    run_persistent(info, tile, candidate.cluster, args, device, chained, stream);
  } else {
    static DeviceFlags raised[3][kAllTiles];
    allow_shared_memory(info.function, kSharedPerSm - 1024, device, raised[static_cast<int>(outliers)][candidate.tile]);
    run_tiles(info, tile, candidate.split, candidate.blocks_per_sm, args, chained, stream);
  }
}

}  // namespace octofuse::wgmma
