// What the kernels for up to 8 tokens share. A block has 16 warps, each of which takes a K slice: it streams its codes
// through a ring of its own in shared memory and multiplies them there, with no other warp to wait for. The tokens lie
// beside the rings; they are loaded, normalised if asked, and converted once, while the first codes are on their way.
// At the end of a unit of row tiles the warps' sums meet in shared memory, and each thread finishes one output.
#pragma once

#include <algorithm>

#include "device/chain.cuh"
#include "device/launch.h"
#include "lowbit/epilogue.cuh"
#include "lowbit/stage.cuh"
#include "lowbit/token_norm.cuh"
#include "octofuse/device.h"

namespace octofuse::lowbit {

constexpr int kThreads = 32 * kSlices;

// What a kernel needs first comes first here: constants are cold when it starts.
struct GemvArgs {
  TokenRows rows;
  int m;
  int log_tokens;         // slots for tokens: 1, 2, 4 or 8
  bool several = false;   // of gemv_several.cu
  int log_divide = 0;     // there: blocks of a cluster that divide the K slices
  int row_tiles, stages;  // gated: row tiles of gates, each of which a block takes with the one of its values
  int sm_count, room;     // bytes of shared memory of a block
  bool few_row_tiles;     // no more than SMs
  bool constant_weight, chained;
  SharedLayout layout;
  Weight w;
  Epilogue epilogue;
  NormArgs norm;
  int64_t packed_bytes;
  IntegerLevels levels;  // of a codebook

  GemvArgs(const LowbitArgs& args, const NormArgs& norm, bool chained, int device)
      : rows{args.x, args.ldx, args.k, args.type, args.x_is_int8},
        m(args.m),
        log_tokens(log_slots(args.m)),
        row_tiles(static_cast<int>(ceil_div(args.n, kTileRows)) >> args.gated),
        stages(0),
        sm_count(device_capability(device).sm_count),
        room(device_capability(device).shared_memory),
        few_row_tiles(row_tiles <= sm_count),
        constant_weight(args.constant_weight),
        chained(chained),
        w(args),
        epilogue(args),
        norm(norm),
        packed_bytes(round_up(args.n, kTileRows) * w.k_blocks * kBlockK * args.bits / 8),
        levels{} {
    if (args.format == LowbitFormat::kCodebook) levels = integers_of(args.levels);
    if (args.gated) w.apart = row_tiles;
  }

  __host__ __device__ bool gated() const { return epilogue.gated; }

  // Row tiles from one unit of a kernel to the next; of_warp: that a warp takes.
  __host__ __device__ int of_unit(int of_warp) const { return gated() ? 1 : of_warp << log_divide; }
};

// A kernel as the host sees it.
struct GemvKernel {
  const void* function;
  DeviceFlags* raised;
  int row_tiles, stage_bytes, blocks_of_stage;
  int deep, shallow;           // stages of a warp where they fit, and where they do not
  int table_bytes;             // of a codebook
  bool shallow_for_one_stage;  // even where they fit: see leaves_room

  bool fits(const GemvArgs& args) const { return layout_of(args, shallow).bytes <= args.room; }

  void launch(const char* name, GemvArgs args, int device, cudaStream_t stream) const {
    allow_shared_memory(function, device_capability(device).whole_shared_memory, device, *raised);
    const bool goes_deep = !leaves_room(args) && layout_of(args, deep).bytes <= args.room;
    args.stages = goes_deep ? deep : shallow;
    args.layout = layout_of(args, args.stages);
    launch_kernel(name, function, dim3(static_cast<unsigned>(blocks(args))), dim3(kThreads), args.layout.bytes,
                  dim3(1U << args.log_divide), args.chained, &args, stream, {args.w.packed, args.packed_bytes});
  }

 private:
  int blocks(const GemvArgs& args) const {
    const int units = static_cast<int>(ceil_div(args.row_tiles, args.of_unit(row_tiles)));
    return std::min(units, args.sm_count >> args.log_divide) << args.log_divide;
  }

