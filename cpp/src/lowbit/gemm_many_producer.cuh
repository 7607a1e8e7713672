// What a block of gemm_many works on, tile after tile, and its producer warps, which copy that into shared memory by
// TMA.
#pragma once

#include "device/chain.cuh"
#include "lowbit/gemm_copies.cuh"
#include "lowbit/handover.cuh"
#include "lowbit/many_shape.h"

namespace octofuse::lowbit {

struct ManyArgs : GemmArgs {  // layout: where a block has two rings, of the weights' alone
  int k_blocks;
  int token_stages;  // of the tokens' ring, a run each; 0 where there is one ring
  int clusters;      // in all
  int token_tiles, channel_pairs;
  int band;          // tiles of tokens
  int shared_tiles;  // the first tiles, of which every cluster has as many k-blocks; 0: all tiles are whole
  HandoverArgs handover;
  bool by_pieces;  // of 16 bytes: outputs of 16 bits
};

struct ManyBarriers {
  // Of two rings.
  FullBarrier tokens_full[kMostStages], weights_full[kMostStages];
  EmptyBarrier tokens_empty[kMostStages], weights_empty[kMostStages];
  // Where K is divided: the other block's sums are here; it has read those that it was sent.
  FullBarrier sums_full;
  EmptyBarrier sums_empty;
};
static_assert(sizeof(ManyBarriers) <= kBarrierBytes - kBarriersOfStage);

// A cluster's work in its order: tiles, or parts of them. Where tiles are left over behind whole rounds, the clusters
// share these and the first round: cluster i has the k-blocks from cut(i) to cut(i + 1) of them all, one behind the
// other. So it may have the first part of one tile and the last part of another, which another cluster began. It starts
// with the former and ends with the latter: whoever needs sums finds them there, and K has the order that it has in one
// piece. Bands of tiles of tokens, so that clusters that run side by side read few different tokens and weights.
template <class Traits>
class ManyWalk {
  static constexpr int kLeastPart = 2;  // k-blocks: of two blocks that divide K the second may have one less
  const ManyArgs& args_;
  int step_ = -1;
  bool valid_ = true;

 public:
  int token, channel_tile;  // the first token; the block's own tile of channels
  int k_block, count;       // of the part: the block's first k-block, and how many
  bool takes, gives;        // it goes on from another cluster's sums; another one goes on from its own

  __device__ explicit ManyWalk(const ManyArgs& args) : args_(args) { next(); }

  __device__ bool valid() const { return valid_; }

  __device__ void next() {
    ++step_;
    const int cluster = static_cast<int>(blockIdx.x) / kSharing;
    int tile = cluster + step_ * args_.clusters;
    int from = 0;
    int to = length();
    valid_ = tile < tiles();
    if (args_.shared_tiles > 0) find_shared(cluster, tile, from, to);
    if (valid_) place(tile, from, to);
  }

 private:
  __device__ int tiles() const { return args_.token_tiles * args_.channel_pairs; }

  // A block's k-blocks of a tile, of the two that divide K the first one's.
  __device__ int length() const { return Traits::kSplitsK ? (args_.k_blocks + 1) / 2 : args_.k_blocks; }

  // In k-blocks of the shared tiles. No part of a tile is shorter than kLeastPart.
  __device__ int cut(int cluster) const {
    const int at = static_cast<int>(static_cast<unsigned>(cluster * args_.shared_tiles * length()) /
                                    static_cast<unsigned>(args_.clusters));
    const int tile = (at + kLeastPart - 1) / length();
    return at - tile * length() < kLeastPart ? tile * length() : at;
  }

  // A step's tile and its k-blocks. Found anew each time, which takes fewer registers than to remember it.
  __device__ void find_shared(int cluster, int& tile, int& from, int& to) {
    const int begin = cut(cluster);
    const int end = cut(cluster + 1);
    const int begun = (begin + length() - 1) / length();  // from here on tiles begin here
    const int whole = end / length() - begun;
    const int gives = end - (begun + whole) * length();
    const int step = step_ - (gives > 0 ? 1 : 0);
    const int own = args_.shared_tiles + cluster + (step - whole) * args_.clusters;  // that nobody shares
    valid_ = true;
    if (step < 0) {
      tile = begun + whole;
      to = gives;
    } else if (step < whole) {
      tile = begun + step;
    } else if (own < tiles()) {
      tile = own;
    } else {  // the last step
      tile = begun - 1;
      from = begin - tile * length();
      valid_ = begin < begun * length() && own < tiles() + args_.clusters;
    }
  }

