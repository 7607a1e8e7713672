// The persistent form of the wgmma kernel, for outputs of more tiles than the device has SMs: a block stays and works
// through many tiles, and two consumer warpgroups take turns ("pingpong"): while one multiplies its tile, the other
// finishes the tile before, so that the epilogue hides behind the tensor cores.
//
//   a producer thread  copies 128-byte-wide slices of both operands into a ring of stages (TMA), tile after tile; two
//                      blocks of a cluster work on tiles with the same channels and share the weights (multicast)
//   a vector warp      reads the scales and the bias of the tiles to come
//   two warpgroups     multiply every second tile each and finish it piece by piece (epilogue/fragment.cuh)
//
// Rows are tokens, cols are output channels.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue/fragment.cuh"
#include "gemm/wgmma/kernel.cuh"

namespace octofuse::wgmma {

template <int kRowBlocks_, int kCols_, Arithmetic kArithmetic_>
struct PingpongTile {
  static constexpr Form kForm = Form::kPingpong;
  static constexpr Arithmetic kArithmetic = kArithmetic_;
  using Instruction = InstructionOf<kArithmetic_, false>;
  using Register = typename SumsOf<Instruction>::Register;
  using Sum = typename SumsOf<Instruction>::Sum;
  static constexpr int kRowBlocks = kRowBlocks_;  // of 64 rows
  static constexpr int kRows = 64 * kRowBlocks;
  static constexpr int kCols = kCols_;
  static constexpr int kTurns = 2;  // consumer warpgroups
  static constexpr int kProducer = 128 * kTurns;
  static constexpr int kVectors = kProducer + 32;
  static constexpr int kThreads = kProducer + 128;  // a whole warpgroup, since registers move between warpgroups
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kOtherRegisters = 40;
  static constexpr int kBytesA = kRows * kBlockK;
  static constexpr int kStageBytes = (kRows + kCols) * kBlockK;
  static constexpr int kSize = kRowBlocks * kCols / 2;  // accumulators of a thread
  static constexpr int kPieceCols = piece_cols(kCols);
  static constexpr int kPieces = kCols / kPieceCols;  // of 64 rows
  using Piece = octofuse::Piece<kPieceCols>;
  struct Shared {
    FullBarrier full[kMaxStages];
    EmptyBarrier empty[kMaxStages];
    EmptyBarrier turn_over[kTurns];  // a warpgroup has seen all operands of its tile: the other one may begin
    EmptyBarrier vectors_full[kTurns];
    EmptyBarrier vectors_empty[kTurns];
    TileVectors<kRows, kCols> vectors[kTurns];
  };
  static constexpr int kFixedBytes = (static_cast<int>(sizeof(Shared)) + 1023) / 1024 * 1024;
  static constexpr int kStagingBytes = kTurns * 2 * Piece::kStagingBytes;
  static_assert(kStageBytes % 1024 == 0 && Piece::kStagingBytes % 1024 == 0, "the swizzles' units");
  static constexpr int kStages = (227 * 1024 - kFixedBytes - kStagingBytes) / kStageBytes;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes + kStagingBytes;
};

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
};

// One thread, so its instructions count: a stage is multiplied in the time of some sixty. kClusters: two blocks of a
// cluster read half of the weights each for both.
template <class Tile, bool kClusters>
__device__ void produce_tiles(const KernelArgs& args, typename Tile::Shared& shared, uint8_t* ring) {
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
  }
}

template <class Tile>
__device__ void read_vectors(const KernelArgs& args, typename Tile::Shared& shared, int lane) {
  int turn = 0;
  uint32_t phase = 0;
  for (TileWalk tile(args, 0, 1); tile.valid(); tile.next()) {
    shared.vectors_empty[turn].wait(phase ^ 1);
    load_vectors<32>(args.epilogue, args.output, tile.tile_m * Tile::kRows, tile.tile_n * Tile::kCols,
                     args.constant_weight, lane, shared.vectors[turn]);
    shared.vectors_full[turn].arrive();
    __syncwarp();
    phase ^= static_cast<uint32_t>(turn);
    turn ^= 1;
  }
}

