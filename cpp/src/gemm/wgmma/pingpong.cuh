// The persistent form of the wgmma kernel, for outputs of more tiles than the device has SMs: a block stays and works
// through many tiles, and two consumer warpgroups take turns ("pingpong"): while one multiplies its tile, the other
// finishes the tile before, so that the epilogue hides behind the tensor cores.
//
//   a producer thread  copies 128-byte-wide slices of both operands into a ring of stages (TMA), tile after tile; two
//                      blocks of a cluster work on tiles with the same channels and share the weights (multicast)
//   a vector warp      reads the scales and the bias of the tiles to come
//   two warpgroups     multiply every second tile each and finish it piece by piece (epilogue/fragment.cuh)
//   two warps more     take columns of weights out of the ring where x has outliers (LLM.int8(), columns.cuh)
//
// Rows are tokens, cols are output channels.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue/fragment.cuh"
#include "gemm/wgmma/kernel.cuh"
#include "gemm/wgmma/persistent.cuh"

namespace octofuse::wgmma {

template <int kRowBlocks_, int kCols_, Arithmetic kArithmetic_, bool kGathered_ = false>
struct PingpongTile {
  static constexpr Form kForm = Form::kPingpong;
  static constexpr Arithmetic kArithmetic = kArithmetic_;
  static constexpr bool kGathered = kGathered_;
  using Args = std::conditional_t<kGathered, OutlierKernelArgs, KernelArgs>;
  using Instruction = InstructionOf<kArithmetic_, false>;
  using Register = typename SumsOf<Instruction>::Register;
  using Sum = std::conditional_t<kGathered, float, typename SumsOf<Instruction>::Sum>;
  static constexpr int kRowBlocks = kRowBlocks_;  // of 64 rows
  static constexpr int kRows = 64 * kRowBlocks;
  static constexpr int kCols = kCols_;
  static constexpr int kChannels = kCols;
  static constexpr bool kSwap = false;
  static constexpr int kTurns = 2;  // consumer warpgroups
  static constexpr int kProducer = 128 * kTurns;
  static constexpr int kVectors = kProducer + 32;
  static constexpr int kTaker = kProducer + 64;
  static_assert(!kGathered || kTakers == 2);
  static constexpr int kThreads = kProducer + 128;  // a whole warpgroup, since registers move between warpgroups
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kOtherRegisters = 40;
  static constexpr int kBytesA = kRows * kBlockK;
  static constexpr int kStageBytes = (kRows + kCols) * kBlockK;
  static constexpr int kSize = kRowBlocks * kCols / 2;  // accumulators of a thread
  static constexpr int kPieceCols = piece_cols(kCols);
  static constexpr int kPieces = kCols / kPieceCols;  // of 64 rows
  using Piece = octofuse::Piece<kPieceCols>;
  struct NoColumns {};
  // With more columns than these, tiles of 128 x 128 would have a stage less.
  using Columns = std::conditional_t<kGathered, octofuse::wgmma::Columns<kCols, 80>, NoColumns>;
  using Vectors = TileVectors<kRows, kCols, !kGathered>;
  struct Shared {
    FullBarrier full[kMaxStages];
    EmptyBarrier empty[kMaxStages];
    EmptyBarrier turn_over[kTurns];  // all warps of one have seen their tile's operands: the other may begin
    EmptyBarrier vectors_full[kTurns];
    EmptyBarrier vectors_empty[kTurns];
    Vectors vectors[kTurns];
    Columns columns;
  };
  static constexpr int kFixedBytes = (static_cast<int>(sizeof(Shared)) + 1023) / 1024 * 1024;
  static constexpr int kStagingBytes = kTurns * 2 * Piece::kStagingBytes;
  static_assert(kStageBytes % 1024 == 0 && Piece::kStagingBytes % 1024 == 0, "the swizzles' units");
  static constexpr int kStages = (227 * 1024 - kFixedBytes - kStagingBytes) / kStageBytes;
  static_assert(kRows != 128 || kCols != 128 || kStages == 6);
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes + kStagingBytes;
};

template <class Tile>
__device__ void read_vectors(const typename Tile::Args& args, typename Tile::Shared& shared, int lane) {
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
// columns: blocks of columns with outliers that follow in the ring.
template <class Tile>
__device__ void multiply_tile(const KernelArgs& args, typename Tile::Shared& shared, const uint8_t* ring,
                              Ring<Tile::kStages> at, int columns, int warpgroup, int thread,
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
  if constexpr (Tile::kGathered && !kShared) {  // the other warpgroup may begin before they are multiplied
    static_assert(Tile::kStages > (Tile::Columns::kTaken + kOutlierBlock - 1) / kOutlierBlock);
    for (; columns > 0; --columns, at.next()) shared.full[at.stage].wait(at.phase);
  }
  // Each warp for itself: with K of one block another warp may still wait for this turn when the next one ends.
  if (!kShared && thread % 32 == 0) shared.turn_over[warpgroup].arrive();
  cute::warpgroup_wait<0>();
  release(last);
  fence_registers(d);
}

// The accumulators of the first piece, which makes the next one the first: registers have no addresses, and a branch
// for each piece would cost more than these moves.
template <int kSize, int kAll, class Register, class Sum, class Convert>
__device__ inline void take(Register (&d)[kAll], Sum (&acc)[kSize], Convert convert) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) acc[i] = convert(d[i]);
#pragma unroll
  for (int i = 0; i + kSize < kAll; ++i) d[i] = d[i + kSize];
}

