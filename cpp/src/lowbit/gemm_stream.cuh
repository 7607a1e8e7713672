// The kernel of gemm_kernel.cuh for up to 64 tokens where there are more tiles of channels than SMs: blocks that stay
// and share the k-blocks of all tiles evenly (stream-K), so that no SM is idle in a last round, and weights arrive
// while outputs leave.
//
// Both K slices of a tile are multiplied side by side, a step being a k-block of each. Block i has the steps from
// cut(i) to cut(i + 1) of all tiles, one tile behind the other. Where a cut goes through a tile, the next block goes on
// from the sums of the first part (handover.cuh), so K has the order that it has in one piece, and a token the bits
// that gemm_kernel.cuh gives it. A block begins with its last tile, the part that it gives away, and ends with the one
// that another block has begun: hardly anybody waits.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "lowbit/gemm_consumer.cuh"
#include "lowbit/gemm_copies.cuh"
#include "lowbit/handover.cuh"
#include "lowbit/shape.h"

namespace octofuse::lowbit {

struct StreamArgs : GemmArgs {
  int steps;                 // of a tile
  int share, longer_shares;  // steps of a block; the first longer_shares blocks have one more
  HandoverArgs handover;
};

// 2 groups of consumers. kType: as GemmTraits'; of int8 up to 16 tokens (integer_shape.h).
template <LowbitFormat kFormat, int kBits, DType kType, int kTokens>
struct StreamTraits : GemmTraits<kFormat, kBits, kType, kTokens, kStreamChannels> {
  static_assert(StreamTraits::kGroups == 2 && StreamTraits::kSlicesOfGroup == 1);
  static constexpr int kNextBlock = 1;
  static constexpr int kPart = 16;  // tokens whose sums lie in shared memory at a time
  static constexpr int kPartOutputs = kPart * StreamTraits::kPitch;
  static constexpr int kBuffers = kTokens > 32 ? 1 : 2;  // beside 64 tokens there is more need of stages
  static constexpr int kStagingBytes = kBuffers * StreamTraits::kGroups * kPartOutputs * 4;
};

// A block's tiles and parts of tiles, in its order.
class StreamWalk {
  int steps_, start_;

 public:
  int tile, first, end;  // its steps

  __device__ explicit StreamWalk(const StreamArgs& args) : steps_(args.steps) {
    const int block = static_cast<int>(blockIdx.x);
    start_ = cut(args, block);
    const int stop = cut(args, block + 1);
    tile = (stop - 1) / steps_;
    end = stop - tile * steps_;
    first = max(start_ - tile * steps_, 0);
  }

  __device__ bool valid() const { return end > 0; }
  __device__ bool gives() const { return end < steps_; }
  __device__ bool takes() const { return first > 0; }
  __device__ void next() {
    --tile;
    end = (tile + 1) * steps_ > start_ ? steps_ : 0;
    first = max(start_ - tile * steps_, 0);
  }

 private:
  // Not in front of a tile's last step: the second slice may not have it, and every part has a k-block of each.
  __device__ int cut(const StreamArgs& args, int block) const {
    const int at = block * args.share + min(block, args.longer_shares);
    const int rest = at % steps_;
    return at + (rest > 0 && rest == steps_ - 1 ? 1 : 0);
  }
};

// A group's k-blocks in a part of a tile.
struct PartRange {
  int first, count;

  __device__ PartRange(const GemmArgs& args, const StreamWalk& part, int group) {
    const int start = group == 0 ? 0 : args.slice_blocks + args.longer_slices;
    const int blocks = args.slice_blocks + (group < args.longer_slices ? 1 : 0);
    first = start + part.first;
    count = min(part.end, blocks) - part.first;
  }
};

// One lane copies a group's weights, another one the tokens of both groups.
template <class Traits>
class StreamProducer {
  const StreamArgs& args_;
  char* rings_;

 public:
  // rings: of all groups.
  __device__ StreamProducer(const StreamArgs& args, char* rings) : args_(args), rings_(rings) {}

  __device__ void init(int group) const {
    init_ring(ring(group), RingPlace(args_.layout), Traits::kGroupThreads / 128);
  }

