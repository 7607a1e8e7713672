// Up to 4 tokens against low-bit weights at the speed of their bytes, in products of int8 (of float8 weights: of fp16):
// one block an SM, which works through units of one or two row tiles.
#include "device/mma.cuh"
#include "lowbit/gemv.cuh"
#include "lowbit/integers.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

constexpr int stages_in(int bytes, int stage) {
  return bytes < 3 * stage ? 3 : bytes > 16 * stage ? 16 : bytes / stage;
}

// What a kernel makes of its tokens: kNorm: it normalises them itself. kIntegers: they are int8, and so is the weight
// (has_integers()): sums of all of K are integers.
enum class Kind { kPlain, kNorm, kIntegers };

// A kernel at compile time. kCompact: a codebook's smaller table.
template <LowbitFormat kFormat_, int kBits, int kGroups, int kRowTiles_, Kind kKind = Kind::kPlain,
          bool kCompact = false>
struct Traits {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr bool kNorm = kKind == Kind::kNorm;
  static constexpr bool kIntegers = kKind == Kind::kIntegers;
  using Total = std::conditional_t<kIntegers, int32_t, float>;  // of groups
  static constexpr int kShares = 4;
  static constexpr int kNormShares = 2;
  using Code = Codes<kFormat, kBits>;
  using Stage = lowbit::Stage<Code, kGroups, kRowTiles>;
  static constexpr int kBytes = Stage::kBytes;
  // Many bytes on their way keep memory busy while tokens are converted. Below 4 bits instructions bound the kernel,
  // and a deeper ring was slower.
  static constexpr int kDeep = stages_in((Stage::kTile < 1024 ? 112 : 160) << 10, kSlices* kBytes);
  static constexpr bool kShallowForOneStage = true;
  static constexpr int kTableBytes = level_table_bytes(kFormat, kCompact);
  using Table = LevelTable<kCompact>;
  static constexpr int kZerosAt = level_zeros_at(kCompact);
  using Operand =
      std::conditional_t<Code::kCodebook, CodebookOperand, std::conditional_t<Code::kFloat8, HalfOperand, Int8Operand>>;
  using Sum = typename Operand::Sum;
};

// Adds the products of a step's 32 columns; `words`: this lane's codes of each row tile.
template <class Traits>
__device__ void multiply_step(const Int8Operand::Reader& x, const typename Traits::Table& /*table*/, int step,
                              const uint32_t (&words)[Traits::kRowTiles][Traits::Code::kWords],
                              int32_t (&acc)[Traits::kRowTiles][4]) {
  using Code = typename Traits::Code;
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
    uint32_t a[4];
    codes_of_step<Traits::kFormat, Code::kPlanes ? 1 : Code::kWidth>(words[tile], step, a);
    mma_int8<Code::kSparse>(a, x.of(step, 0), x.of(step, 1), acc[tile]);
  }
}

template <class Traits>
__device__ void multiply_step(const CodebookOperand::Reader& x, const typename Traits::Table& table, int step,
                              const uint32_t (&words)[Traits::kRowTiles][Traits::Code::kWords],
                              int32_t (&acc)[Traits::kRowTiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t b[2];
    x.operand(step, half, b);
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
      uint32_t a[4];
      table.operand(words[tile][step * 2 + half], a);
      mma_int8<true>(a, b[0], b[1], acc[tile]);
    }
  }
}

template <class Traits>
__device__ void multiply_step(const HalfOperand::Reader& x, const typename Traits::Table& /*table*/, int step,
                              const uint32_t (&words)[Traits::kRowTiles][Traits::Code::kWords],
                              float (&acc)[Traits::kRowTiles * 2][4]) {
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
    uint32_t codes[4];
    codes_of_step<Traits::kFormat, Traits::Code::kWidth>(words[tile], step, codes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = halves_of_e4m3(codes[half * 2 + i % 2] >> (i / 2 * 16));
      mma_half<__half>(a, x.of(step, half, 0), x.of(step, half, 1), acc[tile * 2 + half]);
    }
  }
}

// Adds the second sums to the first and clears them.
__device__ inline void join_sums(float (&first)[4], float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    first[i] = __fadd_rn(first[i], second[i]);
    second[i] = 0.0F;
  }
}

