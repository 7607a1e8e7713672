// What a block of gemm_many.cu works on, tile after tile, and its producer warps, which copy that into shared memory by
// TMA.
#pragma once

#include "device/chain.cuh"
#include "lowbit/gemm_args.cuh"

namespace octofuse::lowbit {

struct ManyArgs : GemmArgs {  // layout: of the weights' ring alone
  int k_blocks;
  int token_stages;  // of the tokens' ring: half a k-block each
  int clusters;      // in all
  int token_tiles, channel_pairs;
  bool by_pieces;  // of 16 bytes: outputs of 16 bits
};

struct ManyBarriers {
  FullBarrier tokens_full[kMostStages], weights_full[kMostStages];
  EmptyBarrier tokens_empty[kMostStages], weights_empty[kMostStages];
};
static_assert(sizeof(ManyBarriers) <= kBarrierBytes);

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
    channel_tile = pair * kSharing + static_cast<int>(blockIdx.x) % kSharing;
  }
};

// One lane copies a block's weights, one of another warp half of the tokens, to both blocks of the cluster.
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
    const auto bytes = static_cast<uint32_t>(Traits::kRowTiles * layout.tile + args_.planes * scales * 2 +
                                             (args_.has_zeros ? scales : 0));
    RingPosition at(0, layout.stages);
#pragma unroll 1
    for (ManyWalk<Traits> tile(args_); tile.valid(); tile.next()) {
      const int channel = tile.channel_tile * Traits::kChannels;
#pragma unroll 1
      for (int k_block = 0; k_block < args_.k_blocks; ++k_block) {
        FullBarrier& full = barriers_.weights_full[at.slot];
        char* const to = ring + at.slot * layout.stage;
        const int group = args_.groups.of(k_block, 0);
        barriers_.weights_empty[at.slot].wait(at.phase ^ 1);
        full.arrive_and_expect_tx(bytes);
        copy(args_.codes, full, to + layout.codes, k_block * (layout.tile / 8), tile.channel_tile * Traits::kRowTiles);
        copy(args_.scales, full, to + layout.scales, channel, group * args_.planes);
        if (args_.has_zeros) copy(args_.zeros, full, to + layout.zeros, channel, group);
        at.next();
      }
    }
  }

  __device__ void tokens(char* ring) const {
    wait_for_predecessors();
    const int rank = static_cast<int>(blockIdx.x) % kSharing;
    RingPosition at(0, args_.token_stages);
#pragma unroll 1
    for (ManyWalk<Traits> tile(args_); tile.valid(); tile.next()) {
#pragma unroll 1
      for (int half = 0; half < args_.k_blocks * kHalves; ++half) {
        FullBarrier& full = barriers_.tokens_full[at.slot];
        barriers_.tokens_empty[at.slot].wait(at.phase ^ 1);
        full.arrive_and_expect_tx(Traits::kTokenBytes);
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(
            &args_.x, reinterpret_cast<uint64_t*>(&full), uint16_t{(1 << kSharing) - 1}, kNormal,
            ring + at.slot * Traits::kTokenBytes + rank * (Traits::kTokenBytes / kSharing), half * (kBlockK / kHalves),
            tile.token + rank * (Traits::kTokens / kSharing));
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
