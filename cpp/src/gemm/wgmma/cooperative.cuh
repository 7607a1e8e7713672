// The persistent form for sums that are promoted, which need two sets of registers: both consumer warpgroups multiply
// 64 rows each of the same tile, and while one adds a block's sums to the others, the tensor cores work for its
// neighbour. Ring, producer, multicast and vectors are those of pingpong.cuh; one more warp reads the blocks' scales.
#pragma once

#include "gemm/wgmma/pingpong.cuh"

namespace octofuse::wgmma {

template <int kCols_, Arithmetic kArithmetic_>
struct CooperativeTile : PingpongTile<2, kCols_, kArithmetic_> {
  using Base = PingpongTile<2, kCols_, kArithmetic_>;
  static_assert(promotes(kArithmetic_) && kScaleBlock % kCols_ == 0, "channels must lie in one block");
  static constexpr Form kForm = Form::kCooperative;
  static constexpr int kRowBlocks = 1;  // of a warpgroup
  static constexpr int kSize = kCols_ / 2;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kOtherRegisters = 56;
  static constexpr int kFactors = Base::kVectors + 32;
  static constexpr int kFactorBytes = Base::kRows * static_cast<int>(sizeof(float));
  static constexpr int kStages =
      (227 * 1024 - Base::kFixedBytes - Base::kStagingBytes) / (Base::kStageBytes + kFactorBytes);
  static constexpr int kStagingAt = kStages * (Base::kStageBytes + kFactorBytes);  // behind the ring's begin
  static constexpr int kSharedBytes = Base::kFixedBytes + kStagingAt + Base::kStagingBytes;
};

template <class Tile>
__device__ void feed_tiles_factors(const KernelArgs& args, typename Tile::Shared& shared, float* factors, int lane) {
  if (args.x_blocks.data == nullptr) return;
  wait_for_predecessors();
  Ring<Tile::kStages> at;
  for (TileWalk tile(args, 0, 1); tile.valid(); tile.next()) {
    FactorReader<Tile::kRows> reader(args, tile.tile_m * Tile::kRows, tile.tile_n * Tile::kCols, lane);
    reader.for_each([&](int, const auto& of_lane) {
      shared.empty[at.stage].wait(at.phase ^ 1);
      store_factors<Tile::kRows>(factors + at.stage * Tile::kRows, of_lane, lane);
      __syncwarp();
      if (lane == 0) shared.full[at.stage].arrive();
      at.advance(1);
    });
  }
}

// This warpgroup's product over all of K, from the ring's position `at`. Blocks come in pairs: while the first one's
// sums are added to the others, the tensor cores multiply the second. (A product in flight across the loop's end is
// more than ptxas follows: it would let all of them run one by one.)
template <class Tile>
class HalfProduct {
 public:
  __device__ HalfProduct(const KernelArgs& args, typename Tile::Shared& shared, const uint8_t* ring,
                         const float* factors, Ring<Tile::kStages> at, int warpgroup, int thread)
      : args_(args),
        shared_(shared),
        factors_(factors),
        a_(tile_descriptor(ring + warpgroup * 64 * kBlockK)),
        b_(tile_descriptor(ring + Tile::kBytesA)),
        ahead_(at),
        at_(at),
        row_(64 * warpgroup),
        thread_(thread) {}

  __device__ void add_to(float (&sums)[Tile::kSize]) {
    float even[Tile::kSize], odd[Tile::kSize];
#pragma unroll
    for (float& sum : sums) sum = 0.0F;
    const int pairs = args_.k_blocks / 2;
    for (int pair = 0; pair < pairs; ++pair) {
      multiply(even);
      multiply(odd);
      add<1>(even, sums);
      add<0>(odd, sums);
    }
    if (args_.k_blocks % 2 != 0) {
      multiply(even);
      add<0>(even, sums);
    }
  }

 private:
  __device__ void multiply(float (&d)[Tile::kSize]) {
    shared_.full[ahead_.stage].wait(ahead_.phase);
    const uint64_t offset = static_cast<uint64_t>(ahead_.stage) * (Tile::kStageBytes / 16);
    fence_registers(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step) {
      Mma<typename Tile::Instruction, Tile::kCols>::run(a_ + offset + 2 * step, b_ + offset + 2 * step, d, step > 0);
    }
    cute::warpgroup_commit_batch();
    ahead_.advance(1);
  }

  // Once all but the last kLater products are there.
  template <int kLater>
  __device__ void add(float (&d)[Tile::kSize], float (&sums)[Tile::kSize]) {
    if (args_.x_blocks.data != nullptr) of_block_.load(factors_ + at_.stage * Tile::kRows, row_, thread_);
    cute::warpgroup_wait<kLater>();
    fence_registers(d);
    release_factors(shared_.empty[at_.stage], thread_, args_.cluster);
    of_block_.add(d, sums);
    at_.advance(1);
  }

  const KernelArgs& args_;
  typename Tile::Shared& shared_;
  const float* factors_;
  uint64_t a_, b_;
  Ring<Tile::kStages> ahead_, at_;  // of the block that is multiplied next, and of the one that is added
  int row_, thread_;
  BlockFactors<false, Tile::kCols> of_block_;
};

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 1) gemm_cooperative(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  uint8_t* ring = memory + Tile::kFixedBytes;
  auto* factors = reinterpret_cast<float*>(ring + Tile::kStages * Tile::kStageBytes);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == Tile::kProducer) {
    const bool scaled = args.x_blocks.data != nullptr;
    init_barriers<Tile>(args, shared, scaled ? 2 : 1, 2 * kReaders * static_cast<uint32_t>(args.cluster), 256);
  }
  meet(args);
  if (thread >= Tile::kProducer) {
    cutlass::arch::warpgroup_reg_dealloc<Tile::kOtherRegisters>();
    if (thread == Tile::kProducer) produce_tiles<Tile>(args, shared, ring);
    if (thread / 32 == Tile::kVectors / 32) read_vectors<Tile>(args, shared, thread % 32);
    if (thread / 32 == Tile::kFactors / 32) feed_tiles_factors<Tile>(args, shared, factors, thread % 32);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Tile::kConsumerRegisters>();
    const int warpgroup = warpgroup_of(thread);
    uint8_t* staging = ring + Tile::kStagingAt + warpgroup * 2 * Tile::Piece::kStagingBytes;
    Ring<Tile::kStages> at;
    int slot = 0;
    uint32_t phase = 0;
    for (TileWalk tile(args, 0, 1); tile.valid(); tile.next()) {
      float sums[Tile::kSize];
      HalfProduct<Tile>(args, shared, ring, factors, at, warpgroup, thread % 128).add_to(sums);
      at.advance(args.k_blocks);
      shared.vectors_full[slot].wait(phase);
      finish_pieces<Tile, Epilogue>(args, tile, shared.vectors[slot], staging, warpgroup, 64 * warpgroup, thread % 128,
                                    sums);
      shared.vectors_empty[slot].arrive();
      phase ^= static_cast<uint32_t>(slot);
      slot ^= 1;
    }
  }
  __syncwarp();
  meet(args);
}

}  // namespace octofuse::wgmma
