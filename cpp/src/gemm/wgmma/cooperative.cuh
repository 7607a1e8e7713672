// The persistent form whose two consumer warpgroups multiply 64 rows each of the same tile. For tiles of 256 channels,
// whose operands are read least often, and for sums that are promoted, which need two sets of registers: while one
// warpgroup adds a block's sums to the others, the tensor cores work for its neighbour. Ring, producer, multicast and
// vectors are those of pingpong.cuh; where sums are promoted, one more warp reads the blocks' scales.
#pragma once

#include "gemm/wgmma/pingpong.cuh"

namespace octofuse::wgmma {

template <int kCols_, Arithmetic kArithmetic_, bool kGathered_ = false>
struct CooperativeTile : PingpongTile<2, kCols_, kArithmetic_, kGathered_> {
  using Base = PingpongTile<2, kCols_, kArithmetic_, kGathered_>;
  static_assert(!promotes(kArithmetic_) || kScaleBlock % kCols_ == 0, "channels must lie in one block");
  static constexpr Form kForm = Form::kCooperative;
  static constexpr int kRowBlocks = 1;  // of a warpgroup
  static constexpr int kSize = kCols_ / 2;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kOtherRegisters = 56;
  static constexpr int kFactors = Base::kVectors + 32;  // the warp that reads scales
  struct NoFactors {
    __device__ void init() {}
  };
  using Factors = std::conditional_t<promotes(kArithmetic_), FactorRing<Base::kRows, Base::kProducer>, NoFactors>;
  struct Shared : Base::Shared {
    Factors factors;
  };
  static constexpr int kFixedBytes = (static_cast<int>(sizeof(Shared)) + 1023) / 1024 * 1024;
  static constexpr int kStages = (227 * 1024 - kFixedBytes - Base::kStagingBytes) / Base::kStageBytes;
  static constexpr int kSharedBytes = kFixedBytes + kStages * Base::kStageBytes + Base::kStagingBytes;
};

// This warpgroup's product over all of K, from the ring's position `at`. Blocks come in pairs: while the first one's
// sums are added to the others, the tensor cores multiply the second. (A product in flight across the loop's end is
// more than ptxas follows: it would let all of them run one by one.)
template <class Tile>
class HalfProduct {
 public:
  __device__ HalfProduct(const KernelArgs& args, typename Tile::Shared& shared, const uint8_t* ring,
                         FactorReader<typename Tile::Factors, false, Tile::kCols>& reader, Ring<Tile::kStages> at,
                         int warpgroup, int thread)
      : args_(args),
        shared_(shared),
        reader_(reader),
        a_(low_descriptor(ring + warpgroup * 64 * kBlockK)),
        b_(low_descriptor(ring + Tile::kBytesA)),
        ahead_(at),
        at_(at),
        thread_(thread) {}

  __device__ void add_to(float (&sums)[Tile::kSize]) {
    float even[Tile::kSize], odd[Tile::kSize];
#pragma unroll
    for (float& sum : sums) sum = 0.0F;
    const int pairs = args_.k_blocks / 2;
    for (int pair = 0; pair < pairs; ++pair) {
      multiply(even);
      multiply(odd);
      add<1>(even, sums, false);
      add<0>(odd, sums, 2 * pair + 2 == args_.k_blocks);
    }
    if (args_.k_blocks % 2 != 0) {
      multiply(even);
      add<0>(even, sums, true);
    }
  }

 private:
  __device__ void multiply(float (&d)[Tile::kSize]) {
    shared_.full[ahead_.stage].wait(ahead_.phase);
    const uint32_t offset = static_cast<uint32_t>(ahead_.stage) * (Tile::kStageBytes / 16);
    fence_registers(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step) {
      Mma<typename Tile::Instruction, Tile::kCols>::run(descriptor_of(a_ + offset + 2 * step),
                                                        descriptor_of(b_ + offset + 2 * step), d, step > 0);
    }
    cute::warpgroup_commit_batch();
    ahead_.advance(1);
  }

  // Once all but the last kLater products are there; is_last: of its tile.
  template <int kLater>
  __device__ void add(float (&d)[Tile::kSize], float (&sums)[Tile::kSize], bool is_last) {
    reader_.next(is_last);
    cute::warpgroup_wait<kLater>();
    fence_registers(d);
    if (thread_ < args_.cluster) shared_.empty[at_.stage].arrive(static_cast<uint32_t>(thread_));
    reader_.factors.add(d, sums);
    at_.advance(1);
  }