// A warpgroup's part of a tile, from token `first` of it on.
template <class Tile, class Epilogue, class Vectors>
__device__ void finish_pieces(const typename Tile::Args& args, const TileWalk& tile, const Vectors& vectors,
                              uint8_t* staging, int warpgroup, int first, int thread,
                              typename Tile::Register (&d)[Tile::kSize]) {
  constexpr int kCount = Tile::kRowBlocks * Tile::kPieces;
  int outliers = 0;
  if constexpr (Tile::kGathered) outliers = *args.outliers.count;
  const auto sum_of = [&](auto value) {
    if constexpr (Tile::kGathered) return float_of(value, outliers);
    if constexpr (!Tile::kGathered) return static_cast<typename Tile::Sum>(value);
  };
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
      for (int i = 0; i < Tile::Piece::kSize; ++i) acc[i] = sum_of(d[p * Tile::Piece::kSize + i]);
    } else {
      take(d, acc, sum_of);
    }
    if (piece.m0 + piece.token >= args.output.m || piece.n0 + piece.channel >= args.output.n) continue;
    Epilogue::finish(piece, args.epilogue, args.output, vectors, acc);
    buffer ^= 1;
  }
  if (Epilogue::kCopied && thread == 0) cute::tma_store_wait<0>();
  __syncwarp();
  cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));  // the staging may change
}

// Behind multiply_tile(), from the same position of the ring: the columns with outliers of the number-th tile of this
// block. d: float afterwards if there are some, and x's scales of this warpgroup are in it and 1 in `vectors`.
template <class Tile>
__device__ void multiply_outliers(const OutlierKernelArgs& args, typename Tile::Shared& shared, const uint8_t* ring,
                                  Ring<Tile::kStages> at, const ColumnCount& count, const TileWalk& tile, int number,
                                  typename Tile::Vectors& vectors, int warpgroup, int thread,
                                  uint32_t (&d)[Tile::kSize]) {
  constexpr bool kShared = Tile::kForm == Form::kCooperative;
  if (count.all == 0) return;
  const int first = kShared ? 64 * warpgroup : 0;  // this warpgroup's first row
  const auto meet_warpgroup = [&] {
    __syncwarp();
    cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));
  };
  at.advance(args.k_blocks);
  scale_sums<false, Tile::kCols, Tile::kRowBlocks>(vectors.x_scale + first, thread, d);
  shared.columns.wait_full(number);
  for (int block = 0; block < count.blocks; ++block, at.next()) {
    shared.full[at.stage].wait(at.phase);
    multiply_block<Tile>(args.outliers.type, ring + at.stage * Tile::kStageBytes + first * kBlockK, shared.columns,
                         static_cast<uint32_t>(number * count.steps), block, count, 0, thread, d,
                         [&](uint32_t step) { shared.columns.release(step); });
    meet_warpgroup();  // all have read it, and their scales
    if (thread < args.cluster) shared.empty[at.stage].arrive(static_cast<uint32_t>(thread));
  }
  if (thread < 64 * Tile::kRowBlocks) vectors.x_scale[first + thread] = 1.0F;
  multiply_rest<false, Tile::kCols, Tile::kRowBlocks>(args, count.taken, count.all, tile.tile_m * Tile::kRows + first,
                                                      tile.tile_n * Tile::kCols, thread, d);
  meet_warpgroup();
}

