// Many tokens against low-bit weights on sm_90a, by blocks that stay and work through tiles of 128 to 256 tokens by 128
// or 192 channels, of int8 also of 32 and 64 tokens and of 256 channels. gemm_many.cu has the kernels of fp16 and bf16,
// gemm_many_integer.cu those of int8.
//
// gemm_kernel.cuh makes every weight again for 128 tokens, which is likely what bounds it there (cpp/README.md). Here a
// weight is made for up to 256 tokens. Of fp16 and bf16 gemm_many does not cut K, and wgmma adds in an order of K
// alone, whatever the tile: a token's bits depend neither on the other tokens nor on their number, but they are not
// those of gemm_kernel.cuh, which cuts K. Sums of int8 are exact: there the two blocks of a cluster may divide K.
//
//   two blocks of a cluster  have the same tokens and neighbouring channels; each copies half of the tokens to both. Or
//                            (kSplitsK) the same tile and half of K each: they exchange sums, half of the tokens each
//   two producer lanes       copy weights into a ring of k-blocks, tokens into one of runs, tile after tile
//   2 to 4 consumer          64 channels each, or two parts of 64: make the operand of a run while another is
//   warpgroups               multiplied, then finish their outputs through shared memory, 32 tokens at a time
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "lowbit/gemm_consumer.cuh"
#include "lowbit/gemm_many_epilogue.cuh"
#include "lowbit/gemm_many_exchange.cuh"
#include "octofuse/device.h"

namespace octofuse::lowbit {

// Of the ring of weights. Few tokens take little time: more has to be on its way.
constexpr int weight_stages_of(int tokens) { return tokens > 64 ? 3 : 8; }

// A consumer warpgroup has 64 channels, or two parts of as many where four warpgroups would have no registers for the
// sums.
constexpr int many_parts_of(int tokens, int channels) { return tokens == 128 && channels == 256 ? 2 : 1; }

// Every consumer warpgroup has all of K that the block has. kSplitsK_: half of it, for a tile that both blocks of a
// cluster have.
template <LowbitFormat kFormat, int kBits, DType kType, int kTokens, int kChannels, bool kSplitsK_ = false>
struct ManyTraits : GemmTraits<kFormat, kBits, kType, kTokens, kChannels, many_parts_of(kTokens, kChannels)> {
  static constexpr bool kSplitsK = kSplitsK_;
  static constexpr int kConsumers = ManyTraits::kGroupThreads;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kRegisters = kConsumers == 256 ? 232 : kConsumers == 384 ? 160 : 112;  // of a consumer
};

// ---- products ----

// The rings as a consumer goes through them.
template <class Traits>
class ManyRings {
  const ManyArgs& args_;
  ManyBarriers& barriers_;
  const char* tokens_;
  const char* weights_;
  RingPosition token_, weight_;
  int thread_;  // of its warpgroup

 public:
  __device__ ManyRings(const ManyArgs& args, ManyBarriers& barriers, const char* tokens, const char* weights)
      : args_(args),
        barriers_(barriers),
        tokens_(tokens),
        weights_(weights),
        token_(0, args.token_stages),
        weight_(0, args.layout.stages),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ const char* wait_for_weights() {
    const int slot = weight_.slot;
    barriers_.weights_full[slot].wait(weight_.phase);
    weight_.next();
    return weights_ + slot * args_.layout.stage;
  }
  // Behind products that take what was read: to issue these, a warp waits for its reads. For an arrival it does not,
  // and of 8 bits the next weights were copied over what had not been read yet.
  __device__ void release_weights(int slot) { barriers_.weights_empty[slot].arrive(); }