  // Where a warp fills one stage in all and most SMs have a block, a deeper ring would only keep the next kernel's
  // blocks from them: a step of the GPT-2 XL with 4 bits takes 938 us with shallow rings there and 971 with deep ones
  // (H200, batch 1). With fewer blocks the next kernel finds free SMs, and a deep ring is as good or better.
  bool leaves_room(const GemvArgs& args) const {
    const int64_t units =
        ceil_div(args.row_tiles, int64_t{args.of_unit(row_tiles)} * (args.sm_count >> args.log_divide));
    const int64_t stages_of_work = units * ceil_div(args.w.k_blocks, int64_t{kSlices} * blocks_of_stage);
    return shallow_for_one_stage && stages_of_work == 1 && 3 * blocks(args) > 2 * args.sm_count;
  }

  SharedLayout layout_of(const GemvArgs& args, int stages) const {
    return {own_k_blocks(args.w.k_blocks, args.log_divide),
            args.w.groups.segments,
            1 << args.log_tokens,
            row_tiles,
            stages,
            stage_bytes,
            table_bytes,
            args.several};
  }
};

// Traits has kBytes of a stage, and the numbers that GemvKernel has.
template <class Traits, void (*kKernel)(GemvArgs)>
GemvKernel gemv_of() {
  static DeviceFlags raised;
  return {reinterpret_cast<const void*>(kKernel),
          &raised,
          Traits::kRowTiles,
          Traits::kBytes,
          Traits::kBytes / Traits::Stage::kBytes,
          Traits::kDeep,
          kShallowStages,
          Traits::kTableBytes,
          Traits::kShallowForOneStage};
}

#ifdef __CUDACC__

// This thread's warp, in a form that the compiler knows to be the same for all of it: addresses in the ring then stay
// in uniform registers, and loops are 4 to 8 % shorter.
__device__ inline int this_warp() { return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x / 32), 0); }

// Waits until at most stages - 2 of this thread's newest groups of copies are still on their way. cp.async takes that
// number as an immediate: hence an instruction for each of the two depths that a ring can have.
template <class Traits>
__device__ inline void wait_for_stages(int stages) {
  if (Traits::kDeep == kShallowStages || stages != Traits::kDeep) {
    wait_for_copies<kShallowStages - 2>();
  } else {
    wait_for_copies<Traits::kDeep - 2>();
  }
}

// A warp's ring of stages, which it fills and reads itself: those of its K slice of the block's units in turn.
template <class Traits>
class WarpRing {
  using Stage = typename Traits::Stage;
  StageProducer<Stage> producer_;
  char* const ring_;
  const int stages_, row_tiles_, k_blocks_, slice_, next_;
  char *stage_, *before_;  // the one to read, and the one before it

 public:
  // ring: of all warps. first: row tile; next: so many behind a unit's row tiles are those of the next one.
  __device__ WarpRing(const GemvArgs& args, char* ring, int stages, int warp, int lane, int slice, int first, int next)
      : producer_(args.w, lane),
        ring_(ring + warp * stages * Stage::kBytes),
        stages_(stages),
        row_tiles_(args.row_tiles),
        k_blocks_(args.w.k_blocks),
        slice_(slice),
        next_(next),
        stage_(ring_),
        before_(ring_ + (stages - 1) * Stage::kBytes) {
    producer_.seek(slice < k_blocks_ ? first : row_tiles_, slice);
  }

  __device__ void fill() {
#pragma unroll 1
    for (int i = 0; i < stages_ - 1; ++i) produce(ring_ + i * Stage::kBytes);
  }

  // The next stage, which has arrived. The one before has been read, and is filled again.
  __device__ char* wait() {
    wait_for_stages<Traits>(stages_);
    __syncwarp();
    produce(before_);
    return stage_;
  }

  __device__ void advance() {
    before_ = stage_;
    stage_ = stage_ == ring_ + (stages_ - 1) * Stage::kBytes ? ring_ : stage_ + Stage::kBytes;
  }

