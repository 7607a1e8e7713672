// Up to 4 tokens against low-bit weights at the speed of their bytes: one block an SM, which works through units of one
// or two row tiles.
#include "lowbit/gemv_int8.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1) gemv_kernel(const __grid_constant__ GemvArgs args) {
  extern __shared__ __align__(128) char memory[];
  using Stage = typename Traits::Stage;
  constexpr int kChannels = Stage::kChannels;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int slice = this_warp();
  const int row_tiles = args.row_tiles;
  const int k_blocks = args.w.k_blocks;
  const int tokens = 1 << args.log_tokens;
  const int of_unit = args.of_unit(Traits::kRowTiles);
  const int first = static_cast<int>(blockIdx.x) * of_unit;
  const int next = static_cast<int>(gridDim.x) * of_unit;
  if (!args.constant_weight) wait_for_predecessors();
  launch_dependents();
  WarpRing<Traits> ring(args, memory + args.layout.ring, args.stages, slice, lane, slice, first, next);
  const int segments = Stage::kGroups > 0 ? Stage::kGroups : args.w.groups.segments;
  Tokens<Traits, typename Traits::Operand> x_tokens(args, args.log_tokens, segments, memory);
  if (!args.chained) x_tokens.load();  // else they may not be there yet
  ring.fill();
  const int pitch = kChannels * tokens;  // floats of a slice's sums
  char* const table = memory + args.layout.table;
  if constexpr (Traits::kTableBytes > 0) LevelTable::fill(table, args.levels);
  prepare_tokens(args, x_tokens, memory, kSlices * pitch, factor_of<Traits>(args));
  __syncthreads();
  const int column = lane / 4 & (2 * tokens - 1);  // of x; a token's slots may be fewer than a product's columns
  const int x_step = kSlices * tokens * 2 * kBlockK;
  const char* const token = memory + (slice * tokens + column / 2) * 2 * kBlockK + lane % 4 * 16;
  const typename Traits::Reader first_columns(token, table + kLevelZerosAt, column % 2 == 1, x_step);
  const typename Traits::Levels levels(table, args.levels, lane);
  const auto* const scales_and_sums = reinterpret_cast<const ScaleAndSum*>(memory + args.layout.scales_and_sums) +
                                      (lane % 4 & (tokens - 1)) + slice * segments * tokens;
  const int scales_step = kSlices * segments * tokens;
  int turn = 0;
#pragma unroll 1
  for (int row_tile = first; row_tile < row_tiles; row_tile += next) {
    const ThreadOutput<kChannels> output(args, row_tile);
    Addends<1> addends;
    if (output.exists) addends = args.epilogue.load<1>(output.token, output.n);  // needed when the slices are summed
    using Total = typename Traits::Total;
    Total y[Traits::kRowTiles][2] = {};
    typename Traits::Reader columns = first_columns;
    const ScaleAndSum* of_columns = scales_and_sums;
#pragma unroll 1
    for (int k_block = slice; k_block < k_blocks; k_block += kSlices) {
      multiply<Traits>(args.w, columns, levels, of_columns, tokens, ring.wait(), lane, y);
      columns.advance();
      of_columns += scales_step;
      ring.advance();
    }
    // Two sets in turn: a warp that is ahead writes the other one.
    auto* const sums = reinterpret_cast<Total*>(memory + args.layout.sums) + turn * kSlices * pitch;
    if (lane % 4 < tokens) {
      Total* const mine = sums + slice * pitch + lane % 4 * kChannels + lane / 4;
#pragma unroll
      for (int i = 0; i < Traits::kRowTiles * 2; ++i) mine[i * 8] = y[i / 2][i % 2];
    }
    __syncthreads();
    if (output.exists) {
      const Total* const of_slice = sums + static_cast<int>(threadIdx.x);
      const Total sum[1] = {sum_of_slices([&](int i) { return of_slice[i * pitch]; })};
      args.epilogue.store(sum, addends, output.token, output.n);
    }
    turn ^= 1;
  }
}

// ---- the kernel of a weight, as int8_gemv_shape() has it ----

