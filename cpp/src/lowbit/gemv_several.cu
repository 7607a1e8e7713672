// 2 to 8 tokens against uniform codes or a codebook's, in the arithmetic of gemv_int8.cu: a token has the bits that it
// has alone. Of more than four a second set meets the codes in registers behind the first. The tokens' bytes take much
// shared memory, and a block converts all that it multiplies: so where there are clusters, and K has more k-blocks than
// slices, two blocks divide the K slices. Each has 8 of them, for twice the row tiles: its warps form two teams with
// row tiles of their own. Each finishes one team's outputs; the other half of these sums comes from the other block,
// and is taken while the next unit of row tiles is multiplied, so that neither waits.
#include "device/block_pair.cuh"
#include "lowbit/gemv_int8.cuh"
#include "lowbit/kernels.h"
#include "lowbit/several_shape.h"
#include "lowbit/several_tokens.cuh"

namespace octofuse::lowbit {
namespace {

// ---- the end of a unit ----

struct UnitBarriers {
  BlockBarrier sums_read;      // this block's, by each of its own threads that reads them
  BlockBarrier inbox_full[2];  // of the other block's sums
  BlockBarrier inbox_read[2];  // the other block has read its own

  // readers: warps.
  __device__ void init(int readers) const {
    sums_read.init(32 * readers);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inbox_full[i].init(1);
      inbox_read[i].init(readers);
    }
    BlockBarrier::publish();
  }
};

static_assert(sizeof(UnitBarriers) == kBarriersOfUnit * 8);

// Where an output's sum lies in a slice's: no two lanes of a warp write in the same bank.
template <int kChannels>
__device__ inline int place_of(int token, int channel) {
  const int swizzle = kChannels == 32 ? token % 4 * 8 : token / 2 % 2 * 8;
  return token * kChannels + (channel ^ swizzle);
}

// The warps' sums become outputs; where K slices are divided, those of the unit before.
template <class Traits>
class UnitEnd {
  static constexpr int kChannels = Traits::Stage::kChannels;
  static constexpr int kOutputs = kChannels * Traits::kSets * kTokensOfSet;  // of a team's row tiles
  static constexpr int kReaders = kOutputs / 32;                             // warps
  using Output = ThreadOutput<kChannels>;
  const GemvArgs& args_;
  const OwnSlices own_;
  const int rank_;
  const UnitBarriers& barriers_;
  float* const sums_;    // [slice and team][output]
  float2* const inbox_;  // [unit % 2][output]
  const int place_;      // of this thread's output among a slice's
  uint32_t unit_ = 0;
  Output output_;
  Addends<1> addends_;
  Output last_;  // of the unit before, whose sums are not complete
  Addends<1> last_addends_;
  float2 last_sums_{};

 public:
  __device__ UnitEnd(const GemvArgs& args, const OwnSlices& own, int rank, char* memory)
      : args_(args),
        own_(own),
        rank_(rank),
        barriers_(*reinterpret_cast<const UnitBarriers*>(memory + args.layout.barriers)),
        sums_(reinterpret_cast<float*>(memory + args.layout.sums)),
        inbox_(reinterpret_cast<float2*>(memory + args.layout.inbox)),
        place_(
            place_of<kChannels>(static_cast<int>(threadIdx.x) / kChannels, static_cast<int>(threadIdx.x) % kChannels)) {
    if (threadIdx.x == 0) barriers_.init(kReaders);
    if (is_divided()) arrive_at_cluster();
  }

  // Requests what the outputs of a unit need.
  __device__ void begin(int unit) {
    output_ = Output(args_, unit + rank_ * Traits::kRowTiles);
    if (output_.exists) addends_ = args_.epilogue.load<1>(output_.token, output_.n);
  }

  __device__ void end(const float (&y)[Traits::kRowTiles * Traits::kSets][2], int warp, int lane) {
    if (unit_ == 0 && is_divided()) wait_for_cluster();  // the other block is there
    barriers_.sums_read.wait(unit_ % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < Traits::kRowTiles * Traits::kSets * 2; ++i) {
      const int token = i / 2 % Traits::kSets * kTokensOfSet + lane % 4;
      const int channel = i / 2 / Traits::kSets * kTileRows + i % 2 * 8 + lane / 4;
      sums_[warp * kOutputs + place_of<kChannels>(token, channel)] = y[i / 2][i % 2];
    }
    __syncthreads();
    if (threadIdx.x < kOutputs) take(lane);
    ++unit_;
  }