  const KernelArgs& args_;
  typename Tile::Shared& shared_;
  FactorReader<typename Tile::Factors, false, Tile::kCols>& reader_;
  uint32_t a_, b_;
  Ring<Tile::kStages> ahead_, at_;  // of the block that is multiplied next, and of the one that is added
  int thread_;
};

// What a warpgroup does with its half of every tile.
template <class Tile, class Epilogue>
__device__ void consume_halves(const typename Tile::Args& args, typename Tile::Shared& shared, const uint8_t* ring,
                               uint8_t* staging, int warpgroup, int thread) {
  const ColumnCount columns = find_columns<Tile>(args);
  Ring<Tile::kStages> at;
  int slot = 0;
  uint32_t phase = 0;
  const auto finish = [&](const TileWalk& tile, auto& sums) {
    at.advance(args.k_blocks + columns.blocks);
    finish_pieces<Tile, Epilogue>(args, tile, shared.vectors[slot], staging, warpgroup, 64 * warpgroup, thread, sums);
    shared.vectors_empty[slot].arrive();
    phase ^= static_cast<uint32_t>(slot);
    slot ^= 1;
  };
  if constexpr (promotes(Tile::kArithmetic)) {
    FactorReader<typename Tile::Factors, false, Tile::kCols> reader(args, shared.factors, 64 * warpgroup, thread);
    for (TileWalk tile(args, 0, 1); tile.valid(); tile.next()) {
      float sums[Tile::kSize];
      HalfProduct<Tile>(args, shared, ring, reader, at, warpgroup, thread).add_to(sums);
      shared.vectors_full[slot].wait(phase);
      finish(tile, sums);
    }
  } else {
    int number = 0;
    for (TileWalk tile(args, 0, 1); tile.valid(); tile.next(), ++number) {
      typename Tile::Register sums[Tile::kSize];
      multiply_tile<Tile>(args, shared, ring, at, columns.blocks, warpgroup, thread, sums);
      shared.vectors_full[slot].wait(phase);
      if constexpr (Tile::kGathered) {
        multiply_outliers<Tile>(args, shared, ring, at, columns, tile, number, shared.vectors[slot], warpgroup, thread,
                                sums);
      }
      finish(tile, sums);
    }
  }
}

template <class Tile>
__device__ void write_factors(const KernelArgs& args, typename Tile::Shared& shared, int lane) {
  if (args.x_blocks.data == nullptr) return;
  wait_for_predecessors();
  FactorWriter<typename Tile::Factors, Tile::kRows> writer(args, shared.factors, lane);
  for (TileWalk tile(args, 0, 1); tile.valid(); tile.next()) {
    writer.write(tile.tile_m * Tile::kRows, tile.tile_n * Tile::kCols);
  }
}

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_cooperative(const __grid_constant__ typename Tile::Args args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  uint8_t* ring = memory + Tile::kFixedBytes;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == Tile::kProducer) {
    shared.factors.init();
    init_barriers<Tile>(args, shared, 1, 2 * static_cast<uint32_t>(args.cluster), 256);
  }
  meet(args);
  if (thread >= Tile::kProducer) {
    cutlass::arch::warpgroup_reg_dealloc<Tile::kOtherRegisters>();
    if (warp_of(thread) == Tile::kProducer / 32 && cute::elect_one_sync()) {
      args.cluster == 1 ? produce_tiles<Tile, false>(args, shared, ring)
                        : produce_tiles<Tile, true>(args, shared, ring);
    }
    if (thread / 32 == Tile::kVectors / 32) read_vectors<Tile>(args, shared, thread % 32);
    if constexpr (promotes(Tile::kArithmetic)) {
      if (thread / 32 == Tile::kFactors / 32) write_factors<Tile>(args, shared, thread % 32);
    }
    if constexpr (Tile::kGathered) {
      if (thread >= Tile::kTaker) take_columns<Tile>(args, shared, ring, thread - Tile::kTaker);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Tile::kConsumerRegisters>();
    const int warpgroup = warpgroup_of(thread);
    uint8_t* staging = ring + Tile::kStages * Tile::kStageBytes + warpgroup * 2 * Tile::Piece::kStagingBytes;
    consume_halves<Tile, Epilogue>(args, shared, ring, staging, warpgroup, thread % 128);
  }
  __syncwarp();
  meet(args);
}

}  // namespace octofuse::wgmma