 private:
  __device__ void produce(char* stage) {
    if (producer_.row_tile() < row_tiles_) {
      producer_.copy(stage);
      producer_.advance(kSlices);
      if (producer_.k_block() >= k_blocks_) producer_.seek(producer_.row_tile() + next_, slice_);
    }
    commit_copies();
  }
};

// The tokens on their way from memory to what products read in shared memory: integers, beside float8 halves. A warp
// has every sixteenth share, all of one token.
template <class Traits, class Operand>
class Tokens {
  static constexpr int kAhead = Traits::kShares;  // requested at once
  const GemvArgs& args_;
  char* memory_;
  int log_tokens_, segments_, token_, first_, shares_;  // first_: group of the first share
  int lane_;
  Columns columns_;
  int loaded_ = 0;  // the first of the shares in registers
  Share share_[kAhead];

 public:
  // log_tokens, segments: those of the arguments, perhaps known to the compiler.
  __device__ Tokens(const GemvArgs& args, int log_tokens, int segments, char* memory)
      : args_(args),
        memory_(memory),
        log_tokens_(log_tokens),
        segments_(segments),
        token_(static_cast<int>(threadIdx.x / 32) & ((1 << log_tokens) - 1)),
        first_(static_cast<int>(threadIdx.x / 32) >> log_tokens),
        shares_((groups() - first_ + step() - 1) >> (kLogSlices - log_tokens)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        columns_(lane_) {}

  // Requests this warp's first shares.
  __device__ void load() { load_from(0); }

  // With the norm in front, if there is one, which has been measured.
  template <class Norm>
  __device__ void convert(Norm& norm, float factor) {
#pragma unroll 1
    for (int i = 0; i < shares_; ++i) {
      if (i % kAhead == 0 && i != loaded_) load_from(i);
      const int group = group_of(i);
      typename Operand::Values values[2];
      if (args_.rows.is_int8) {
        values[0] = Operand::of_int8(share_[0].bytes(0));
        values[1] = Operand::of_int8(share_[0].bytes(1));
      } else {
        float v[2][4];
        if constexpr (Traits::kNorm) {
          norm.apply(share_[0], group, group_of(i + Traits::kNormShares), columns_, v);
        } else {
          share_[0].widen(args_.rows.type, v);
        }
        Operand::Values::make(v, values);
      }
      store(values, group, factor);
#pragma unroll
      for (int j = 0; j + 1 < kAhead; ++j) share_[j] = share_[j + 1];
    }
  }

  // Requests the norm's weight and bias for the first shares.
  template <class Norm>
  __device__ void prefetch(Norm& norm) const {
#pragma unroll
    for (int i = 0; i < Traits::kNormShares; ++i) {
      if (i < shares_) norm.prefetch(i, group_of(i), columns_);
    }
  }

  // What the norm needs to know of a row. sums: two sets of floats in shared memory, the second `apart` floats behind
  // the first.
  template <class Norm>
  __device__ void measure(Norm& norm, float* sums, int apart) {
    float* const squares = sums + apart + token_ * groups();
    sums += token_ * groups();
    if (norm.is_centred()) {
      for_each([&](const Share& share, int) { return norm.sum(share, columns_); }, sums);
      norm.take_mean(sums, lane_);
    }
    for_each([&](const Share& share, int group) { return norm.sum_of_squares(share, group, columns_); }, squares);
    norm.take_root(squares, lane_);
  }

 private:
  __device__ int step() const { return kSlices >> log_tokens_; }
  __device__ int groups() const { return (args_.w.k_blocks + 1) / 2; }
  __device__ int group_of(int share) const { return first_ + share * step(); }

  __device__ void load_from(int first) {
    const int token = min(token_, args_.m - 1);  // a slot without a token has the last one's
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < shares_) share_[i].load(args_.rows, token, group_of(first + i), columns_);
    }
    loaded_ = first;
  }

  // f(share, group), a sum, to to[group]; all of the block's are there afterwards.
  template <class F>
  __device__ void for_each(F f, float* to) {
#pragma unroll 1
    for (int first = 0; first < shares_; first += kAhead) {
      if (first != loaded_) load_from(first);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= shares_) break;
        const float sum = f(share_[i], group_of(first + i));
        if (lane_ == 0) to[group_of(first + i)] = sum;
      }
    }
    __syncthreads();
  }

  __device__ void store(const typename Operand::Values (&of)[2], int group, float factor) const {
    const bool has_second = 2 * group + 1 < args_.w.k_blocks;
    char* const first = memory_ + ((2 * group << log_tokens_) + token_) * 2 * kBlockK;
    Operand::store(of, {first, has_second ? first + (2 * kBlockK << log_tokens_) : nullptr}, columns_);
    // Lane 0 has the first k-block's scale and sums, lane 1 the second's.
    auto* const scales_and_sums = reinterpret_cast<ScaleAndSum*>(memory_ + args_.layout.scales_and_sums) +
                                  ((2 * group + lane_) * segments_ << log_tokens_) + token_;
    const float scale = (lane_ == 0 ? of[0].scale : of[1].scale) * factor;
    const bool stores = lane_ == 0 || (lane_ == 1 && has_second);
#pragma unroll 4
    for (int i = 0; i < segments_; ++i) {
      const bool counts = columns_.step * segments_ / kSteps == i;
      const int sum = __reduce_add_sync(kFullWarp, counts ? of[0].sum : 0);
      const int second = __reduce_add_sync(kFullWarp, counts ? of[1].sum : 0);
      if (stores) scales_and_sums[i << log_tokens_] = {scale, lane_ == 0 ? sum : second};
    }
  }
};

