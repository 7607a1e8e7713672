// What the kernels for up to 4 tokens share. A block has 16 warps, each of which takes a K slice: it streams its codes
// through a ring of its own in shared memory and multiplies them there, with no other warp to wait for. The tokens lie
// beside the rings; they are loaded, normalised if asked, and converted to integers once, while the first codes are on
// their way. At the end of a unit of row tiles the warps' sums meet in shared memory, and each thread finishes one
// output.
#pragma once

#include <algorithm>

#include "device/chain.cuh"
#include "device/launch.h"
#include "lowbit/epilogue.cuh"
#include "lowbit/stage.cuh"
#include "lowbit/token_norm.cuh"
#include "lowbit/tokens.cuh"
#include "octofuse/device.h"

namespace octofuse::lowbit {

constexpr int kThreads = 32 * kSlices;

// What a kernel needs first comes first here: constants are cold when it starts.
struct GemvArgs {
  const void* x;
  int64_t ldx;
  int m, k;
  int log_tokens;  // slots for tokens: 1, 2 or 4
  int row_tiles, stages;
  int sm_count, room;  // bytes of shared memory of a block
  bool few_row_tiles;  // no more than SMs
  bool x_is_int8;
  bool wide_x;  // 16 bytes can be copied at once
  bool constant_weight, chained;
  SharedLayout layout;
  Weight w;
  Epilogue epilogue;
  NormArgs norm;
  int64_t packed_bytes;

  GemvArgs(const LowbitArgs& args, const NormArgs& norm, bool chained, int device)
      : x(args.x),
        ldx(args.ldx),
        m(args.m),
        k(args.k),
        log_tokens(log_slots(args.m)),
        row_tiles(static_cast<int>(ceil_div(args.n, kTileRows))),
        stages(0),
        sm_count(device_capability(device).sm_count),
        room(device_capability(device).shared_memory),
        few_row_tiles(row_tiles <= sm_count),
        x_is_int8(args.x_is_int8),
        wide_x((args.ldx % (x_is_int8 ? 16 : 8) == 0 || args.m == 1) && is_aligned(args.x)),
        constant_weight(args.constant_weight),
        chained(chained),
        w(args),
        epilogue(args),
        norm(norm),
        packed_bytes(int64_t{row_tiles} * kTileRows * w.k_blocks * kBlockK * args.bits / 8) {}
};

// A kernel as the host sees it.
struct GemvKernel {
  const void* function;
  DeviceFlags* raised;
  int row_tiles, stage_bytes, blocks_of_stage;
  int deep, shallow;           // stages of a warp where they fit, and where they do not
  bool shallow_for_one_stage;  // even where they fit: see leaves_room

  bool fits(const GemvArgs& args) const { return layout_of(args, shallow).bytes <= args.room; }

  void launch(const char* name, GemvArgs args, int device, cudaStream_t stream) const {
    allow_shared_memory(function, args.room, device, *raised);
    const bool goes_deep = !leaves_room(args) && layout_of(args, deep).bytes <= args.room;
    args.stages = goes_deep ? deep : shallow;
    args.layout = layout_of(args, args.stages);
    launch_kernel(name, function, dim3(static_cast<unsigned>(blocks(args))), dim3(kThreads), args.layout.bytes, dim3(1),
                  args.chained, &args, stream, {args.w.packed, args.packed_bytes});
  }

 private:
  int blocks(const GemvArgs& args) const {
    return std::min((args.row_tiles + row_tiles - 1) / row_tiles, args.sm_count);
  }

  // Where a warp fills one stage in all and most SMs have a block, a deeper ring would only keep the next kernel's
  // blocks from them: a step of the GPT-2 XL with 4 bits takes 938 us with shallow rings there and 971 with deep ones
  // (H200, batch 1). With fewer blocks the next kernel finds free SMs, and a deep ring is as good or better.
  bool leaves_room(const GemvArgs& args) const {
    const int64_t units = ceil_div(args.row_tiles, int64_t{row_tiles} * args.sm_count);
    const int64_t stages_of_work = units * ceil_div(args.w.k_blocks, int64_t{kSlices} * blocks_of_stage);
    return shallow_for_one_stage && stages_of_work == 1 && 3 * blocks(args) > 2 * args.sm_count;
  }