  // Behind the last unit. The block must not end before all that the other one sends here has come: its sums, which
  // finish_last() waits for, and that it has read the last two units' sums.
  __device__ void flush([[maybe_unused]] int lane) {
#if __CUDA_ARCH__ >= 900
    if (!is_divided() || threadIdx.x >= kOutputs) return;
    finish_last(lane);
    for (uint32_t unit = unit_ > 1 ? unit_ - 2 : 0; unit < unit_; ++unit) {
      barriers_.inbox_read[unit % 2].wait(unit / 2 % 2);
    }
#endif
  }

 private:
  __device__ bool is_divided() const { return args_.log_divide > 0; }

  __device__ float sum_of(int i) const { return sums_[i * kOutputs + place_]; }

  // Of four slices in turn, then of the next four.
  __device__ float2 sums_of_team(int team) const {
    const auto sum = [&](int i) { return sum_of(i); };
    const int first = team * own_.count();
    return make_float2(sum_of_four(sum, first), sum_of_four(sum, first + 4));
  }

  __device__ void store(const Output& output, const Addends<1>& addends, float total) const {
    if (!output.exists) return;
    const float sum[1] = {total};
    args_.epilogue.store(sum, addends, output.token, output.n);
  }

  __device__ void take(int lane) {
    if (!is_divided()) {
      const float total = sum_of_slices([&](int i) { return sum_of(i); });
      barriers_.sums_read.arrive(total);
      return store(output_, addends_, total);
    }
    exchange(lane);
  }

  __device__ void exchange([[maybe_unused]] int lane) {
#if __CUDA_ARCH__ >= 900
    const int other = rank_ ^ 1;
    const uint32_t slot = unit_ % 2;
    if (threadIdx.x == 0) barriers_.inbox_full[slot].expect(kOutputs * 8);
    barriers_.inbox_read[slot].wait(unit_ / 2 % 2 ^ 1);  // the other block has read what it got two units before
    const float2 theirs = sums_of_team(other);
    const float2 mine = sums_of_team(rank_);
    barriers_.sums_read.arrive(theirs.x + theirs.y + mine.x + mine.y);
    barriers_.inbox_full[slot].send(other, inbox_ + slot * kOutputs + threadIdx.x, theirs);
    if (unit_ > 0) finish_last(lane);
    last_ = output_;
    last_addends_ = addends_;
    last_sums_ = mine;
#endif
  }

  // Of the unit before this one.
  __device__ void finish_last([[maybe_unused]] int lane) const {
#if __CUDA_ARCH__ >= 900
    const uint32_t unit = unit_ - 1;
    barriers_.inbox_full[unit % 2].wait(unit / 2 % 2);
    const float2 others = inbox_[unit % 2 * kOutputs + threadIdx.x];
    const float2 even = rank_ == 0 ? last_sums_ : others;  // of slices 0 to 3, and 8 to 11
    const float2 odd = rank_ == 0 ? others : last_sums_;
    const float total = add(add(add(even.x, odd.x), even.y), odd.y);
    __syncwarp();
    if (lane == 0) barriers_.inbox_read[unit % 2].arrive_at(rank_ ^ 1, total);
    store(last_, last_addends_, total);
#endif
  }
};

// ---- the kernel ----

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1) several_kernel(const __grid_constant__ GemvArgs args) {
  extern __shared__ __align__(128) char memory[];
  using Stage = typename Traits::Stage;
  constexpr int kLogTokens = Traits::kSets == 1 ? 2 : 3;
  constexpr int kTokens = 1 << kLogTokens;
  constexpr int kSegments = Stage::kGroups;
  const int rank = static_cast<int>(blockIdx.x) & ((1 << args.log_divide) - 1);
  const OwnSlices own(args.log_divide, rank);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = this_warp();
  const int slice = own.slice_of(warp);
  const int of_team = own.team_of(warp) * Traits::kRowTiles;
  const int row_tiles = args.row_tiles;
  const int k_blocks = args.w.k_blocks;
  const int of_unit = args.of_unit(Traits::kRowTiles);
  const int first = (static_cast<int>(blockIdx.x) >> args.log_divide) * of_unit;
  const int next = (static_cast<int>(gridDim.x) >> args.log_divide) * of_unit;
  if (!args.constant_weight) wait_for_predecessors();
  launch_dependents();
  WarpRing<Traits> ring(args, memory + args.layout.ring, args.stages, warp, lane, slice, first + of_team, next);
  SeveralTokens<typename Traits::Operand, kLogTokens, kSegments> x_tokens(args, own, warp, memory);
  if (!args.chained) x_tokens.load();  // else they may not be there yet
  ring.fill();
  UnitEnd<Traits> end(args, own, rank, memory);
  if (args.chained) {
    wait_for_predecessors();
    x_tokens.load();
  }
  x_tokens.convert(factor_of<Traits>(args));
  __syncthreads();
  const int column = lane / 4;
  const char* const token = memory + (own.own_of(warp) * kTokens + column / 2) * 2 * kBlockK + lane % 4 * 16;
  const typename Traits::Reader first_columns(token, nullptr, column % 2 == 1, own.count() * kTokens * 2 * kBlockK);
  const typename Traits::Levels levels(nullptr, args.levels, lane);
  const auto* const scales_and_sums = reinterpret_cast<const ScaleAndSum*>(memory + args.layout.scales_and_sums) +
                                      lane % 4 + own.own_of(warp) * kSegments * kTokens;
  const int scales_step = own.count() * kSegments * kTokens;
#pragma unroll 1
  for (int unit = first; unit < row_tiles; unit += next) {
    end.begin(unit);
    float y[Traits::kRowTiles * Traits::kSets][2] = {};
    typename Traits::Reader columns = first_columns;
    const ScaleAndSum* of_columns = scales_and_sums;
    const bool exists = unit + of_team < row_tiles;
#pragma unroll 1
    for (int k_block = exists ? slice : k_blocks; k_block < k_blocks; k_block += kSlices) {
      multiply<Traits>(args.w, columns, levels, of_columns, kTokens, ring.wait(), lane, y);
      columns.advance();
      of_columns += scales_step;
      ring.advance();
    }
    end.end(y, warp, lane);
  }
  end.flush(lane);
}

