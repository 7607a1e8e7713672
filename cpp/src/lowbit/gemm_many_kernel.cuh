// Many tokens against low-bit weights on sm_90a, by blocks that stay and work through tiles of 96 to 256 tokens by 128
// to 256 channels, of int8 also of 32 and 64 tokens. gemm_many.cu and gemm_split.cu have the kernels of fp16,
// gemm_many_bfloat16.cu and gemm_split_bfloat16.cu those of bf16, gemm_many_integer.cu those of int8.
//
// gemm_kernel.cuh makes every weight again for 128 tokens, which is likely what bounds it there (cpp/README.md). Here a
// weight is made for up to 256 tokens. Of fp16 and bf16 gemm_many does not cut K, and wgmma adds in an order of K
// alone, whatever the tile: a token's bits depend neither on the other tokens nor on their number, but they are not
// those of gemm_kernel.cuh, which cuts K, or of gemm_split. Where two clusters share a tile, the second one goes on
// from the sums of the first. Sums of int8 are exact: there the two blocks of a cluster may divide K.
//
//   two blocks of a cluster  have the same tokens and neighbouring channels; each copies half of the tokens to both. Or
//                            (kSplitsK) the same tile and half of K each: they exchange sums, half of the tokens each
//   two producer lanes       copy weights and tokens, tile after tile: k-blocks of both into one ring or, where too few
//                            of them fit, weights into a ring of k-blocks and tokens into one of runs. A third warp
//                            tells who goes on from this block's sums
//   2 to 4 consumer          64 channels each, or two parts of 64: make the operand of a run while another is
//   warpgroups               multiplied, then finish their outputs through shared memory, 16 or 32 tokens at a time
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "lowbit/gemm_many_epilogue.cuh"
#include "lowbit/gemm_many_exchange.cuh"
#include "lowbit/gemm_many_products.cuh"

namespace octofuse::lowbit {

constexpr int kWeightStages = 3;  // of two rings

// A consumer warpgroup has 64 channels, or two parts of as many where four warpgroups would have no registers for the
// sums.
constexpr int many_parts_of(int tokens, int channels) { return tokens > 64 && channels == 256 ? 2 : 1; }

// Every consumer warpgroup has all of K that the block has. kSplitsK_: half of it, for a tile that both blocks of a
// cluster have.
template <LowbitFormat kFormat, int kBits, DType kType, int kTokens, int kChannels, bool kSplitsK_ = false>
struct ManyTraits : GemmTraits<kFormat, kBits, kType, kTokens, kChannels, many_parts_of(kTokens, kChannels)> {
  static constexpr bool kSplitsK = kSplitsK_;
  static constexpr int kNextBlock = kSharing;  // of the next cluster, from a block on
  static constexpr int kWriters = kSplitsK ? 1 : kSharing;
  static constexpr int kConsumers = ManyTraits::kGroupThreads;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kRegisters = kConsumers == 256 ? 232 : kConsumers == 384 ? 160 : 112;  // of a consumer

  // One ring where three stages of it fit, about: the scales of many planes, or of groups of 32 beside 5 bits, leave
  // two. In tiles of 256 int8 tokens five do, and two rings are still faster.
  static constexpr int kWidth = kFormat == LowbitFormat::kPlanes ? 8 : width_of(kFormat, kBits);
  static constexpr int kStage = kTokens * kTokenRun * ManyTraits::kRuns + kChannels * (kBlockK * kWidth / 8 + 4 * 3);
  static constexpr int kExchange = kSplitsK ? finished_tokens(kTokens) / 2 * kConsumers * 4 : 0;  // bytes of sums
  static constexpr int kRoom =
      kMostShared - kBarrierBytes - ManyTraits::kTableBytes - kConsumers / 128 * kManyStagingBytes - kExchange;
  static constexpr bool kOneRing = kTokens < 256 && kRoom / kStage >= 3;
  static_assert(!kOneRing || !ManyTraits::kIntegers || kRoom / (kStage + 1024) >= 3);  // multiply_pairs() holds three
};

template <class Traits>
using RingsOf = std::conditional_t<Traits::kOneRing, OneRing<Traits>, TwoRings<Traits>>;
template <class Traits>
using ProducerOf = std::conditional_t<Traits::kOneRing, OneRingProducer<Traits>, TwoRingProducer<Traits>>;

// ---- a tile ----

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
      for (int part = 0; part < Traits::kTokens; part += kPart<Traits>) {
        finish_quads<Traits>(args, sums, token + part, channel, warpgroup, staging);
        drop_part<Traits>(sums);
      }
    }
  }
};

// The sums that a tile's part begins with.
template <class Traits>
__device__ void begin_sums(const ManyWalk<Traits>& tile, const Handover<Traits>& handover,
                           typename Traits::Sum (&sums)[Traits::kSums], int part = 0) {
  for_each_sum(sums, [](auto& sum) { sum = 0; });
  handover.take(tile.takes, sums, part);
}

// A tile, or a part of it, of a warpgroup that has 64 channels. channel: its first.
template <class Traits, bool kPlain>
__device__ void consume_tile(const ManyArgs& args, const ManyWalk<Traits>& tile, int channel, RingsOf<Traits>& rings,
                             const char* table, const Handover<Traits>& handover, Exchange<Traits>& exchange,
                             char* staging, int turn) {
  using Finished = std::conditional_t<Traits::kSplitsK, HalfOf<Traits>, Traits>;
  const bool second = Traits::kSplitsK && blockIdx.x % kSharing == 1;
  const int token = tile.token + (second ? Traits::kTokens - Finished::kTokens : 0);
  const TileEnd<Finished> end(args, token, channel, wgmma::warpgroup_of(static_cast<int>(threadIdx.x)), staging);
  typename Traits::Sum sums[Traits::kSums];
  begin_sums(tile, handover, sums);
  multiply_tile<Traits, kPlain>(args, table, rings, tile.count, sums);
  handover.give(tile.gives, sums);
  if (tile.gives) return;
  if constexpr (Traits::kSplitsK) {
    typename Traits::Sum of_half[Finished::kSums];
    exchange.run(sums, of_half);
    end.finish(of_half, token, turn);
    exchange.release();
  } else {
    end.finish(sums, token, turn);
  }
}