// Adds a segment's products to the sums of integers, of channels lane / 4 and lane / 4 + 8 and one token.
template <class Traits>
__device__ inline void add_integers(const Weight& w, char* stage, int segment, int tile, int lane, int sum,
                                    int32_t (&c)[4], int32_t (&y)[2]) {
  using Stage = typename Traits::Stage;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (Traits::kFormat == LowbitFormat::kTwoLevel) {
      const int at = segment * Stage::kChannels + tile * kTileRows + lane / 4 + row * 8;
      const uint16_t pair = Stage::scales(stage)[at];
      y[row] += (c[row * 2 + 1] - zero_of_pair(pair) * sum) * scale_of_pair(pair);
    } else {
      y[row] += c[row * 2 + 1] - w.twice_zero / 2 * sum;
    }
    c[row * 2] = c[row * 2 + 1] = 0;
  }
}

// The products of a k-block. x: this lane's columns of its token; scales_and_sums: of its token, one for each segment.
template <class Traits>
__device__ void multiply(const Weight& w, typename Traits::Operand::Reader& x, const typename Traits::Table& table,
                         const ScaleAndSum* scales_and_sums, int tokens, char* stage, int lane,
                         typename Traits::Total (&y)[Traits::kRowTiles][2]) {
  using Stage = typename Traits::Stage;
  using Code = typename Traits::Code;
  constexpr int kRowTiles = Traits::kRowTiles;
  x.load();
  const int segments = Stage::kGroups > 0 ? Stage::kGroups : w.groups.segments;
  float of_block[kRowTiles][2] = {};
#pragma unroll
  for (int plane = 0; plane < Code::kCount; ++plane) {
    uint32_t words[kRowTiles][Code::kWords];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      read_words<Code::kWidth>(stage + (tile * Code::kCount + plane) * Code::kBytes, lane, words[tile]);
    }
    typename Traits::Sum acc[kRowTiles * Traits::Operand::kSums][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_step<Traits>(x, table, step, words, acc);
      if ((step + 1) * segments % kSteps != 0) continue;
      const int segment = step * segments / kSteps;
      const int sum = scales_and_sums[segment * tokens].sum;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        if constexpr (Traits::kIntegers) {
          add_integers<Traits>(w, stage, segment, tile, lane, sum, acc[tile], y[tile]);
          continue;
        }
        float scale[2];
        int twice_zero[2];
        read_scales<Stage>(w.type, stage, segment, plane, tile, lane, scale);
        read_zeros<Stage>(w, stage, segment, tile, lane, twice_zero);
        if constexpr (Traits::Operand::kSums == 2) join_sums(acc[tile * 2], acc[tile * 2 + 1]);
        add_products<Traits::kFormat>(acc[tile * Traits::Operand::kSums], scale, twice_zero, sum, of_block[tile]);
      }
    }
  }
  if constexpr (!Traits::kIntegers) {
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      y[i / 2][i % 2] = __fmaf_rn(of_block[i / 2][i % 2], scales_and_sums->scale, y[i / 2][i % 2]);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1) gemv_kernel(const __grid_constant__ GemvArgs args) {
  extern __shared__ __align__(128) char memory[];
  using Stage = typename Traits::Stage;
  const int stages = args.stages;
  constexpr int kChannels = Stage::kChannels;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int slice = this_warp();
  const int row_tiles = args.row_tiles;
  const int k_blocks = args.w.k_blocks;
  const int tokens = 1 << args.log_tokens;
  const int of_unit = args.of_unit(Traits::kRowTiles);
  const int first = static_cast<int>(blockIdx.x) * of_unit;
  const int next = static_cast<int>(gridDim.x) * of_unit;
  char* const ring = memory + args.layout.ring + slice * stages * Stage::kBytes;
  if (!args.constant_weight) wait_for_predecessors();
  launch_dependents();
  StageProducer<Stage> producer(args.w, lane);
  producer.seek(slice < k_blocks ? first : row_tiles, slice);
  const auto produce = [&](char* stage) {
    if (producer.row_tile() < row_tiles) {
      producer.copy(stage);
      producer.advance(kSlices);
      if (producer.k_block() >= k_blocks) producer.seek(producer.row_tile() + next, slice);
    }
    commit_copies();
  };
  const int segments = Stage::kGroups > 0 ? Stage::kGroups : args.w.groups.segments;
  Tokens<Traits, typename Traits::Operand> x_tokens(args, args.log_tokens, segments, memory);
  if (!args.chained) x_tokens.load();  // else they may not be there yet
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) produce(ring + i * Stage::kBytes);
  const int pitch = kChannels * tokens;  // floats of a slice's sums
  char* const table_memory = memory + args.layout.table;
  float factor = kFactor<Traits::kFormat>;
  if constexpr (Traits::Code::kCodebook) {
    Traits::Table::fill(table_memory, args.levels);
    factor *= args.levels.unit;
  }
  prepare_tokens(args, x_tokens, memory, kSlices * pitch, factor);
  __syncthreads();
  const int column = lane / 4 & (2 * tokens - 1);  // of x; a token's slots may be fewer than a product's columns
  const int x_step = kSlices * tokens * 2 * kBlockK;
  const char* const token = memory + (slice * tokens + column / 2) * 2 * kBlockK + lane % 4 * 16;
  const typename Traits::Operand::Reader first_columns(token, table_memory + Traits::kZerosAt, column % 2 == 1, x_step);
  const typename Traits::Table table(table_memory, lane);
  const auto* const scales_and_sums = reinterpret_cast<const ScaleAndSum*>(memory + args.layout.scales_and_sums) +
                                      (lane % 4 & (tokens - 1)) + slice * segments * tokens;
  const int scales_step = kSlices * segments * tokens;
  char* stage = ring;
  char* before = ring + (stages - 1) * Stage::kBytes;  // the one before it
  int turn = 0;
