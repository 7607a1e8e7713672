// The host's side of gemm, gemm_stream and gemm_many: what their kernels are told, and their launches. In a file of its
// own, since the kernels' take minutes to compile.
#include <algorithm>
#include <cmath>

#include "device/launch.h"
#include "device/tensor_map.h"
#include "lowbit/gemm_kernel.cuh"
#include "lowbit/gemm_many_kernel.cuh"
#include "lowbit/gemm_stream.cuh"
#include "lowbit/kernels.h"
#include "octofuse/device.h"
#include "octofuse/error.h"

namespace octofuse::lowbit {
namespace {

// Without the number of stages. tokens: bytes of them in a stage.
StageLayout layout_of(const GemmArgs& args, const GemmKernel& kernel, int tokens) {
  StageLayout layout{};
  const int scales = args.groups.segments * kernel.channels;
  layout.tile = kernel.code_bytes * args.planes / (kernel.codes_by_run ? 2 : 1);
  layout.codes = tokens;
  layout.scales = layout.codes + kernel.channels / kTileRows * layout.tile;
  layout.zeros = layout.scales + (args.has_scales ? args.planes * scales * 2 : 0);
  const int end = layout.zeros + (args.has_zeros ? scales : 0);
  layout.stage = static_cast<int>(round_up(end + kernel.stage_barriers, 1024));  // the swizzle's unit
  return layout;
}

void describe_operands(const LowbitArgs& given, const Weight& w, const GemmKernel& kernel, GemmArgs& args) {
  const StageLayout& layout = args.layout;
  const int size = kernel.token_size;
  args.x = tensor_map({given.x, given.m, given.k, given.ldx * size, size, args.tokens_read, kTokenRun / size, true});
  const int64_t row_tiles = ceil_div(given.n, kTileRows);
  const int64_t row_tile = int64_t{w.k_blocks} * kernel.code_bytes * w.planes;  // bytes
  args.codes =
      tensor_map({w.packed, row_tiles, row_tile / 8, row_tile, 8, kernel.channels / kTileRows, layout.tile / 8, false});
  const auto of_groups = [&](const void* data, int64_t rows, int bytes, int box_rows) {
    const int64_t pitch = round_up(int64_t{bytes} * given.n, 16);  // of a single row it is never used
    return tensor_map({data, rows, given.n, pitch, bytes, box_rows, kernel.channels, false});
  };
  const int64_t groups = w.last + 1;
  if (args.has_scales) args.scales = of_groups(w.scale, groups * w.planes, 2, w.groups.segments * w.planes);
  if (args.has_zeros) args.zeros = of_groups(w.zero, groups, 1, w.groups.segments);
}

// All but how the outputs are cut into blocks. slices: of K. tokens_read: rows that a copy of tokens reads.
// token_bytes: of a stage.
GemmArgs gemm_args_of(const LowbitArgs& given, const Weight& w, const GemmKernel& kernel, int slices, int tokens_read,
                      int token_bytes, bool chained) {
  GemmArgs args{Epilogue(given), w.groups};
  args.m = given.m;
  args.n = given.n;
  args.planes = w.planes;
  args.slice_blocks = w.k_blocks / slices;
  args.longer_slices = w.k_blocks % slices;
  args.tokens_read = tokens_read;
  args.base = kernel.base;
  if (has_integers(given)) args.epilogue.w_unit = std::ldexp(1.0F, -log_unit_of(given.format, given.bits));
  args.has_scales = !has_integers(given) || given.format == LowbitFormat::kTwoLevel;
  args.has_zeros = w.has_zeros != 0;
  args.twice_zero = w.twice_zero;
  args.plain = w.groups.segments == 1 && !args.has_zeros && w.twice_zero % 2 == 0;
  args.constant_weight = given.constant_weight;
  args.chained = chained;
  if (given.format == LowbitFormat::kCodebook) {
    for (size_t i = 0; i < given.levels.size(); ++i) args.levels[i] = level_bits(given.levels[i], given.type);
  }
  args.layout = layout_of(args, kernel, token_bytes);
  describe_operands(given, w, kernel, args);
  return args;
}

// Memory by which so many blocks hand sums over.
HandoverArgs handover_args(const GemmKernel& kernel, int blocks, const Allocator& allocate) {
  const int64_t threads = int64_t{blocks} * (kernel.threads - 128);
  const int64_t bytes = threads * kernel.handover_bytes;
  auto* const memory = static_cast<char*>(allocate(static_cast<size_t>(bytes + threads / 32 * 8)));
  return {reinterpret_cast<float4*>(memory), reinterpret_cast<uint64_t*>(memory + bytes), next_mark()};
}

// Stages of a group's ring, of those that fit. More of them are slower where memory is not what bounds a kernel: what
// all blocks ask for at the start is long in coming, and sums that are handed over wait behind it. H200, us: by
// gemm_stream 16 tokens of 18944 x 3584 with 4 bits 18.2 with seven, 15.3 with five; by gemm of 12288 squared 27.8 with
// 13, 26.2 with six; of 8192 squared, in a chain, 14.9 with six, 13.7 with four; 8 int8 tokens of 12288 squared 25.1
// with all that fit, 22.8 with seven, of 4096 x 14336 12.8 with four, 12.0 with five. Streams of int8 were not swept.
int most_stream_stages(const GemmKernel& kernel) { return kernel.token_size == 1 ? 7 : 5; }
int most_stages(const GemmKernel& kernel) {
  constexpr int kFewTokens = 32;
  if (kernel.tokens > kFewTokens) return kMostStages;
  if (kernel.token_size == 1) return kernel.groups == 4 ? 5 : 7;
  return kernel.groups > 1 ? 4 : 6;
}

// Tiles of tokens of a band (ManyWalk): it goes through all weights before the next one, so its tokens are to stay in
// L2, whose halves each keep a copy, while the weights, which are fewer bytes, pass by (cpp/README.md).
int band_of(int k_blocks, int token_size, int tile_tokens) {
  constexpr int64_t kStays = 10 << 20;
  return static_cast<int>(std::max<int64_t>(1, kStays / (int64_t{k_blocks} * kBlockK * token_size * tile_tokens)));
}

}  // namespace

// Launches one kernel; split: blocks that divide K.
void launch_gemm(const LowbitArgs& given, const GemmKernel& kernel, int split, int device, cudaStream_t stream) {
  const Weight w(given);
  allow_shared_memory(kernel.function, kMostShared, device, *kernel.raised);
  const int token_bytes = kernel.tokens * kBlockK * kernel.token_size / kernel.stages_of_block;
  GemmArgs args = gemm_args_of(given, w, kernel, split * kernel.slices, std::min(given.m, kernel.tokens), token_bytes,
                               is_chained(stream, device));
  args.split = split;
  // A stage comes free when the next one is being multiplied, so a ring of fewer than least_stages would stand still.
  const int room = kMostShared - kBarrierBytes - kernel.table_bytes;
  args.layout.stages = std::min(room / args.layout.stage / kernel.groups, most_stages(kernel));
  const bool fits = 2 * kernel.groups * args.layout.stages <= kernel.threads - 128;  // invalidate_barriers()
  if (args.layout.stages < kernel.least_stages || !fits) throw RuntimeError("lowbit_gemm: stages do not fit");
  const int outputs = kernel.tokens * pitch_of(kernel.channels) * 4;
  const int shared =
      kBarrierBytes + kernel.table_bytes + kernel.groups * std::max(args.layout.stages * args.layout.stage, outputs);
  const auto channels = static_cast<unsigned>(ceil_div(given.n, kernel.channels));
  const auto tiles = static_cast<unsigned>(ceil_div(given.m, kernel.tokens));
  const auto blocks = static_cast<unsigned>(split);
  launch_kernel("lowbit_gemm", kernel.function, dim3(channels, blocks, tiles),
                dim3(static_cast<unsigned>(kernel.threads)), shared, dim3(1, blocks), args.chained, &args, stream);
}

void launch_gemm_stream(const LowbitArgs& given, const GemmKernel& kernel, int device, cudaStream_t stream,
                        const Allocator& allocate) {
  const Weight w(given);
  allow_shared_memory(kernel.function, kMostShared, device, *kernel.raised);
  StreamArgs args{gemm_args_of(given, w, kernel, kernel.slices, std::min(given.m, kernel.tokens),
                               kernel.tokens * kBlockK * kernel.token_size, is_chained(stream, device))};
  const int room = kMostShared - kBarrierBytes - kernel.table_bytes - kernel.exchange_bytes;
  args.layout.stages = std::min(room / args.layout.stage / kernel.groups, most_stream_stages(kernel));
  if (args.layout.stages < kernel.least_stages) throw RuntimeError("lowbit_gemm_stream: stages do not fit");
  const int shared = kMostShared - room + kernel.groups * args.layout.stages * args.layout.stage;
  const auto tiles = static_cast<int>(ceil_div(given.n, kernel.channels));
  const int blocks = std::min(tiles, device_capability(device).sm_count);  // so no tile is cut twice
  args.steps = args.slice_blocks + (args.longer_slices > 0 ? 1 : 0);
  args.share = tiles * args.steps / blocks;
  args.longer_shares = tiles * args.steps % blocks;
  args.handover = handover_args(kernel, blocks, allocate);
  launch_kernel("lowbit_gemm_stream", kernel.function, dim3(static_cast<unsigned>(blocks)),
                dim3(static_cast<unsigned>(kernel.threads)), shared, dim3(1), args.chained, &args, stream);
}

// A call by the kernel for its weight and shape.
void launch_gemm_many(const LowbitArgs& given, const GemmKernel& kernel, const ManyShape& shape, int device,
                      cudaStream_t stream, const Allocator& allocate) {
  const Weight w(given);
  allow_shared_memory(kernel.function, kMostShared, device, *kernel.raised);
  // Half of a tile's tokens, or of those that exist: TMA takes longer over rows outside x.
  const auto half = std::min<int64_t>(shape.tokens / kSharing, round_up(ceil_div(given.m, kSharing), kSwizzleRows));
  const bool one_ring = kernel.stage_barriers > 0;
  const int token_stage = shape.tokens * kTokenRun;  // of two rings, whose stages have a run
  ManyArgs args{gemm_args_of(given, w, kernel, 1, static_cast<int>(half),
                             one_ring ? shape.tokens * kBlockK * kernel.token_size : 0, is_chained(stream, device))};
  const int room = kMostShared - kBarrierBytes - kernel.table_bytes - (kernel.threads / 128 - 1) * kManyStagingBytes -
                   kernel.exchange_bytes;
  args.layout.stages = one_ring ? std::min(room / args.layout.stage, kMostStages) : kWeightStages;
  const int left = room - args.layout.stages * args.layout.stage;
  args.token_stages = one_ring ? 0 : std::min(left / token_stage, kMostStages);
  const bool fits = one_ring ? args.layout.stages >= kernel.least_stages : args.token_stages >= 2;
  if (!fits) throw RuntimeError("lowbit_gemm_many: stages do not fit");
  const int shared = kMostShared - left + args.token_stages * token_stage;
  args.k_blocks = w.k_blocks;
  args.token_tiles = shape.token_tiles;
  args.channel_pairs = shape.channel_pairs;
  args.band = std::min(band_of(w.k_blocks, kernel.token_size, shape.tokens), shape.token_tiles);
  args.clusters = static_cast<int>(std::min<int64_t>(device_capability(device).sm_count / kSharing, shape.tiles()));
  const auto left_over = static_cast<int>(shape.tiles() % args.clusters);
  if (shape.shares && left_over > 0 && shape.tiles() > args.clusters) {
    args.shared_tiles = args.clusters + left_over;
    args.handover = handover_args(kernel, args.clusters * kSharing, allocate);
  }
  args.by_pieces = given.out_type == given.type && given.n % 8 == 0 && is_aligned(given.out);
  launch_kernel("lowbit_gemm_many", kernel.function, dim3(static_cast<unsigned>(args.clusters * kSharing)),
                dim3(static_cast<unsigned>(kernel.threads)), shared, dim3(kSharing), args.chained, &args, stream);
}

}  // namespace octofuse::lowbit
