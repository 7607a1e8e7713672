// How lowbit_wgmma.cu's stages lie, and the warpgroup that fills them by bulk copies.
#pragma once

#include "kernels/lowbit_quarters.cuh"
#include "wgmma/primitives.cuh"

namespace octofuse::lowbit {

constexpr int kBringWarps = 4;
constexpr int kThreads = kSummers + 32 * kBringWarps;
constexpr int kMostShared = 226 << 10;  // of an SM, besides the barriers
constexpr int kMostStages = 8;
constexpr int kMostTokens = 64;  // of a launch

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// d[64, 2 * kTokens] += codes * tokens, 32 columns of the weight.
template <int kTokens, bool kSigned>
struct Multiply;

#define OCTOFUSE_MULTIPLY(TOKENS, N)                                                                        \
  template <bool kSigned>                                                                                   \
  struct Multiply<TOKENS, kSigned> {                                                                        \
    template <size_t... i>                                                                                  \
    __device__ static void call(const uint32_t (&a)[4], uint64_t b, uint32_t (&d)[N / 2],                   \
                                cute::SM90::GMMA::ScaleOut scale, std::index_sequence<i...>) {              \
      if constexpr (kSigned) {                                                                              \
        cute::SM90::GMMA::MMA_64x##N##x32_S32S8S8_RS_TN::fma(a[0], a[1], a[2], a[3], b, d[i]..., scale);    \
      } else {                                                                                              \
        cute::SM90::GMMA::MMA_64x##N##x32_S32U8S8_RS_TN::fma(a[0], a[1], a[2], a[3], b, d[i]..., scale);    \
      }                                                                                                     \
    }                                                                                                       \
    __device__ static void run(const uint32_t (&a)[4], uint64_t b, uint32_t (&d)[N / 2], bool accumulate) { \
      using cute::SM90::GMMA::ScaleOut;                                                                     \
      call(a, b, d, accumulate ? ScaleOut::One : ScaleOut::Zero, std::make_index_sequence<N / 2>());        \
    }                                                                                                       \
  }
OCTOFUSE_MULTIPLY(16, 32);
OCTOFUSE_MULTIPLY(32, 64);
OCTOFUSE_MULTIPLY(64, 128);
#undef OCTOFUSE_MULTIPLY

// A kernel at compile time.
template <LowbitFormat kFormat_, int kBits, int kTokens_, int kSegments_>
struct Kind {
  static constexpr int kSegments = kSegments_;
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kTiles = kTokens / 4;
  static constexpr int kValues = 2 * kTiles;  // of a thread
  // Few tokens: two blocks an SM, the four of the same rows a cluster. Alone on their SMs clusters of four do not fill
  // the device, and those blocks meet in memory.
  static constexpr bool kClusters = kTokens == 16;
  static constexpr int kBlocks = kClusters ? 2 : 1;
  static constexpr int kShared = kMostShared / kBlocks - (kBlocks - 1) * 2048;
  static constexpr int kBringRegisters = 40;
  static constexpr int kSumRegisters = kClusters ? 96 : 232;
  using Code = Codes<kFormat, kBits>;
  static constexpr int kColumnBytes = 2 * kTokens * kChunk;
};

// How a stage lies: tokens, codes, what there is to know of the tokens, scales and zeros of every segment.
template <class Kind>
struct Places {
  int tile;  // bytes
  int codes, facts, scales, zeros, end, stage;

  __host__ __device__ explicit Places(const Weight& w) {
    constexpr int segments = Kind::kSegments;
    tile = Kind::Code::kBytes * (Kind::Code::kPlanes ? w.planes : 1);
    codes = Kind::kColumnBytes;
    facts = codes + kBlockStrips * tile;
    scales = facts + segments * Kind::kTokens * 8;
    zeros = scales + segments * w.planes * kBlockRows * 2;
    end = zeros + (w.zero != nullptr ? segments * kBlockRows : 0);
    stage = (end + 1023) / 1024 * 1024;  // the swizzle's unit
  }
  // Behind the ring: the added parts.
  static constexpr int kFour = Kind::kValues * kSummers * 4;
  __host__ __device__ int stages() const {
    const int fit = (Kind::kShared - 1024 - kFour) / stage;
    return fit < kMostStages ? fit : kMostStages;
  }
  __host__ __device__ int total(int stages) const { return 1024 + stages * stage + kFour; }
};

struct Barriers {
  FullBarrier full[kMostStages];
  EmptyBarrier empty[kMostStages];
};

// A stage's turn.
struct Turn {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void next(int stages) {
    if (++slot < stages) return;
    slot = 0;
    phase ^= 1;
  }
};

// ---- the warpgroup that brings ----

__device__ inline void bulk_copy(char* to, const void* from, int bytes, FullBarrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(cute::cast_smem_ptr_to_uint(to)), "l"(from), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(&barrier))
               : "memory");
}

// One of the warps that bring, and what its lanes copy of a chunk. A bulk copy keeps its warp for some 80 cycles, and a
// chunk has a dozen of them: so the warps take turns.
template <class Kind>
struct BlockBringer {
  const GemmArgs& args;
  const Weight& w;
  const Places<Kind>& places;
  int lane, first, strips, rows;  // of the block: its first strip, how many there are, and how many rows