  SharedLayout layout_of(const GemvArgs& args, int stages) const {
    return {args.w.k_blocks, args.w.groups.segments, 1 << args.log_tokens, row_tiles, stages, stage_bytes};
  }
};

// Traits has kBytes of a stage, and the numbers that GemvKernel has.
template <class Traits>
GemvKernel gemv_of(void (*kernel)(GemvArgs)) {
  static DeviceFlags raised;
  return {reinterpret_cast<const void*>(kernel),  &raised,       Traits::kRowTiles, Traits::kBytes,
          Traits::kBytes / Traits::Stage::kBytes, Traits::kDeep, kShallowStages,    Traits::kShallowForOneStage};
}

#ifdef __CUDACC__

// This thread's warp, in a form that the compiler knows to be the same for all of it: addresses in the ring then stay
// in uniform registers, and loops are 4 to 8 % shorter.
__device__ inline int this_warp() { return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x / 32), 0); }

// Waits until at most stages - kBut of this thread's newest groups of copies are still on their way. cp.async takes
// that number as an immediate: hence an instruction for each of the two depths that a ring can have.
template <class Traits, int kBut>
__device__ inline void wait_for_stages(int stages) {
  if (Traits::kDeep == kShallowStages || stages != Traits::kDeep) {
    wait_for_copies<kShallowStages - kBut>();
  } else {
    wait_for_copies<Traits::kDeep - kBut>();
  }
}

// The tokens' way into shared memory. A warp takes 256 columns of a token (TokenPair): it loads them as they are, and
// converts them to integers in the same bytes.
template <class Operand>
class Tokens {
  const GemvArgs& args_;
  char* memory_;
  ScaleAndSum* scales_and_sums_;
  int log_tokens_, segments_, count_, lane_, warp_;