// The tokens as the products need them, in every block: waits for earlier kernels in a chain, loads, normalises,
// converts. Alone, the tokens have been requested before the weights (load() at the kernel's start), behind which they
// would queue. Measured on an H200 and left out: going through norm and conversion once before the wait, to have their
// code in the cache (a step of the GPT-2 XL with 4 bits: 938 -> 1,172 us). Behind it the block needs a barrier.
template <class Traits, class Operand>
__device__ inline void prepare_tokens(const GemvArgs& args, Tokens<Traits, Operand>& tokens, char* memory, int apart,
                                      float factor) {
  TokenNorm<Traits::kNormShares> norm(args.norm, args.rows);
  if constexpr (Traits::kNorm) tokens.prefetch(norm);
  if (args.chained) {
    wait_for_predecessors();
    tokens.load();
  }
  if constexpr (Traits::kNorm) tokens.measure(norm, reinterpret_cast<float*>(memory + args.layout.sums), apart);
  tokens.convert(norm, factor);
}

// The output of the row tiles that are summed together which this thread finishes.
template <int kChannels>
struct ThreadOutput {
  int token = 0, n = 0;
  bool exists = false;

  ThreadOutput() = default;
  __device__ ThreadOutput(const GemvArgs& args, int row_tile)
      : token(static_cast<int>(threadIdx.x / kChannels)),
        n((row_tile + static_cast<int>(threadIdx.x % kChannels) / kTileRows * args.w.apart) * kTileRows +
          static_cast<int>(threadIdx.x % kTileRows)),
        exists(token < args.m && n < args.w.n) {}
};

// Of slices first to first + 3 in turn; sum_of(i) is the i-th.
template <class SumOf>
__device__ inline auto sum_of_four(SumOf sum_of, int first) {
  return add(add(add(sum_of(first), sum_of(first + 1)), sum_of(first + 2)), sum_of(first + 3));
}

// The sum of all slices: four neighbours in turn, then the four sums.
template <class SumOf>
__device__ inline auto sum_of_slices(SumOf sum_of) {
  auto total = sum_of(0);
#pragma unroll
  for (int i = 0; i < kSlices; i += 4) {
    const auto four = sum_of_four(sum_of, i);
    total = i == 0 ? four : add(total, four);
  }
  return total;
}

#endif

}  // namespace octofuse::lowbit