template <bool kTable, Kind kKind, LowbitFormat kFormat, int kBits, int kGroups>
GemvKernel with_row_tiles(const GemvArgs& args) {
  constexpr Int8GemvShape kShape = int8_gemv_shape(kFormat, kBits, kGroups, true);
  static_assert(kShape.groups == kGroups);
  if constexpr (kShape.may_take_two) {
    using Two = Traits<kFormat, kBits, kGroups, 2, kKind, kTable>;
    const GemvKernel two = gemv_of<Two, gemv_kernel<Two>>();
    if (args.gated() || (!args.few_row_tiles && two.fits(args))) return two;
  }
  using One = Traits<kFormat, kBits, kGroups, kShape.row_tiles, kKind, kTable>;
  return gemv_of<One, gemv_kernel<One>>();
}

template <Kind kKind, LowbitFormat kFormat, int kBits, int kGroups>
GemvKernel with_table(const GemvArgs& args) {
  if constexpr (kFormat == LowbitFormat::kCodebook) {
    const GemvKernel kernel = with_row_tiles<true, kKind, kFormat, kBits, kGroups>(args);
    if (kernel.fits(args)) return kernel;
  }
  return with_row_tiles<false, kKind, kFormat, kBits, kGroups>(args);
}

template <bool kIntegers, LowbitFormat kFormat, int kBits, int kGroups>
GemvKernel with_kind(const GemvArgs& args) {
  if constexpr (kIntegers) {
    return with_row_tiles<false, Kind::kIntegers, kFormat, kBits, kGroups>(args);
  } else {
    if (args.norm.kind != Norm::kNone) return with_table<Kind::kNorm, kFormat, kBits, kGroups>(args);
    return with_table<Kind::kPlain, kFormat, kBits, kGroups>(args);
  }
}

template <LowbitFormat kFormat, int kBits, bool kIntegers = false>
GemvKernel with_groups(const GemvArgs& args) {
  const int segments = args.w.groups.segments;
  if constexpr (int8_gemv_shape(kFormat, kBits, 2, true).groups == 2) {
    if constexpr (!kIntegers || kFormat == LowbitFormat::kTwoLevel) {  // else a row is one group
      if (segments == 2 && args.w.wide) return with_kind<kIntegers, kFormat, kBits, 2>(args);
      if (segments == 4 && args.w.wide) return with_kind<kIntegers, kFormat, kBits, 4>(args);
    }
  }
  if constexpr (int8_gemv_shape(kFormat, kBits, 1, true).groups == 1) {
    if (segments == 1 && args.w.wide) return with_kind<kIntegers, kFormat, kBits, 1>(args);
  }
  if constexpr (kFormat == LowbitFormat::kCodebook) {
    using WithTable = Traits<kFormat, kBits, 0, 1, Kind::kPlain, true>;
    const GemvKernel with_table = gemv_of<WithTable, gemv_kernel<WithTable>>();
    if (with_table.fits(args)) return with_table;
  }
  using Any = Traits<kFormat, kBits, 0, 1, kIntegers ? Kind::kIntegers : Kind::kPlain>;
  return gemv_of<Any, gemv_kernel<Any>>();
}

template <LowbitFormat kFormat, int kBits>
GemvKernel with_bits(int bits, const GemvArgs& args) {
  if constexpr (kBits > 1) {
    if (bits < kBits) return with_bits<kFormat, kBits - 1>(bits, args);
  }
  return with_groups<kFormat, kBits>(args);
}

GemvKernel integer_kernel_for(const LowbitArgs& given, const GemvArgs& args) {
  GemvKernel kernel{};
  with_integer_format(given, [&](auto format) {
    kernel = with_groups<decltype(format)::kFormat, decltype(format)::kBits, true>(args);
  });
  return kernel;
}

GemvKernel kernel_for(const LowbitArgs& given, const GemvArgs& args) {
  if (has_integers(given)) return integer_kernel_for(given, args);
  if (given.format == LowbitFormat::kUniform) return with_bits<LowbitFormat::kUniform, 8>(given.bits, args);
  if (given.format == LowbitFormat::kPlanes) return with_bits<LowbitFormat::kPlanes, 8>(given.bits, args);
  if (given.format == LowbitFormat::kCodebook) return with_groups<LowbitFormat::kCodebook, 4>(args);
  if (given.format == LowbitFormat::kFloat8) return with_groups<LowbitFormat::kFloat8, 8>(args);
  return with_groups<LowbitFormat::kSparse12, 8>(args);
}

}  // namespace

void run_gemv_int8(const LowbitArgs& given, const NormArgs& norm, int device, cudaStream_t stream) {
  const GemvArgs args(given, norm, is_chained(stream, device), device);
  kernel_for(given, args).launch("lowbit_gemv_int8", args, device, stream);
}

}  // namespace octofuse::lowbit