// ---- the kernel of a weight ----

template <LowbitFormat kFormat, int kBits, int kGroups, int kSets>
GemvKernel with_row_tiles(int row_tiles) {
  using One = Traits<kFormat, kBits, kGroups, 1, Kind::kPlain, false, kSets>;
  using Two = Traits<kFormat, kBits, kGroups, 2, Kind::kPlain, false, kSets>;
  return row_tiles == 1 ? gemv_of<One, several_kernel<One>>() : gemv_of<Two, several_kernel<Two>>();
}

template <LowbitFormat kFormat, int kBits, int kGroups>
GemvKernel with_sets(int log_tokens, int row_tiles) {
  if constexpr (most_several(kFormat) > kTokensOfSet) {
    if (log_tokens > 2) return with_row_tiles<kFormat, kBits, kGroups, 2>(row_tiles);
  }
  return with_row_tiles<kFormat, kBits, kGroups, 1>(row_tiles);
}

template <LowbitFormat kFormat, int kBits>
GemvKernel with_groups(const GemvArgs& args, int row_tiles) {
  if constexpr (several_takes_groups(kBits)) {
    if (args.w.groups.segments == 2) return with_sets<kFormat, kBits, 2>(args.log_tokens, row_tiles);
    if (args.w.groups.segments == 4) return with_sets<kFormat, kBits, 4>(args.log_tokens, row_tiles);
  }
  return with_sets<kFormat, kBits, 1>(args.log_tokens, row_tiles);
}

template <int kBits = 8>
GemvKernel with_bits(const GemvArgs& args, int bits, int row_tiles) {
  if constexpr (kBits > 1) {
    if (bits < kBits) return with_bits<kBits - 1>(args, bits, row_tiles);
  }
  return with_groups<LowbitFormat::kUniform, kBits>(args, row_tiles);
}

GemvKernel kernel_for(const LowbitArgs& given, const GemvArgs& args, int row_tiles) {
  if (given.format == LowbitFormat::kCodebook) return with_groups<LowbitFormat::kCodebook, 4>(args, row_tiles);
  return with_bits(args, given.bits, row_tiles);
}

}  // namespace

void run_gemv_several(const LowbitArgs& given, int device, cudaStream_t stream) {
  GemvArgs args(given, {}, is_chained(stream, device), device);
  const SeveralShape shape(problem_of(given), args.room, device_capability(device).kernels_sm90a);
  args.several = true;
  args.log_tokens = log_several_slots(given.m);
  args.log_divide = shape.divides ? 1 : 0;
  args.rows.k = static_cast<int>(round_up(given.k, 8));  // what lies behind the last column is zero
  kernel_for(given, args, shape.row_tiles).launch("lowbit_gemv_several", args, device, stream);
}

}  // namespace octofuse::lowbit