// One warpgroup's product, from the ring's position `at`: of a whole tile, or with Form::kCooperative of its own rows.
template <class Tile>
__device__ void multiply_tile(const KernelArgs& args, typename Tile::Shared& shared, const uint8_t* ring,
                              Ring<Tile::kStages> at, int warpgroup, int thread,
                              typename Tile::Register (&d)[Tile::kSize]) {
  using Fragment = typename Tile::Register[Tile::kCols / 2];
  // The stage is free in every block whose producer writes to it: one thread tells each of them.
  const auto release = [&](int stage) {
    if (thread < args.cluster) shared.empty[stage].arrive(static_cast<uint32_t>(thread));
  };
  constexpr bool kShared = Tile::kForm == Form::kCooperative;
  // Only the low words of descriptors change: with 64 bits of them a turn took ten instructions more.
  const uint32_t a0 = low_descriptor(ring + (kShared ? warpgroup * 64 * kBlockK : 0));
  const uint32_t b0 = low_descriptor(ring + Tile::kBytesA);
  int last = 0;
  for (int k = 0; k < args.k_blocks; ++k) {
    shared.full[at.stage].wait(at.phase);
    const uint32_t a = a0 + static_cast<uint32_t>(at.stage) * (Tile::kStageBytes / 16);
    const uint32_t b = b0 + static_cast<uint32_t>(at.stage) * (Tile::kStageBytes / 16);
    fence_registers(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step) {
#pragma unroll
      for (int r = 0; r < Tile::kRowBlocks; ++r) {
        Mma<typename Tile::Instruction, Tile::kCols>::run(
            descriptor_of(a + r * (64 * kBlockK / 16) + 2 * step), descriptor_of(b + 2 * step),
            reinterpret_cast<Fragment&>(d[r * (Tile::kCols / 2)]), k + step > 0);
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (k > 0) release(last);
    last = at.stage;
    at.next();
  }
  if (!kShared && thread == 0) shared.turn_over[warpgroup].arrive();
  cute::warpgroup_wait<0>();
  release(last);
  fence_registers(d);
}

// The accumulators of the first piece, which makes the next one the first: registers have no addresses, and a branch
// for each piece would cost more than these moves.
template <int kSize, int kAll, class Register, class Sum>
__device__ inline void take(Register (&d)[kAll], Sum (&acc)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) acc[i] = static_cast<Sum>(d[i]);
#pragma unroll
  for (int i = 0; i + kSize < kAll; ++i) d[i] = d[i + kSize];
}

// A warpgroup's part of a tile, from token `first` of it on.
template <class Tile, class Epilogue, class Vectors>
__device__ void finish_pieces(const KernelArgs& args, const TileWalk& tile, const Vectors& vectors, uint8_t* staging,
                              int warpgroup, int first, int thread, typename Tile::Register (&d)[Tile::kSize]) {
  constexpr int kCount = Tile::kRowBlocks * Tile::kPieces;
  int buffer = 0;
#pragma unroll(Epilogue::kUnrolled ? kCount : 1)
  for (int p = 0; p < kCount; ++p) {
    typename Tile::Piece piece;
    piece.m0 = tile.tile_m * Tile::kRows;
    piece.n0 = tile.tile_n * Tile::kCols;
    piece.token = first + p / Tile::kPieces * 64;
    piece.channel = p % Tile::kPieces * Tile::kPieceCols;
    piece.thread = thread;
    piece.barrier = static_cast<uint32_t>(warpgroup);
    piece.staging = staging + buffer * Tile::Piece::kStagingBytes;
    piece.out_map = &args.out_map;
    typename Tile::Sum acc[Tile::Piece::kSize];
    if constexpr (Epilogue::kUnrolled) {
#pragma unroll
      for (int i = 0; i < Tile::Piece::kSize; ++i)
        acc[i] = static_cast<typename Tile::Sum>(d[p * Tile::Piece::kSize + i]);
    } else {
      take(d, acc);
    }
    if (piece.m0 + piece.token >= args.output.m || piece.n0 + piece.channel >= args.output.n) continue;
    Epilogue::finish(piece, args.epilogue, args.output, vectors, acc);
    buffer ^= 1;
  }
  if (Epilogue::kCopied && thread == 0) cute::tma_store_wait<0>();
  __syncwarp();
  cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));  // the staging may change
}