  // A tile's k-blocks of a block from `from` to `to`.
  __device__ void place(int tile, int from, int to) {
    const int band = tile / (args_.band * args_.channel_pairs);
    const int height = min(args_.band, args_.token_tiles - band * args_.band);
    const int rest = tile - band * args_.band * args_.channel_pairs;
    const int pair = rest / height;
    // The last tile starts early enough to be full; it repeats tokens of the one before, and both write the same bits.
    token = max(0, min((band * args_.band + rest - pair * height) * Traits::kTokens, args_.m - Traits::kTokens));
    channel_tile = Traits::kSplitsK ? pair : pair * kSharing + static_cast<int>(blockIdx.x) % kSharing;
    takes = from > 0;
    gives = to < length();
    k_block = from;
    count = to - from;
    if (Traits::kSplitsK && blockIdx.x % kSharing == 1) {
      k_block += length();
      count = min(count, args_.k_blocks - k_block);
    }
  }
};

// ---- copies ----

// Half of a run of a tile's tokens, to both blocks of the cluster; where these divide K, all of it to this one.
template <class Traits>
__device__ inline void copy_tokens(const ManyArgs& args, FullBarrier& full, char* to, int column, int token) {
  const int half_bytes = args.tokens_read * kTokenRun;
  if constexpr (Traits::kSplitsK) {
#pragma unroll
    for (int half = 0; half < kSharing; ++half) {
      copy_box(args.x, full, to + half * half_bytes, column, token + half * args.tokens_read);
    }
  } else {
    constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const int rank = static_cast<int>(blockIdx.x) % kSharing;
    cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&args.x, reinterpret_cast<uint64_t*>(&full), uint16_t{(1 << kSharing) - 1},
                                           kNormal, to + rank * half_bytes, column, token + rank * args.tokens_read);
  }
}

// ---- producers: one lane copies a block's weights, one of another warp its tokens ----

template <class Traits>
class TwoRingProducer {
  const ManyArgs& args_;
  ManyBarriers& barriers_;
  char* tokens_;
  char* weights_;

 public:
  __device__ TwoRingProducer(const ManyArgs& args, ManyBarriers& barriers, char* rings)
      : args_(args), barriers_(barriers), tokens_(rings), weights_(rings + args.token_stages * Traits::kTokenBytes) {}

  __device__ void init() const {
    for (int i = 0; i < args_.layout.stages; ++i) {
      barriers_.weights_full[i].init(1);
      barriers_.weights_empty[i].init(Traits::kConsumers);
    }
    for (int i = 0; i < args_.token_stages; ++i) {
      barriers_.tokens_full[i].init(1);
      barriers_.tokens_empty[i].init(Traits::kConsumers / 128 * Traits::kWriters);
    }
    cutlass::arch::fence_barrier_init();
  }

  __device__ void weights() const {
    if (!args_.constant_weight) wait_for_predecessors();
    RingPosition at(args_.layout.stages);
#pragma unroll 1
    for (ManyWalk<Traits> tile(args_); tile.valid(); tile.next()) {
#pragma unroll 1
      for (int k_block = tile.k_block; k_block < tile.k_block + tile.count; ++k_block, at.next()) {
        barriers_.weights_empty[at.slot].wait(at.phase ^ 1);
        copy_weights<Traits>(args_, barriers_.weights_full[at.slot], weights_ + at.slot * args_.layout.stage, k_block,
                             tile.channel_tile);
      }
    }
  }

  __device__ void tokens() const {
    wait_for_predecessors();
    RingPosition at(args_.token_stages);
#pragma unroll 1
    for (ManyWalk<Traits> tile(args_); tile.valid(); tile.next()) {
#pragma unroll 1
      for (int i = 0; i < tile.count * Traits::kRuns; ++i, at.next()) {
        barriers_.tokens_empty[at.slot].wait(at.phase ^ 1);
        barriers_.tokens_full[at.slot].arrive_and_expect_tx(
            static_cast<uint32_t>(kSharing * args_.tokens_read * kTokenRun));
        const int column = (tile.k_block * Traits::kRuns + i) * (kBlockK / Traits::kRuns);
        copy_tokens<Traits>(args_, barriers_.tokens_full[at.slot], tokens_ + at.slot * Traits::kTokenBytes, column,
                            tile.token);
      }
    }
  }
};

template <class Traits>
class OneRingProducer {
  const ManyArgs& args_;
  char* ring_;

 public:
  __device__ OneRingProducer(const ManyArgs& args, ManyBarriers& /*barriers*/, char* ring) : args_(args), ring_(ring) {}

  __device__ void init() const {
    init_ring(ring_, RingPlace(args_.layout), Traits::kConsumers / 128 * Traits::kWriters);
  }

  __device__ void weights() const {
    if (!args_.constant_weight) wait_for_predecessors();
    for_each_k_block([&](const ManyWalk<Traits>& tile, int k_block, char* stage) {
      copy_weights<Traits>(args_, full_of(stage), stage, k_block, tile.channel_tile);
    });
  }

  __device__ void tokens() const {
    wait_for_predecessors();
    for_each_k_block([&](const ManyWalk<Traits>& tile, int k_block, char* stage) {
      full_of(stage).arrive_and_expect_tx(
          static_cast<uint32_t>(Traits::kRuns * kSharing * args_.tokens_read * kTokenRun));
#pragma unroll
      for (int run = 0; run < Traits::kRuns; ++run) {
        copy_tokens<Traits>(args_, full_of(stage), stage + run * Traits::kTokenBytes,
                            k_block * kBlockK + run * (kBlockK / Traits::kRuns), tile.token);
      }
    });
  }

 private:
  // f(tile, k-block, empty stage)
  template <class F>
  __device__ void for_each_k_block(F f) const {
    RingPlace place(args_.layout);
#pragma unroll 1
    for (ManyWalk<Traits> tile(args_); tile.valid(); tile.next()) {
#pragma unroll 1
      for (int k_block = tile.k_block; k_block < tile.k_block + tile.count; ++k_block, place.next()) {
        empty_of(ring_ + place.at).wait(place.phase ^ 1);
        f(tile, k_block, ring_ + place.at);
      }
    }
  }
};

}  // namespace octofuse::lowbit