  // Alone the tokens of the first stages too, right behind the weights of each: behind those of all stages they would
  // be long in coming.
  __device__ void weights(int group) const {
    if (!args_.constant_weight || !args_.chained) wait_for_predecessors();
    Way way(args_);
#pragma unroll 1
    for (StreamWalk part(args_); part.valid(); part.next()) {
      const PartRange range(args_, part, group);
#pragma unroll 1
      for (int i = 0; i < range.count; ++i) {
        const bool is_fresh = way.is_fresh();
        char* const stage = way.next(ring(group));
        copy_weights<Traits>(args_, full_of(stage), stage, range.first + i, part.tile);
        if (is_fresh && !args_.chained) copy_tokens_to<Traits>(args_, stage, range.first + i, 0);
      }
    }
  }

  __device__ void tokens() const {
    wait_for_predecessors();
    Way ways[Traits::kGroups] = {Way(args_), Way(args_)};
#pragma unroll 1
    for (StreamWalk part(args_); part.valid(); part.next()) {
      const PartRange ranges[Traits::kGroups] = {PartRange(args_, part, 0), PartRange(args_, part, 1)};
#pragma unroll 1
      for (int i = 0; i < ranges[0].count; ++i) {  // the second group may have one less
#pragma unroll
        for (int group = 0; group < Traits::kGroups; ++group) {
          if (i >= ranges[group].count) continue;
          const bool is_fresh = ways[group].is_fresh();
          char* const stage = ways[group].next(ring(group));
          if (!is_fresh || args_.chained) copy_tokens_to<Traits>(args_, stage, ranges[group].first + i, 0);
        }
      }
    }
  }

 private:
  // A copier's way through a ring.
  class Way {
    RingPlace place_;
    int fresh_;  // stages in which nothing has been

   public:
    __device__ explicit Way(const StreamArgs& args) : place_(args.layout), fresh_(args.layout.stages) {}

    __device__ bool is_fresh() const { return fresh_ > 0; }
    // The next stage, empty. Of a fresh one nothing has to be waited for: it may have been filled and read before this
    // lane comes here.
    __device__ char* next(char* ring) {
      char* const stage = ring + place_.at;
      if (fresh_ <= 0) empty_of(stage).wait(place_.phase ^ 1);
      --fresh_;
      place_.next();
      return stage;
    }
  };

  __device__ char* ring(int group) const { return rings_ + group * args_.layout.stages * args_.layout.stage; }
};

// How a tile's outputs leave: kPart tokens at a time through shared memory, where the sums of both groups are added.
// Where two buffers take turns, one barrier for a part is enough: who comes to the next one has read this one.
template <class Traits>
class TileOutputs {
  using Sum = typename Traits::Sum;
  static constexpr int kOfToken = Traits::kChannels / 4;
  static_assert(Traits::kConsumers == Traits::kPart * kOfToken);  // four channels of a token for each thread
  const StreamArgs& args_;
  Sum* own_;               // where this thread's sums go
  const Sum* others_;      // where those lie that it adds up
  int of_part_, channel_;  // whose token, and which channels of the tile, these are
  int buffer_ = 0;

 public:
  __device__ TileOutputs(const StreamArgs& args, int group, char* staging)
      : args_(args),
        of_part_(static_cast<int>(threadIdx.x) / kOfToken),
        channel_(static_cast<int>(threadIdx.x) % kOfToken * 4) {
    const int thread = static_cast<int>(threadIdx.x) % Traits::kGroupThreads;
    auto* const sums = reinterpret_cast<Sum*>(staging);
    own_ = sums + group * Traits::kPartOutputs + thread % 4 * 2 * Traits::kPitch + thread / 32 * kTileRows +
           thread % 32 / 4;
    others_ = sums + of_part_ * Traits::kPitch + channel_;
  }

  __device__ void finish(const StreamWalk& part, const Sum (&sums)[Traits::kSums]) {
#pragma unroll
    for (int from = 0; from < Traits::kTokens; from += Traits::kPart) {
      if (from < args_.m) finish_part(part, from, sums);
    }
  }