// The same of one that has two parts of 64.
template <class Traits, bool kPlain>
__device__ void consume_two_parts(const ManyArgs& args, const ManyWalk<Traits>& tile, int channel,
                                  RingsOf<Traits>& rings, const char* table, const Handover<Traits>& handover,
                                  char* staging, int turn) {
  const int warpgroup = wgmma::warpgroup_of(static_cast<int>(threadIdx.x));
  const TileEnd<Traits> ends[] = {{args, tile.token, channel, warpgroup, staging},
                                  {args, tile.token, channel + 64, warpgroup, staging}};
  typename Traits::Sum sums[2][Traits::kSums];
#pragma unroll
  for (int part = 0; part < 2; ++part) begin_sums(tile, handover, sums[part], part);
  multiply_two_parts<Traits, kPlain>(args, table, rings, tile.count, sums);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    handover.give(tile.gives, sums[part], part);
    if (!tile.gives) ends[part].finish(sums[part], tile.token, 2 * turn + part);
  }
}

// Bytes of a block's rings.
template <class Traits>
__host__ __device__ constexpr int ring_bytes(const ManyArgs& args) {
  return args.layout.stages * args.layout.stage + args.token_stages * Traits::kTokenBytes;
}

// table: a codebook's.
template <class Traits, bool kPlain>
__device__ void consume(const ManyArgs& args, ManyBarriers& barriers, const char* table, char* memory_of_rings) {
  wait_for_predecessors();
  const int warpgroup = wgmma::warpgroup_of(static_cast<int>(threadIdx.x));
  char* const staging = memory_of_rings + ring_bytes<Traits>(args);
  char* const own = staging + warpgroup * kManyStagingBytes;
  RingsOf<Traits> rings = [&] {
    if constexpr (Traits::kOneRing) {
      return RingsOf<Traits>(memory_of_rings, args.layout);
    } else {
      return RingsOf<Traits>(args, barriers, memory_of_rings,
                             memory_of_rings + args.token_stages * Traits::kTokenBytes);
    }
  }();
  Exchange<Traits> exchange(barriers, staging + Traits::kConsumers / 128 * kManyStagingBytes);
  const Handover<Traits> handover(args.handover);
  int turn = 0;
#pragma unroll 1
  for (ManyWalk<Traits> tile(args); tile.valid(); tile.next(), ++turn) {
    const int channel = tile.channel_tile * Traits::kChannels + warpgroup * (64 * Traits::kChannelParts);
    if constexpr (Traits::kChannelParts == 2) {
      consume_two_parts<Traits, kPlain>(args, tile, channel, rings, table, handover, own, turn);
    } else {
      consume_tile<Traits, kPlain>(args, tile, channel, rings, table, handover, exchange, own, turn);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) gemm_many_kernel(const __grid_constant__ ManyArgs args) {
  extern __shared__ __align__(1024) char memory[];
  char* const table = memory;
  ManyBarriers& barriers = *reinterpret_cast<ManyBarriers*>(memory + Traits::kTableBytes);
  char* const rings = memory + Traits::kTableBytes + kBarrierBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_producer = wgmma::warpgroup_of(thread) == Traits::kConsumers / 128;
  const ProducerOf<Traits> producer(args, barriers, rings);
  if (thread == Traits::kConsumers) {
    barriers.sums_full.init(1);
    barriers.sums_empty.init(Traits::kConsumers / 32);
    producer.init();
  }
  if constexpr (Traits::Code::kCodebook) {
    CodebookDequantizer<Traits::kType>::template fill<Traits::kConsumers>(reinterpret_cast<uint32_t*>(table),
                                                                          args.levels);
  }
  __syncwarp();
  cute::cluster_sync();  // each block's barriers are there before the other one arrives at them
  launch_dependents();
  if (is_producer) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kConsumers == 256 ? 40 : 32>();
    const int warp = wgmma::warp_of(thread) - Traits::kConsumers / 32;
    if (warp == 0 && cute::elect_one_sync()) producer.weights();
    if (warp == 1 && cute::elect_one_sync()) producer.tokens();
    if (const ManyWalk<Traits> first(args); warp == 2 && first.valid() && first.gives)
      Handover<Traits>(args.handover).mark();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
    with_plain<Traits>(args, [&](auto plain) { consume<Traits, plain.value>(args, barriers, table, rings); });
  }
  __syncwarp();
  cute::cluster_sync();  // a block may still hear from the other: it must not end first
}

// ---- launch ----

template <class Traits>
GemmKernel many_kernel_of() {
  static DeviceFlags raised;
  GemmKernel kernel = kernel_of<Traits>(reinterpret_cast<const void*>(gemm_many_kernel<Traits>), &raised);
  kernel.exchange_bytes = Traits::kExchange;
  kernel.handover_bytes = Handover<Traits>::kBytes;
  kernel.stage_barriers = Traits::kOneRing ? kBarriersOfStage : 0;
  return kernel;
}

// A call by the kernel for its weight and shape.
void launch_gemm_many(const LowbitArgs& given, const GemmKernel& kernel, const ManyShape& shape, int device,
                      cudaStream_t stream, const Allocator& allocate);

}  // namespace octofuse::lowbit