#pragma unroll 1
  for (int row_tile = first; row_tile < row_tiles; row_tile += next) {
    const ThreadOutput<kChannels> output(args, row_tile);
    Addends<1> addends;
    if (output.exists) addends = args.epilogue.load<1>(output.token, output.n);  // needed when the slices are summed
    using Total = typename Traits::Total;
    Total y[Traits::kRowTiles][2] = {};
    typename Traits::Operand::Reader columns = first_columns;
    const ScaleAndSum* of_columns = scales_and_sums;
#pragma unroll 1
    for (int k_block = slice; k_block < k_blocks; k_block += kSlices) {
      wait_for_stages<Traits>(stages);
      __syncwarp();  // this stage has arrived, and the one before has been read
      produce(before);
      multiply<Traits>(args.w, columns, table, of_columns, tokens, stage, lane, y);
      columns.advance();
      of_columns += scales_step;
      before = stage;
      stage = stage == ring + (stages - 1) * Stage::kBytes ? ring : stage + Stage::kBytes;
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

template <bool kCompact, Kind kKind, LowbitFormat kFormat, int kBits, int kGroups>
GemvKernel with_row_tiles(const GemvArgs& args) {
  constexpr Int8GemvShape kShape = int8_gemv_shape(kFormat, kBits, kGroups, true);
  static_assert(kShape.groups == kGroups);
  if constexpr (kShape.may_take_two) {
    using Two = Traits<kFormat, kBits, kGroups, 2, kKind, kCompact>;
    const GemvKernel two = gemv_of<Two>(gemv_kernel<Two>);
    if (args.gated() || (!args.few_row_tiles && two.fits(args))) return two;
  }
  using One = Traits<kFormat, kBits, kGroups, kShape.row_tiles, kKind, kCompact>;
  return gemv_of<One>(gemv_kernel<One>);
}

template <Kind kKind, LowbitFormat kFormat, int kBits, int kGroups>
GemvKernel with_table(const GemvArgs& args) {
  const GemvKernel kernel = with_row_tiles<false, kKind, kFormat, kBits, kGroups>(args);
  if constexpr (kFormat == LowbitFormat::kCodebook) {
    if (!kernel.fits(args)) return with_row_tiles<true, kKind, kFormat, kBits, kGroups>(args);
  }
  return kernel;
}

template <bool kIntegers, LowbitFormat kFormat, int kBits, int kGroups>
GemvKernel with_kind(const GemvArgs& args) {
  if constexpr (kIntegers) {
    return with_table<Kind::kIntegers, kFormat, kBits, kGroups>(args);
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
  using Any = Traits<kFormat, kBits, 0, 1, kIntegers ? Kind::kIntegers : Kind::kPlain>;
  const GemvKernel any = gemv_of<Any>(gemv_kernel<Any>);
  if constexpr (kFormat == LowbitFormat::kCodebook) {
    using Compact = Traits<kFormat, kBits, 0, 1, Kind::kPlain, true>;
    if (!any.fits(args)) return gemv_of<Compact>(gemv_kernel<Compact>);
  }
  return any;
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
