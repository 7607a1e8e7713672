// What blocks share that work through many tiles: their order, the ring, and the thread that feeds it.
#pragma once

#include "gemm/wgmma/outliers.cuh"

namespace octofuse::wgmma {

// The tiles of one block in their order, or every second of them. Tiles are grouped in bands of so many tiles of tokens
// (band_of in launch.cpp), so that blocks that run side by side read few different operands.
struct TileWalk {
  int index, step, count;        // of clusters' tiles
  int rank, blocks;              // in the cluster
  int tiles_n, rows, band_rows;  // rows: of clusters' tiles
  int tile_m = 0, tile_n = 0;

  __device__ TileWalk(const KernelArgs& args, int first, int every) : blocks(args.cluster), tiles_n(args.tiles_n) {
    const int clusters = static_cast<int>(gridDim.x) / blocks;
    rank = static_cast<int>(blockIdx.x) % blocks;
    rows = (args.tiles_m + blocks - 1) / blocks;
    band_rows = args.band / blocks;
    index = static_cast<int>(blockIdx.x) / blocks + first * clusters;
    step = every * clusters;
    count = rows * tiles_n;
    find();
  }
  __device__ bool valid() const { return index < count; }
  __device__ void next() {
    index += step;
    find();
  }

 private:
  __device__ void find() {
    const int band = index / (band_rows * tiles_n);
    const int height = min(band_rows, rows - band * band_rows);
    const int rest = index - band * band_rows * tiles_n;
    if (height <= 0) return;  // behind the last tile
    tile_n = rest / height;
    tile_m = (band * band_rows + rest - tile_n * height) * blocks + rank;
  }
};

// A position in the ring.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ void advance(int steps) {
    const int next = stage + steps;
    phase ^= static_cast<uint32_t>(next / kStages) & 1;
    stage = next % kStages;
  }
};

// What a block reads of an operand for a tile: as in kernel.cuh's Producer the rows that exist and no more, which in a
// cluster may be none.
struct ReadRows {
  const CUtensorMap* map;
  int first, count;

  __device__ ReadRows(const CUtensorMap& whole, const CUtensorMap& rest, int first, int rows, int end)
      : first(first), count(max(0, min(rows, end - first))) {
    map = count < rows ? &rest : &whole;
  }
};

// kRead: of the tile's channels, by this block, from `first_read` on.
template <class Tile, int kRead>
struct TileReads {
  ReadRows tokens, weights;
  uint32_t bytes;  // that arrive in a stage, also those that the other block of a cluster reads

  __device__ TileReads(const KernelArgs& args, const TileWalk& tile, int first_read)
      : tokens(args.x_map, args.x_rest_map, tile.tile_m * Tile::kRows, Tile::kRows, args.output.m),
        weights(args.w_map, args.w_rest_map, tile.tile_n * Tile::kCols + first_read, kRead, args.output.n) {
    const int channels = min(Tile::kCols, args.output.n - tile.tile_n * Tile::kCols);
    bytes = static_cast<uint32_t>((tokens.count + channels) * kBlockK);
  }

  // The same rows of the columns of x that are gathered.
  __device__ TileReads of_columns(const OutlierKernelArgs& args) const {
    TileReads columns = *this;
    columns.tokens.map = tokens.map == &args.x_map ? &args.x_columns_map : &args.x_columns_rest_map;
    columns.bytes = static_cast<uint32_t>(tokens.count * kBlockK);
    return columns;
  }
};

// One thread, so its instructions count: a stage is multiplied in the time of some sixty. kClusters: two blocks of a
// cluster read half of the weights each for both.
template <class Tile, bool kClusters>
__device__ void produce_tiles(const typename Tile::Args& args, typename Tile::Shared& shared, uint8_t* ring) {
  constexpr uint64_t kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kRead = kClusters ? Tile::kCols / 2 : Tile::kCols;  // of the tile's channels, by this block
  const int first_read = kClusters ? static_cast<int>(blockIdx.x) % 2 * kRead : 0;
  uint8_t* weights = ring + Tile::kBytesA + first_read * kBlockK;
  using Reads = TileReads<Tile, kRead>;
  const auto load_weights = [&](const Reads& reads, int k, int stage) {
    auto* barrier = reinterpret_cast<uint64_t*>(&shared.full[stage]);
    uint8_t* to = weights + stage * Tile::kStageBytes;
    shared.full[stage].arrive_and_expect_tx(reads.bytes);
    if constexpr (kClusters) {
      if (reads.weights.count == 0) return;
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(reads.weights.map, barrier, uint16_t{3}, kNormal, to, k,
                                             reads.weights.first);
    } else {
      cute::SM90_TMA_LOAD_2D::copy(reads.weights.map, barrier, kNormal, to, k, reads.weights.first);
    }
  };
  const auto load_tokens = [&](const Reads& reads, int k, int stage) {
    if (kClusters && reads.tokens.count == 0) return;
    cute::SM90_TMA_LOAD_2D::copy(reads.tokens.map, reinterpret_cast<uint64_t*>(&shared.full[stage]), kNormal,
                                 ring + stage * Tile::kStageBytes, k, reads.tokens.first);
  };

  TileWalk tile(args, 0, 1);
  const int k_end = args.k_blocks * kBlockK;
  const int early = args.constant_weight && tile.valid() ? min(Tile::kStages, args.k_blocks) : 0;
  const Reads first(args, tile, first_read);
  for (int i = 0; i < early; ++i) load_weights(first, i * kBlockK, i);
  wait_for_predecessors();
  launch_dependents();
  Ring<Tile::kStages> at;
  for (int loaded = early * kBlockK; tile.valid(); tile.next(), loaded = 0) {
    const Reads reads(args, tile, first_read);
#pragma unroll 1
    for (int k = 0; k < k_end; k += kBlockK) {
      if (k >= loaded) {
        shared.empty[at.stage].wait(at.phase ^ 1);
        load_weights(reads, k, at.stage);
      }
      load_tokens(reads, k, at.stage);
      at.next();
    }
    if constexpr (Tile::kGathered) {
      const Reads columns = reads.of_columns(args);
      const int end = ColumnCount(args, Tile::Columns::kTaken).blocks * kBlockK;
#pragma unroll 1
      for (int k = 0; k < end; k += kBlockK) {
        shared.empty[at.stage].wait(at.phase ^ 1);
        shared.full[at.stage].arrive_and_expect_tx(columns.bytes);
        load_tokens(columns, k, at.stage);
        at.next();
      }
    }
  }
}

}  // namespace octofuse::wgmma