 private:
  __device__ void finish_part(const StreamWalk& part, int from, const Sum (&sums)[Traits::kSums]) {
    const int token = from + of_part_;
    const int n = part.tile * Traits::kChannels + channel_;
    const bool stores = !part.gives() && token < args_.m && n < args_.n;
    Addends<4> addends;
    if (stores) addends = args_.epilogue.template load<4>(token, n);
    const int buffer = buffer_ * (Traits::kGroups * Traits::kPartOutputs);
    buffer_ = (buffer_ + 1) % Traits::kBuffers;
    if constexpr (Traits::kBuffers == 1) barrier_sync<kConsumerBarrier, Traits::kConsumers>();  // it has been read
#pragma unroll
    for (int i = 0; i < Traits::kPart / 2; ++i) {
      own_[buffer + (i / 4 * 8 + i % 2) * Traits::kPitch + i / 2 % 2 * 8] = sums[from / 2 + i];
    }
    barrier_sync<kConsumerBarrier, Traits::kConsumers>();
    if (stores) {
      using Stored = std::conditional_t<Traits::kIntegers, int32_t, float>;
      const Quad<Sum> low = *reinterpret_cast<const Quad<Sum>*>(others_ + buffer);
      const Quad<Sum> high = *reinterpret_cast<const Quad<Sum>*>(others_ + buffer + Traits::kPartOutputs);
      Stored y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = static_cast<Stored>(add(low.values[i], high.values[i]));
      args_.epilogue.store(y, addends, token, n);
    }
    __syncwarp();
  }
};

// rings: of both groups, and the staging behind them.
template <class Traits, bool kPlain>
__device__ void multiply_parts(const StreamArgs& args, const char* table, char* rings) {
  wait_for_predecessors();
  const int group = wgmma::warpgroup_of(static_cast<int>(threadIdx.x)) / (Traits::kGroupThreads / 128);
  const int ring_bytes = args.layout.stages * args.layout.stage;
  OneRing<Traits> ring(rings + group * ring_bytes, args.layout);
  TileOutputs<Traits> outputs(args, group, rings + Traits::kGroups * ring_bytes);
  const Handover<Traits> handover(args.handover);
#pragma unroll 1
  for (StreamWalk part(args); part.valid(); part.next()) {
    typename Traits::Sum sums[Traits::kSums];
    for_each_sum(sums, [](auto& sum) { sum = 0; });
    handover.take(part.takes(), sums);
    multiply_tile<Traits, kPlain>(args, table, ring, PartRange(args, part, group).count, sums);
    handover.give(part.gives(), sums);
    outputs.finish(part, sums);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) gemm_stream_kernel(const __grid_constant__ StreamArgs args) {
  extern __shared__ __align__(1024) char memory[];
  char* const table = memory;
  char* const rings = memory + Traits::kTableBytes + kBarrierBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_producer = wgmma::warpgroup_of(thread) == Traits::kConsumers / 128;
  const int warp = wgmma::warp_of(thread) - Traits::kConsumers / 32;
  // Of the four producer warps 0 and 1 copy weights, 2 tokens, and 3 tells who goes on from this block's sums.
  const StreamProducer<Traits> producer(args, rings);
  if (is_producer && warp < Traits::kGroups && cute::elect_one_sync()) producer.init(warp);
  if constexpr (Traits::Code::kCodebook) {
    CodebookDequantizer<Traits::kType>::template fill<Traits::kConsumers>(reinterpret_cast<uint32_t*>(table),
                                                                          args.levels);
  }
  __syncwarp();
  __syncthreads();
  launch_dependents();
  // Registers of a whole k-block's operand: the producers hand theirs over.
  if (is_producer) {
    if constexpr (Traits::kOperandRuns == 2) cutlass::arch::warpgroup_reg_dealloc<24>();
    if (warp < Traits::kGroups) {
      if (cute::elect_one_sync()) producer.weights(warp);
    } else if (warp == Traits::kGroups) {
      if (cute::elect_one_sync()) producer.tokens();
    } else if (StreamWalk(args).gives()) {
      Handover<Traits>(args.handover).mark();
    }
  } else {
    if constexpr (Traits::kOperandRuns == 2) cutlass::arch::warpgroup_reg_alloc<112>();
    with_plain<Traits>(args, [&](auto plain) { multiply_parts<Traits, plain.value>(args, table, rings); });
  }
}

// ---- launch ----

template <class Traits>
GemmKernel stream_kernel_of() {
  static DeviceFlags raised;
  GemmKernel kernel = kernel_of<Traits>(reinterpret_cast<const void*>(gemm_stream_kernel<Traits>), &raised);
  kernel.handover_bytes = Handover<Traits>::kBytes;
  kernel.exchange_bytes = Traits::kStagingBytes;
  kernel.stage_barriers = kBarriersOfStage;
  return kernel;
}

void launch_gemm_stream(const LowbitArgs& given, const GemmKernel& kernel, int device, cudaStream_t stream,
                        const Allocator& allocate);

}  // namespace octofuse::lowbit