 public:
  // log_tokens, segments: those of the arguments, perhaps known to the compiler.
  __device__ Tokens(const GemvArgs& args, int log_tokens, int segments, char* memory)
      : args_(args),
        memory_(memory),
        scales_and_sums_(reinterpret_cast<ScaleAndSum*>(memory + args.layout.scales_and_sums)),
        log_tokens_(log_tokens),
        segments_(segments),
        count_(TokenPair::count(args.w.k_blocks, log_tokens)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        warp_(static_cast<int>(threadIdx.x / 32)) {}

  // One group of asynchronous copies: half a warp a k-block, for int8 half of that.
  __device__ void load() const {
    const int bytes = args_.x_is_int8 ? 1 : 2;  // of a column
    const int at = lane_ % 16 * 16;
    const int count = at < bytes * kBlockK ? count_ : 0;
#pragma unroll 1
    for (int i = warp_; i < count; i += kSlices) {
      const TokenPair pair(i, log_tokens_);
      const int k_block = pair.k_block(lane_);
      if (k_block >= args_.w.k_blocks) break;
      const int token = min(pair.token, args_.m - 1);  // a slot without a token has the last one's
      const int k = k_block * kBlockK * bytes + at;
      const int left = args_.k * bytes - k;  // zeros behind the last column
      const char* const from = static_cast<const char*>(args_.x) + token * args_.ldx * bytes + k;
      char* const to = memory_ + (k_block << log_tokens_ | pair.token) * 2 * kBlockK + at;
      if (args_.wide_x && left >= 16) {
        copy_async(shared_address(to), from);
      } else if (left <= 0) {
        *reinterpret_cast<uint4*>(to) = uint4{};
      } else {
#pragma unroll 1
        for (int j = 0; j < 16; j += bytes) copy_column(from + j, to + j, j < left);
      }
    }
    commit_copies();
  }

  // When this thread's copies have arrived.
  __device__ void convert(float factor) const {
    const Columns columns(lane_);
    __syncwarp();  // and those of the warp's other threads
#pragma unroll 1
    for (int i = warp_; i < count_; i += kSlices) {
      const TokenPair pair(i, log_tokens_);
      const int first = 2 * pair.group << log_tokens_ | pair.token;
      const int second = first + (1 << log_tokens_);
      const bool has_second = 2 * pair.group + 1 < args_.w.k_blocks;
      char* const blocks[2] = {memory_ + first * 2 * kBlockK, has_second ? memory_ + second * 2 * kBlockK : nullptr};
      const char* const other = has_second ? blocks[1] : blocks[0];
      Integers integers[2];
      if (args_.x_is_int8) {
        integers[0] = Integers(columns.load_int8(blocks[0]));
        integers[1] = Integers(columns.load_int8(other));
      } else {
        float v[2][4];
        columns.load(blocks[0], args_.w.type, v[0]);
        columns.load(other, args_.w.type, v[1]);
        Integers::make(v, integers);
      }
      __syncwarp();  // all have read
      Operand::store(integers, blocks, columns);
      store_scale_and_sum(integers[0], first, columns, factor);
      if (has_second) store_scale_and_sum(integers[1], second, columns, factor);
    }
  }

 private:
  __device__ void copy_column(const char* from, char* to, bool exists) const {
    if (args_.x_is_int8) {
      *to = exists ? *from : 0;
    } else {
      *reinterpret_cast<uint16_t*>(to) = exists ? *reinterpret_cast<const uint16_t*>(from) : 0;
    }
  }

  // item: k-block and token.
  __device__ void store_scale_and_sum(const Integers& of, int item, const Columns& columns, float factor) const {
    const int tokens = 1 << log_tokens_;
    ScaleAndSum* const to = scales_and_sums_ + (item >> log_tokens_) * segments_ * tokens + (item & (tokens - 1));
#pragma unroll 1
    for (int i = 0; i < segments_; ++i) {
      const int sum = __reduce_add_sync(kFullWarp, columns.step * segments_ / kSteps == i ? of.sum : 0);
      if (lane_ == 0) to[i * tokens] = {of.scale * factor, sum};
    }
  }
};

// The tokens as the products need them, in every block: waits for earlier kernels in a chain, loads, normalises,
// converts. Alone, the tokens have been requested before the weights (load() at the kernel's start), behind which they
// would queue. Measured on an H200 and left out: going through norm and conversion once before the wait, to have their
// code in the cache (a step of the GPT-2 XL with 4 bits: 938 -> 1,172 us). `sums`, `apart`: see TokenNorm::run. Behind
// it the block needs a barrier.
template <class Traits, class Operand>
__device__ inline void prepare_tokens(const GemvArgs& args, const Tokens<Operand>& tokens, int log_tokens, char* memory,
                                      int apart, float factor) {
  TokenNorm<kSlices> norm(args.norm, args.w.type, args.k, args.w.k_blocks, log_tokens);
  auto* const sums = reinterpret_cast<float*>(memory + args.layout.sums);
  if constexpr (Traits::kNorm) norm.prefetch();
  if (args.chained) {
    wait_for_predecessors();
    tokens.load();
    wait_for_all_copies();
  } else {
    wait_for_stages<Traits, 1>(args.stages);
  }
  if constexpr (Traits::kNorm) {
    __syncwarp();
    norm.run(memory, sums, apart);
  }
  tokens.convert(factor);
}

// The output of the row tiles that are summed together which this thread finishes.
template <int kChannels>
struct ThreadOutput {
  int token, n;
  bool exists;

  __device__ ThreadOutput(const GemvArgs& args, int row_tile)
      : token(static_cast<int>(threadIdx.x / kChannels)),
        n(row_tile * kTileRows + static_cast<int>(threadIdx.x % kChannels)),
        exists(token < args.m && n < args.w.n) {}
};

// The sum of all slices, of which sum_of(i) is the i-th: four neighbours in turn, then the four sums.
template <class SumOf>
__device__ inline float sum_of_slices(SumOf sum_of) {
  float total = 0.0F;
#pragma unroll
  for (int i = 0; i < kSlices; i += 4) {
    const float four = __fadd_rn(__fadd_rn(__fadd_rn(sum_of(i), sum_of(i + 1)), sum_of(i + 2)), sum_of(i + 3));
    total = i == 0 ? four : __fadd_rn(total, four);
  }
  return total;
}

#endif

}  // namespace octofuse::lowbit