template <class Tile, class Epilogue>
__device__ void consume_tiles(const KernelArgs& args, typename Tile::Shared& shared, const uint8_t* ring,
                              uint8_t* staging, int turn, int thread) {
  Ring<Tile::kStages> at;
  at.advance(turn * args.k_blocks);
  uint32_t phase = 0;
  for (TileWalk tile(args, turn, Tile::kTurns); tile.valid(); tile.next()) {
    typename Tile::Register d[Tile::kSize];
    // A barrier's phase tells two neighbouring uses of a stage apart, no more: so the other warpgroup, whose stages
    // come before these, has to have seen all of them. The first tile of all waits for nobody.
    shared.turn_over[1 - turn].wait(turn == 0 ? phase ^ 1 : phase);
    multiply_tile<Tile>(args, shared, ring, at, turn, thread, d);
    at.advance(Tile::kTurns * args.k_blocks);
    shared.vectors_full[turn].wait(phase);
    phase ^= 1;
    finish_pieces<Tile, Epilogue>(args, tile, shared.vectors[turn], staging, turn, 0, thread, d);
    shared.vectors_empty[turn].arrive();
  }
}

// filled: arrivals that fill a stage; freed, read: warpgroups' arrivals that free a stage, and threads' a tile's
// vectors.
template <class Tile>
__device__ void init_barriers(const KernelArgs& args, typename Tile::Shared& shared, uint32_t filled, uint32_t freed,
                              uint32_t read) {
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&args.w_map));
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&args.x_map));
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    shared.full[stage].init(filled);
    shared.empty[stage].init(freed);
  }
  for (int turn = 0; turn < Tile::kTurns; ++turn) {
    shared.turn_over[turn].init(1);
    shared.vectors_full[turn].init(32);
    shared.vectors_empty[turn].init(read);
  }
  cutlass::arch::fence_barrier_init();
}

// All threads of the block, or of the cluster.
__device__ inline void meet(const KernelArgs& args) {
  __syncwarp();
  if (args.cluster > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }
}

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 1) gemm_pingpong(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  uint8_t* ring = memory + Tile::kFixedBytes;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == Tile::kProducer) init_barriers<Tile>(args, shared, 1, static_cast<uint32_t>(args.cluster), 128);
  meet(args);
  if (thread >= Tile::kProducer) {
    cutlass::arch::warpgroup_reg_dealloc<Tile::kOtherRegisters>();
    if (warp_of(thread) == Tile::kProducer / 32 && cute::elect_one_sync()) {
      args.cluster == 1 ? produce_tiles<Tile, false>(args, shared, ring)
                        : produce_tiles<Tile, true>(args, shared, ring);
    }
    if (thread / 32 == Tile::kVectors / 32) read_vectors<Tile>(args, shared, thread % 32);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Tile::kConsumerRegisters>();
    const int turn = warpgroup_of(thread);
    uint8_t* staging = ring + Tile::kStages * Tile::kStageBytes + turn * 2 * Tile::Piece::kStagingBytes;
    consume_tiles<Tile, Epilogue>(args, shared, ring, staging, turn, thread % 128);
  }
  __syncwarp();
  meet(args);  // a block may still hear from the other: it must not end first
}

}  // namespace octofuse::wgmma