// May be asked for once earlier kernels have finished.
template <class Tile>
__device__ ColumnCount find_columns(const typename Tile::Args& args) {
  if constexpr (!Tile::kGathered) return {};
  if constexpr (Tile::kGathered) {
    wait_for_predecessors();
    return ColumnCount(args, Tile::Columns::kTaken);
  }
}

// Takes columns of weights out of the ring, tile after tile.
template <class Tile>
__device__ void take_columns(const typename Tile::Args& args, typename Tile::Shared& shared, const uint8_t* ring,
                             int thread) {
  wait_for_predecessors();
  ColumnTaker<Tile> taker(args, shared, ring + Tile::kBytesA, thread);
  Ring<Tile::kStages> at;
  int number = 0;
  for (TileWalk tile(args, 0, 1); tile.valid(); tile.next()) taker.take(at, args.k_blocks, number++);
}

template <class Tile, class Epilogue>
__device__ void consume_tiles(const typename Tile::Args& args, typename Tile::Shared& shared, const uint8_t* ring,
                              uint8_t* staging, int turn, int thread) {
  const ColumnCount columns = find_columns<Tile>(args);
  Ring<Tile::kStages> at;
  at.advance(turn * (args.k_blocks + columns.blocks));
  uint32_t phase = 0;
  int number = turn;
  for (TileWalk tile(args, turn, Tile::kTurns); tile.valid(); tile.next(), number += Tile::kTurns) {
    // A barrier's phase tells two neighbouring uses of a stage apart, no more: so the other warpgroup, whose stages
    // come before these, has to have seen all of them. The first tile of all waits for nobody.
    shared.turn_over[1 - turn].wait(turn == 0 ? phase ^ 1 : phase);
    typename Tile::Register d[Tile::kSize];
    multiply_tile<Tile>(args, shared, ring, at, columns.blocks, turn, thread, d);
    shared.vectors_full[turn].wait(phase);
    phase ^= 1;
    if constexpr (Tile::kGathered) {
      multiply_outliers<Tile>(args, shared, ring, at, columns, tile, number, shared.vectors[turn], turn, thread, d);
    }
    at.advance(Tile::kTurns * (args.k_blocks + columns.blocks));
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
  if constexpr (Tile::kGathered) {
    shared.columns.init(Tile::kForm == Form::kPingpong ? 128 : 256);
    freed += static_cast<uint32_t>(args.cluster);
  }
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    shared.full[stage].init(filled);
    shared.empty[stage].init(freed);
  }
  for (int turn = 0; turn < Tile::kTurns; ++turn) {
    shared.turn_over[turn].init(4);
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
__global__ void __launch_bounds__(Tile::kThreads, 1) gemm_pingpong(const __grid_constant__ typename Tile::Args args) {
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
    if constexpr (Tile::kGathered) {
      if (thread >= Tile::kTaker) take_columns<Tile>(args, shared, ring, thread - Tile::kTaker);
    }
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