  __device__ BlockBringer(const GemmArgs& args, const Places<Kind>& places)
      : args(args),
        w(args.w),
        places(places),
        lane(static_cast<int>(threadIdx.x) % 32),
        first(static_cast<int>(blockIdx.x) * kBlockStrips),
        strips(min(kBlockStrips, (w.n + kStrip - 1) / kStrip - first)),
        rows(min(kBlockRows, w.n - first * kStrip)) {}

  static constexpr int kFactBytes = Kind::kSegments * Kind::kTokens * static_cast<int>(sizeof(TokenChunk));

  // At the barrier of a stage.
  __device__ static uint32_t arrivals(const Weight& w) { return w.wide ? 1 : 33; }

  __device__ int bytes() const {
    int count = Kind::kColumnBytes + kFactBytes + strips * places.tile;
    if (w.wide) count += Kind::kSegments * (w.planes * rows * 2 + (w.zero != nullptr ? rows : 0));
    return count;
  }

  // What nothing in flight writes.
  __device__ void weights(int chunk, char* stage, FullBarrier& full) const {
    if (!w.wide) {
      ragged(chunk, stage);
      full.arrive();
    }
    if (lane == 0) full.arrive_and_expect_tx(static_cast<uint32_t>(bytes()));
    __syncwarp();
    if (lane < strips) {
      const int64_t tile = static_cast<int64_t>(first + lane) * w.chunks + chunk;
      bulk_copy(stage + places.codes + lane * places.tile, w.packed + tile * places.tile, places.tile, full);
    }
    if (!w.wide) return;
    for (int i = lane; i < Kind::kSegments * w.planes; i += 32) {
      const uint16_t* const from = w.scale_row(chunk, i / w.planes, i % w.planes) + first * kStrip;
      bulk_copy(stage + places.scales + i * kBlockRows * 2, from, rows * 2, full);
    }
    if (w.zero != nullptr && lane < Kind::kSegments) {
      bulk_copy(stage + places.zeros + lane * kBlockRows, w.zero_row(chunk, lane) + first * kStrip, rows, full);
    }
  }

  __device__ void tokens(int chunk, char* stage, FullBarrier& full) const {
    if (lane == 0) {
      bulk_copy(stage, args.columns + static_cast<int64_t>(chunk) * Kind::kColumnBytes, Kind::kColumnBytes, full);
    } else if (lane == 1) {
      const char* const facts = reinterpret_cast<const char*>(args.facts) + static_cast<int64_t>(chunk) * kFactBytes;
      bulk_copy(stage + places.facts, facts, kFactBytes, full);
    }
  }

 private:
  // What does not lie at a multiple of 16 bytes.
  __device__ void ragged(int chunk, char* stage) const {
    auto* const scales = reinterpret_cast<uint16_t*>(stage + places.scales);
    for (int i = lane; i < Kind::kSegments * w.planes * kBlockRows; i += 32) {
      const int row = i / kBlockRows;
      scales[i] = w.scale_row(chunk, row / w.planes, row % w.planes)[min(i % kBlockRows, rows - 1) + first * kStrip];
    }
    auto* const zeros = reinterpret_cast<uint8_t*>(stage + places.zeros);
    for (int i = lane; w.zero != nullptr && i < Kind::kSegments * kBlockRows; i += 32) {
      zeros[i] = w.zero_row(chunk, i / kBlockRows)[min(i % kBlockRows, rows - 1) + first * kStrip];
    }
  }
};

// Chunk i of the block is brought by warp i % 4, into stage i % stages.
template <class Kind>
__device__ void bring_all(const GemmArgs& args, const Places<Kind>& places, char* ring, Barriers& barriers,
                          int stages) {
  const BlockBringer<Kind> bringer(args, places);
  const int mine = (static_cast<int>(threadIdx.x) - kSummers) / 32;
  const int first = static_cast<int>(blockIdx.y) * (kParts / kQuarters);
  const int chunks = args.w.chunks;
  Walk walk{first, first};
  walk.settle(first, chunks);
  const Walk start = walk;
  if (!args.constant_weight) wait_for_earlier_kernels();
#pragma unroll 1
  for (int i = 0; i < stages && !walk.ended(first); ++i) {
    if (i % kBringWarps == mine) bringer.weights(walk.chunk, ring + i * places.stage, barriers.full[i]);
    walk.advance(first, chunks);
  }
  wait_for_earlier_kernels();  // the one that converts tokens
  walk = start;
  Turn turn;
#pragma unroll 1
  for (int i = 0; !walk.ended(first); ++i) {
    if (i % kBringWarps == mine) {
      char* const stage = ring + turn.slot * places.stage;
      if (i >= stages) {
        barriers.empty[turn.slot].wait(turn.phase ^ 1);
        bringer.weights(walk.chunk, stage, barriers.full[turn.slot]);
      }
      bringer.tokens(walk.chunk, stage, barriers.full[turn.slot]);
    }
    turn.next(stages);
    walk.advance(first, chunks);
  }
}

}  // namespace octofuse::lowbit
