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

#include "lowbit/gemm_consumer.cuh"
#include "lowbit/gemm_copies.cuh"
#include "lowbit/handover.cuh"
#include "lowbit/shape.h"
#include "octofuse/device.h"

namespace octofuse::lowbit {

struct StreamArgs : GemmArgs {
  int steps;                 // of a tile
  int share, longer_shares;  // steps of a block; the first longer_shares blocks have one more
  HandoverArgs handover;
};

// 2 groups of consumers.
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

// One lane copies a group's weights, another one its tokens.
template <class Traits>
class StreamProducer {
  const StreamArgs& args_;
  char* ring_;
  int group_;

 public:
  // ring: the group's.
  __device__ StreamProducer(const StreamArgs& args, char* ring, int group) : args_(args), ring_(ring), group_(group) {}

  __device__ void init() const { init_ring(ring_, RingPlace(args_.layout), Traits::kGroupThreads / 128); }

  // Alone the tokens of the first stages too, right behind the weights of each: behind those of all stages they would
  // be long in coming.
  __device__ void weights() const {
    if (!args_.constant_weight || !args_.chained) wait_for_predecessors();
    for_each_k_block([&](int tile, int k_block, char* stage, bool is_first) {
      copy_weights<Traits>(args_, full_of(stage), stage, k_block, tile);
      if (is_first && !args_.chained) copy_tokens_to<Traits>(args_, stage, k_block, 0);
    });
  }

  __device__ void tokens() const {
    wait_for_predecessors();
    for_each_k_block([&](int /*tile*/, int k_block, char* stage, bool is_first) {
      if (!is_first || args_.chained) copy_tokens_to<Traits>(args_, stage, k_block, 0);
    });
  }

 private:
  // f(tile, k-block, empty stage, whether nothing was in it)
  template <class F>
  __device__ void for_each_k_block(F f) const {
    RingPlace place(args_.layout);
    int first = args_.layout.stages;
#pragma unroll 1
    for (StreamWalk part(args_); part.valid(); part.next()) {
      const PartRange range(args_, part, group_);
#pragma unroll 1
      for (int i = 0; i < range.count; ++i, --first, place.next()) {
        // Of a fresh stage nothing has to be waited for: it may have been filled and read before this lane comes here.
        if (first <= 0) empty_of(ring_ + place.at).wait(place.phase ^ 1);
        f(part.tile, range.first + i, ring_ + place.at, first > 0);
      }
    }
  }
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
      const float4 low = *reinterpret_cast<const float4*>(others_ + buffer);
      const float4 high = *reinterpret_cast<const float4*>(others_ + buffer + Traits::kPartOutputs);
      const float y[4] = {add(low.x, high.x), add(low.y, high.y), add(low.z, high.z), add(low.w, high.w)};
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
  // Of the four producer warps 0 and 1 copy weights, 2 and 3 tokens.
  const int group = warp & 1;
  const StreamProducer<Traits> producer(args, rings + group * args.layout.stages * args.layout.stage, group);
  if (is_producer && warp < Traits::kGroups && cute::elect_one_sync()) producer.init();
  if constexpr (Traits::Code::kCodebook) {
    CodebookDequantizer<Traits::kType>::template fill<Traits::kConsumers>(reinterpret_cast<uint32_t*>(table),
                                                                          args.levels);
  }
  __syncwarp();
  __syncthreads();
  launch_dependents();
  if (is_producer) {
    if (warp < Traits::kGroups) {
      if (cute::elect_one_sync()) producer.weights();
    } else {
      if (cute::elect_one_sync()) producer.tokens();
    }
  } else {
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

inline void launch_gemm_stream(const LowbitArgs& given, const GemmKernel& kernel, int device, cudaStream_t stream,
                               const Allocator& allocate) {
  const Weight w(given);
  allow_shared_memory(kernel.function, kMostShared, device, *kernel.raised);
  StreamArgs args{gemm_args_of(given, w, kernel, kernel.slices, std::min(given.m, kernel.tokens),
                               kernel.tokens * kBlockK * kernel.token_size, is_chained(stream, device))};
  const int room = kMostShared - kBarrierBytes - kernel.table_bytes - kernel.exchange_bytes;
  args.layout.stages = std::min(room / args.layout.stage, kMostStages) / kernel.groups;
  if (args.layout.stages < 2) throw RuntimeError("lowbit_gemm_stream: a ring has fewer than two stages");
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

}  // namespace octofuse::lowbit