  __device__ int weight_slot() const { return weight_.slot; }
  __device__ int token_slot() const { return token_.slot; }
  __device__ uint64_t wait_for_tokens() {
    barriers_.tokens_full[token_.slot].wait(token_.phase);
    const uint32_t tokens = wgmma::low_descriptor(tokens_) + token_.slot * (Traits::kTokenBytes / 16);
    token_.next();
    return wgmma::descriptor_of(tokens);
  }
  // Tensor cores have read them: one thread tells each block that writes there.
  __device__ void release_tokens(int slot) const {
    if constexpr (Traits::kSplitsK) {
      if (thread_ == 0) barriers_.tokens_empty[slot].arrive();
    } else {
      if (thread_ < kSharing) barriers_.tokens_empty[slot].arrive(static_cast<uint32_t>(thread_));
    }
  }
};

// The sums of a tile, in multiply_blocks()' form. A turn has two runs; last: the slot of a run before them, or -1. With
// another end in the middle of a turn ptxas moved each product's descriptor from a register: 102 instructions for a
// k-block of int8 in the place of 90.
template <class Traits>
__device__ void multiply_turns(Operand<Traits>& operand, ManyRings<Traits>& rings, int turns, const char* stage,
                               int weights, int last, uint32_t (&a)[2][4 * kProducts],
                               typename Traits::Sum (&sums)[Traits::kSums]) {
  const auto next_stage = [&] {
    const int slot = rings.weight_slot();
    stage = rings.wait_for_weights();
    operand.start(stage);
    return slot;
  };
  int first = -1;  // the slots of both runs of a turn
#pragma unroll 1
  while (turns > 0) {
    first = rings.token_slot();
    int next = 0;
    if constexpr (Traits::kAsksAhead) next = next_stage();
    multiply<Traits>(rings.wait_for_tokens(), 0, a[0], sums);
    if constexpr (Traits::kIntegers) {
      rings.release_weights(weights);
      weights = Traits::kAsksAhead ? next : next_stage();
    }
    cute::warpgroup_wait<1>();
    if (last >= 0) rings.release_tokens(last);
    operand.make(stage, Traits::kRuns - 1, a[1]);
    last = rings.token_slot();
    if (Traits::kAsksAhead && turns > 1) next = next_stage();
    multiply<Traits>(rings.wait_for_tokens(), 0, a[1], sums);
    rings.release_weights(weights);
    if (--turns == 0) break;
    weights = Traits::kAsksAhead ? next : next_stage();
    cute::warpgroup_wait<1>();
    rings.release_tokens(first);
    operand.make(stage, 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  if (first >= 0) rings.release_tokens(first);
  rings.release_tokens(last);
}

template <class Traits>
__device__ void multiply_tile(const ManyArgs& args, const char* table, ManyRings<Traits>& rings,
                              typename Traits::Sum (&sums)[Traits::kSums]) {
  Operand<Traits> operand(args, table);
  uint32_t a[2][4 * kProducts];
  for_each_sum(sums, [](auto& sum) { sum = 0; });
  for_each_sum(sums, [](auto& sum) { cute::warpgroup_fence_operand(sum); });
  int turns = ManyRange<Traits>(args).count;
  int weights = rings.weight_slot();  // the slot of those that are being multiplied
  const char* stage = rings.wait_for_weights();
  operand.start(stage);
  operand.make(stage, 0, a[0]);
  int last = -1;
  if constexpr (Traits::kIntegers) {  // a k-block has one run: an odd one goes first, so that a turn has one end
    if (turns % 2 == 1) {
      last = rings.token_slot();
      multiply<Traits>(rings.wait_for_tokens(), 0, a[0], sums);
      rings.release_weights(weights);
      cute::warpgroup_wait<0>();
      if (turns > 1) {
        weights = rings.weight_slot();
        stage = rings.wait_for_weights();
        operand.start(stage);
        operand.make(stage, 0, a[0]);
      }
    }
    turns /= 2;
  }
  multiply_turns<Traits>(operand, rings, turns, stage, weights, last, a, sums);
  for_each_sum(sums, [](auto& sum) { cute::warpgroup_fence_operand(sum); });
}

// The same of two parts, which are multiplied in turn and share a run of tokens: of each both runs, then of the other.
template <class Traits>
__device__ void multiply_two_parts(const ManyArgs& args, const char* table, ManyRings<Traits>& rings,
                                   typename Traits::Sum (&sums)[2][Traits::kSums]) {
  Operand<Traits> operand(args, table);
  uint32_t a[2][4 * kProducts];
  const auto for_sums = [&](auto f) {
    for_each_sum(sums[0], f);
    for_each_sum(sums[1], f);
  };
  for_sums([](auto& sum) { sum = 0; });
  for_sums([](auto& sum) { cute::warpgroup_fence_operand(sum); });
  int k_blocks = ManyRange<Traits>(args).count;
  int weights = rings.weight_slot();  // the slot of those that are being multiplied
  const char* stage = rings.wait_for_weights();
  operand.start(stage, 0);
  operand.make(stage, 0, a[0]);
  int first = 0;  // the slots of a k-block's first run and of its last
  int last = -1;
#pragma unroll 1
  while (true) {
    first = rings.token_slot();
    const uint64_t tokens = rings.wait_for_tokens();
    multiply<Traits>(tokens, 0, a[0], sums[0]);
    uint64_t more_tokens = tokens;  // of the second run
    if constexpr (Traits::kRuns == 2) {
      cute::warpgroup_wait<1>();
      if (last >= 0) rings.release_tokens(last);
      operand.make(stage, 1, a[1]);
      last = rings.token_slot();
      more_tokens = rings.wait_for_tokens();
      multiply<Traits>(more_tokens, 0, a[1], sums[0]);
      operand.start(stage, 1);
      cute::warpgroup_wait<1>();
      operand.make(stage, 0, a[0]);
      multiply<Traits>(tokens, 0, a[0], sums[1]);
      cute::warpgroup_wait<1>();
    } else {
      operand.start(stage, 1);
      cute::warpgroup_wait<1>();
      if (last >= 0) rings.release_tokens(last);
      last = first;
    }
    operand.make(stage, Traits::kRuns - 1, a[1]);
    multiply<Traits>(more_tokens, 0, a[1], sums[1]);
    rings.release_weights(weights);
    if (--k_blocks == 0) break;
    weights = rings.weight_slot();
    stage = rings.wait_for_weights();
    operand.start(stage, 0);
    cute::warpgroup_wait<1>();
    if constexpr (Traits::kRuns == 2) rings.release_tokens(first);
    operand.make(stage, 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  if constexpr (Traits::kRuns == 2) rings.release_tokens(first);
  rings.release_tokens(last);
  for_sums([](auto& sum) { cute::warpgroup_fence_operand(sum); });
}

// Outputs of a tile's tokens from their sums. Of it bias and the like have been read before.
template <class Traits>
struct TileEnd {
  const ManyArgs& args;
  int channel, warpgroup;
  char* staging;
  ChannelPair bias, w_scale;
  TokenScales x_scales;

  // channel: the warpgroup's first.
  __device__ TileEnd(const ManyArgs& args, int token, int channel, int warpgroup, char* staging)
      : args(args),
        channel(channel),
        warpgroup(warpgroup),
        staging(staging),
        bias(args.epilogue.bias, args, channel),
        w_scale(args.epilogue.w_scale, args, channel),
        x_scales(args, token) {}

  // turn: of tiles.
  __device__ void finish(typename Traits::Sum (&sums)[Traits::kSums], int token, int turn) const {
    __syncwarp();  // a lane or two told the blocks that a stage is free; stmatrix wants whole warps
    if (args.by_pieces) {
      const bool has_scales = args.epilogue.x_scale.data != nullptr;
      const float* const x_scale = has_scales ? x_scales.spread(staging, turn, warpgroup) : nullptr;
      FragmentEpilogue<Traits>(args, staging, channel, bias, w_scale, x_scale).finish(sums, token);
    } else {
#pragma unroll 1
      for (int part = 0; part < Traits::kTokens; part += kPart) {
        finish_quads<Traits>(args, sums, token + part, channel, warpgroup, staging);
        drop_part(sums);
      }
    }
  }
};

template <class Traits>
__device__ void consume(const ManyArgs& args, ManyBarriers& barriers, const char* tokens, const char* weights,
                        char* staging) {
  wait_for_predecessors();
  const int warpgroup = wgmma::warpgroup_of(static_cast<int>(threadIdx.x));
  char* const own = staging + warpgroup * kManyStagingBytes;
  ManyRings<Traits> rings(args, barriers, tokens, weights);
  Exchange<Traits> exchange(barriers, staging + Traits::kConsumers / 128 * kManyStagingBytes);
  int turn = 0;
#pragma unroll 1
  for (ManyWalk<Traits> tile(args); tile.valid(); tile.next(), ++turn) {
    const int channel = tile.channel_tile * Traits::kChannels + warpgroup * (64 * Traits::kChannelParts);
    if constexpr (Traits::kChannelParts == 2) {
      const TileEnd<Traits> ends[] = {{args, tile.token, channel, warpgroup, own},
                                      {args, tile.token, channel + 64, warpgroup, own}};
      typename Traits::Sum sums[2][Traits::kSums];
      multiply_two_parts<Traits>(args, tokens - Traits::kTableBytes, rings, sums);
#pragma unroll
      for (int part = 0; part < 2; ++part) ends[part].finish(sums[part], tile.token, 2 * turn + part);
      continue;
    }
    using Finished = std::conditional_t<Traits::kSplitsK, HalfOf<Traits>, Traits>;
    const int token = tile.token + (Traits::kSplitsK ? static_cast<int>(blockIdx.x) % kSharing * Finished::kTokens : 0);
    const TileEnd<Finished> end(args, token, channel, warpgroup, own);
    typename Traits::Sum sums[Traits::kSums];
    multiply_tile<Traits>(args, tokens - Traits::kTableBytes, rings, sums);
    if constexpr (Traits::kSplitsK) {
      typename Traits::Sum of_half[Finished::kSums];
      exchange.run(sums, of_half);
      end.finish(of_half, token, turn);
      exchange.release();
    } else {
      end.finish(sums, token, turn);
    }
  }
}

template <class Traits>
__device__ void init_barriers(const ManyArgs& args, ManyBarriers& barriers) {
  for (int i = 0; i < args.layout.stages; ++i) {
    barriers.weights_full[i].init(1);
    barriers.weights_empty[i].init(Traits::kConsumers);
  }
  for (int i = 0; i < args.token_stages; ++i) {
    barriers.tokens_full[i].init(1);
    barriers.tokens_empty[i].init(Traits::kConsumers / 128 * (Traits::kSplitsK ? 1 : kSharing));
  }
  barriers.sums_full.init(1);
  barriers.sums_empty.init(Traits::kConsumers / 32);
  cutlass::arch::fence_barrier_init();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) gemm_many_kernel(const __grid_constant__ ManyArgs args) {
  extern __shared__ __align__(1024) char memory[];
  ManyBarriers& barriers = *reinterpret_cast<ManyBarriers*>(memory);
  char* const tokens = memory + kBarrierBytes + Traits::kTableBytes;
  char* const weights = tokens + args.token_stages * Traits::kTokenBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_producer = wgmma::warpgroup_of(thread) == Traits::kConsumers / 128;
  if (thread == Traits::kConsumers) init_barriers<Traits>(args, barriers);
  if constexpr (Traits::Code::kCodebook) {
    CodebookDequantizer<Traits::kType>::template fill<Traits::kConsumers>(
        reinterpret_cast<uint32_t*>(tokens - Traits::kTableBytes), args.levels);
  }
  __syncwarp();
  cute::cluster_sync();  // each block's barriers are there before the other one arrives at them
  launch_dependents();
  if (is_producer) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kConsumers == 256 ? 40 : 32>();
    const ManyProducer<Traits> producer(args, barriers);
    const int warp = wgmma::warp_of(thread) - Traits::kConsumers / 32;
    if (warp == 0 && cute::elect_one_sync()) producer.weights(weights);
    if (warp == 1 && cute::elect_one_sync()) producer.tokens(tokens);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
    consume<Traits>(args, barriers, tokens, weights, weights + args.layout.stages * args.layout.stage);
  }
  __syncwarp();
  cute::cluster_sync();  // a block may still hear from the other: it must not end first
}

// ---- launch ----

template <class Traits>
GemmKernel many_kernel_of() {
  static DeviceFlags raised;
  GemmKernel kernel = kernel_of<Traits>(reinterpret_cast<const void*>(gemm_many_kernel<Traits>), &raised);
  kernel.exchange_bytes = exchange_bytes_of<Traits>();
  return kernel;
}

// A call by the kernel for its weight and shape.
inline void launch_gemm_many(const LowbitArgs& given, const GemmKernel& kernel, const ManyShape& shape, int device,
                             cudaStream_t stream) {
  const Weight w(given);
  allow_shared_memory(kernel.function, kMostShared, device, *kernel.raised);
  // Half of a tile's tokens, or of those that exist: TMA takes longer over rows outside x.
  const auto half = std::min<int64_t>(shape.tokens / kSharing, round_up(ceil_div(given.m, kSharing), kSwizzleRows));
  ManyArgs args{gemm_args_of(given, w, kernel, 1, static_cast<int>(half), 0, is_chained(stream, device))};
  args.layout.stages = weight_stages_of(shape.tokens);
  const int fixed = kBarrierBytes + kernel.table_bytes + args.layout.stages * args.layout.stage +
                    (kernel.threads / 128 - 1) * kManyStagingBytes + kernel.exchange_bytes;
  const int token_stage = shape.tokens * kTokenRun;
  args.k_blocks = w.k_blocks;
  args.token_stages = std::min((kMostShared - fixed) / token_stage, kMostStages);
  args.token_tiles = shape.token_tiles;
  args.channel_pairs = shape.channel_pairs;
  args.clusters = static_cast<int>(std::min<int64_t>(device_capability(device).sm_count / kSharing, shape.tiles()));
  args.by_pieces = given.out_type == given.type && given.n % 8 == 0 && is_aligned(given.out);
  launch_kernel("lowbit_gemm_many", kernel.function, dim3(static_cast<unsigned>(args.clusters * kSharing)),
                dim3(static_cast<unsigned>(kernel.threads)), fixed + args.token_stages * token_stage, dim3(kSharing),
                args.chained, &args, stream);
}

}  // namespace octofuse::lowbit
