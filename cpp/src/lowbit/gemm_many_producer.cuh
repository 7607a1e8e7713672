// What a block of gemm_many works on, tile after tile, and its producer warps, which copy that into shared memory by
// TMA.
#pragma once

#include "device/chain.cuh"
#include "lowbit/gemm_args.cuh"

namespace octofuse::lowbit {

// What clusters that share tiles hand sums over by (gemm_many_exchange.cuh).
struct HandoverArgs {
  float4* sums;     // [cluster][block][warp][part][4 sums][lane]
  uint64_t* marks;  // [cluster][block][warp]
  uint64_t mark;    // of this call
};

struct ManyArgs : GemmArgs {  // layout: of the weights' ring alone
  int k_blocks;
  int token_stages;  // of the tokens' ring: a run each
  int clusters;      // in all
  int token_tiles, channel_pairs;
  int shared_tiles;  // the first tiles, of which every cluster has as many k-blocks; 0: all tiles are whole
  HandoverArgs handover;
  bool by_pieces;  // of 16 bytes: outputs of 16 bits
};

struct ManyBarriers {
  FullBarrier tokens_full[kMostStages], weights_full[kMostStages];
  EmptyBarrier tokens_empty[kMostStages], weights_empty[kMostStages];
  // Where K is divided: the other block's sums are here; it has read those that it was sent.
  FullBarrier sums_full;
  EmptyBarrier sums_empty;
};
static_assert(sizeof(ManyBarriers) <= kBarrierBytes);

// A cluster's work in its order: tiles, or parts of them. Where tiles are left over behind whole rounds, the clusters
// share these and the first round: cluster i has the k-blocks from cut(i) to cut(i + 1) of them all, one behind the
// other. So it may have the first part of one tile and the last part of another, which another cluster began. It starts
// with the former and ends with the latter: whoever needs sums finds them there, and K has the order that it has in one
// piece. Bands of tiles of tokens, so that clusters that run side by side read few different tokens and weights.
template <class Traits>
class ManyWalk {
  static constexpr int kBand = 2048 / Traits::kTokens;
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
    const int band = tile / (kBand * args_.channel_pairs);
    const int height = min(kBand, args_.token_tiles - band * kBand);
    const int rest = tile - band * kBand * args_.channel_pairs;
    const int pair = rest / height;
    // The last tile starts early enough to be full; it repeats tokens of the one before, and both write the same bits.
    token = max(0, min((band * kBand + rest - pair * height) * Traits::kTokens, args_.m - Traits::kTokens));
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

// One lane copies a block's weights, one of another warp half of the tokens, to both blocks of the cluster; where these
// divide K, all of the tokens.
template <class Traits>
class ManyProducer {
  const ManyArgs& args_;
  ManyBarriers& barriers_;

 public:
  __device__ ManyProducer(const ManyArgs& args, ManyBarriers& barriers) : args_(args), barriers_(barriers) {}

  __device__ void weights(char* ring) const {
    if (!args_.constant_weight) wait_for_predecessors();
    const StageLayout& layout = args_.layout;
    const int scales = args_.groups.segments * Traits::kChannels;
    const auto bytes =
        static_cast<uint32_t>(Traits::kRowTiles * layout.tile + (args_.has_scales ? args_.planes * scales * 2 : 0) +
                              (args_.has_zeros ? scales : 0));
    RingPosition at(0, layout.stages);
#pragma unroll 1
    for (ManyWalk<Traits> tile(args_); tile.valid(); tile.next()) {
      const int channel = tile.channel_tile * Traits::kChannels;
#pragma unroll 1
      for (int k_block = tile.k_block; k_block < tile.k_block + tile.count; ++k_block) {
        FullBarrier& full = barriers_.weights_full[at.slot];
        char* const to = ring + at.slot * layout.stage;
        const int group = args_.groups.of(k_block, 0);
        barriers_.weights_empty[at.slot].wait(at.phase ^ 1);
        full.arrive_and_expect_tx(bytes);
        copy(args_.codes, full, to + layout.codes, k_block * (layout.tile / 8), tile.channel_tile * Traits::kRowTiles);
        if (args_.has_scales) copy(args_.scales, full, to + layout.scales, channel, group * args_.planes);
        if (args_.has_zeros) copy(args_.zeros, full, to + layout.zeros, channel, group);
        at.next();
      }
    }
  }

  __device__ void tokens(char* ring) const {
    wait_for_predecessors();
    const int rank = static_cast<int>(blockIdx.x) % kSharing;
    const int half_bytes = args_.tokens_read * kTokenRun;
    RingPosition at(0, args_.token_stages);
#pragma unroll 1
    for (ManyWalk<Traits> tile(args_); tile.valid(); tile.next()) {
#pragma unroll 1
      for (int i = 0; i < tile.count * Traits::kRuns; ++i) {
        FullBarrier& full = barriers_.tokens_full[at.slot];
        barriers_.tokens_empty[at.slot].wait(at.phase ^ 1);
        full.arrive_and_expect_tx(static_cast<uint32_t>(kSharing * half_bytes));
        char* const to = ring + at.slot * Traits::kTokenBytes;
        const int column = (tile.k_block * Traits::kRuns + i) * (kBlockK / Traits::kRuns);
        if constexpr (Traits::kSplitsK) {
#pragma unroll
          for (int half = 0; half < kSharing; ++half) {
            copy(args_.x, full, to + half * half_bytes, column, tile.token + half * args_.tokens_read);
          }
        } else {
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&args_.x, reinterpret_cast<uint64_t*>(&full),
                                                 uint16_t{(1 << kSharing) - 1}, kNormal, to + rank * half_bytes, column,
                                                 tile.token + rank * args_.tokens_read);
        }
        at.next();
      }
    }
  }

 private:
  static constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  __device__ static void copy(const CUtensorMap& map, FullBarrier& full, char* to, int column, int row) {
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), kNormal, to, column, row);
  }
};

}  // namespace octofuse::lowbit
