// What a block of gemm_many works on, tile after tile, and its producer warps, which copy that into shared memory by
// TMA.
#pragma once

#include "device/chain.cuh"
#include "lowbit/gemm_args.cuh"

namespace octofuse::lowbit {

struct ManyArgs : GemmArgs {  // layout: of the weights' ring alone
  int k_blocks;
  int token_stages;  // of the tokens' ring: a run each
  int clusters;      // in all
  int token_tiles, channel_pairs;
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

// The k-blocks of a block: all, or half of them.
template <class Traits>
struct ManyRange {
  int first, count;

  __device__ explicit ManyRange(const ManyArgs& args) : first(0), count(args.k_blocks) {
    if constexpr (!Traits::kSplitsK) return;
    const int half = (args.k_blocks + 1) / 2;
    const bool second = blockIdx.x % kSharing == 1;
    first = second ? half : 0;
    count = second ? args.k_blocks - half : half;
  }
};

// A cluster's tiles in their order. Bands of tiles of tokens, so that clusters that run side by side read few different
// tokens and weights.
template <class Traits>
class ManyWalk {
  static constexpr int kBand = 2048 / Traits::kTokens;
  const ManyArgs& args_;
  int index_;

 public:
  int token = 0, channel_tile = 0;  // the first token; the block's own tile of channels

  __device__ explicit ManyWalk(const ManyArgs& args) : args_(args), index_(static_cast<int>(blockIdx.x) / kSharing) {
    find();
  }
  __device__ bool valid() const { return index_ < args_.token_tiles * args_.channel_pairs; }
  __device__ void next() {
    index_ += args_.clusters;
    find();
  }

 private:
  __device__ void find() {
    const int band = index_ / (kBand * args_.channel_pairs);
    const int height = min(kBand, args_.token_tiles - band * kBand);
    if (height <= 0) return;  // behind the last tile
    const int rest = index_ - band * kBand * args_.channel_pairs;
    const int pair = rest / height;
    // The last tile starts early enough to be full; it repeats tokens of the one before, and both write the same bits.
    token = max(0, min((band * kBand + rest - pair * height) * Traits::kTokens, args_.m - Traits::kTokens));
    channel_tile = Traits::kSplitsK ? pair : pair * kSharing + static_cast<int>(blockIdx.x) % kSharing;
  }
};

// One lane copies a block's weights, one of another warp half of the tokens, to both blocks of the cluster; where these
// divide K, all of the tokens.
template <class Traits>
class ManyProducer {
  const ManyArgs& args_;
  ManyBarriers& barriers_;
  const ManyRange<Traits> range_;

 public:
  __device__ ManyProducer(const ManyArgs& args, ManyBarriers& barriers)
      : args_(args), barriers_(barriers), range_(args) {}

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
      for (int k_block = range_.first; k_block < range_.first + range_.count; ++k_block) {
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
      for (int i = 0; i < range_.count * Traits::kRuns; ++i) {
        FullBarrier& full = barriers_.tokens_full[at.slot];
        barriers_.tokens_empty[at.slot].wait(at.phase ^ 1);
        full.arrive_and_expect_tx(static_cast<uint32_t>(kSharing * half_bytes));
        char* const to = ring + at.slot * Traits::kTokenBytes;
        const int column = (range_.first * Traits::kRuns + i) * (kBlockK / Traits::kRuns);
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
