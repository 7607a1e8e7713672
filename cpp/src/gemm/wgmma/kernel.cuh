// One 8-bit GEMM kernel for sm_90a, from one token to thousands: a block computes one tile of the output over one slice
// of K and ends.
//
//   consumer warpgroups multiply 64 rows each (wgmma, both operands from shared memory, sums in registers)
//   a producer thread   copies 128-byte-wide slices of both operands into a ring of stages (TMA)
//   a vector warp       reads the tile's scales and bias meanwhile
//   then                partial sums of a split K are added across the cluster, exactly, and every block finishes
//                       its share of the tile (epilogue/tile.cuh); of float8, K is never split
//
// Measured on an H200 and left out: multicast of operands within clusters of 2 and 4 (never more than 2 % faster, often
// slower), 256 x 128 tiles, and an epilogue unrolled over registers (fetching its code cost more than it saved).
//
// wgmma's 64-row side is called rows, its 8..256-wide side cols. Usually rows are tokens and cols output channels; for
// few tokens the operands are swapped, so that no tensor-core row is wasted and a block streams weights.
#pragma once

#include "device/wgmma.cuh"
#include "epilogue/tile.cuh"
#include "gemm/wgmma/launch.h"
#include "gemm/wgmma/promoted.cuh"

namespace octofuse::wgmma {

constexpr int kBlockK = 128;    // bytes of K a stage: one row of TMA's widest swizzle
constexpr int kMaxStages = 32;  // one lane of a warp prepares each

template <Arithmetic kArithmetic, bool kSwap>
using InstructionOf = std::conditional_t<kArithmetic == Arithmetic::kInt8, S32S8S8,
                                         std::conditional_t<kArithmetic != Arithmetic::kE5M2, F32E4M3E4M3,
                                                            std::conditional_t<kSwap, F32E4M3E5M2, F32E5M2E4M3>>>;

template <int kWarpgroups_, int kCols_, bool kSwap_, Arithmetic kArithmetic_>
struct Tile {
  static constexpr Arithmetic kArithmetic = kArithmetic_;
  using Instruction = InstructionOf<kArithmetic, kSwap_>;
  using Register = typename SumsOf<Instruction>::Register;
  using Sum = typename SumsOf<Instruction>::Sum;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kCols = kCols_;
  static constexpr bool kSwap = kSwap_;  // rows are output channels, cols are tokens
  static constexpr int kTokens = kSwap ? kCols : kRows;
  static constexpr int kChannels = kSwap ? kRows : kCols;
  static constexpr int kConsumers = 128 * kWarpgroups;
  static constexpr int kProducer = kConsumers;      // its first thread
  static constexpr int kVectors = kConsumers + 32;  // the vector warp's first thread
  static constexpr int kThreads = kConsumers + 64;
  static constexpr int kBytesA = kRows * kBlockK;
  static constexpr int kStageBytes = (kRows + kCols) * kBlockK;
  static_assert(!promotes(kArithmetic) || kScaleBlock % kChannels == 0, "channels must lie in one block");
  struct NoFactors {};
  using Factors = std::conditional_t<promotes(kArithmetic), FactorRing<kTokens, kConsumers>, NoFactors>;
  struct Shared {
    FullBarrier full[kMaxStages];
    EmptyBarrier empty[kMaxStages];
    Factors factors;
    TileVectors<kTokens, kChannels> vectors;
  };
  static constexpr int kFixedBytes = (static_cast<int>(sizeof(Shared)) + 1023) / 1024 * 1024;
  // At the end the accumulators lie in the ring's place, [tokens][channels]. The pitch (in words) spreads a fragment's
  // rows over all banks.
  static constexpr int kPitch = kSwap ? kChannels + 4 : kChannels + (40 - kChannels % 32) % 32;
  static constexpr int kEpilogueBytes = kTokens * kPitch * static_cast<int>(sizeof(Sum));
  using Share = TileShare<kTokens, kChannels, kConsumers>;
};

// Where a block stands: its tile and its slice of K.
struct Place {
  int tile_r, tile_c, rank_k;
  int k_begin, k_count;  // in blocks of kBlockK

  __device__ explicit Place(const KernelArgs& args) {
    tile_c = static_cast<int>(blockIdx.x);
    tile_r = static_cast<int>(blockIdx.y);
    rank_k = static_cast<int>(blockIdx.z);  // a cluster spans the grid's z, so this is the rank in it too
    k_begin = rank_k * args.k_share;
    k_count = max(0, min(args.k_share, args.k_blocks - k_begin));
  }
};

// One thread feeds the ring. The tile that reaches beyond the last token reads the tokens that exist and no more: rows
// that the copy engine has to fill with zeros cost it more than rows that it reads. What lies in the ring below them
// gives accumulators that nobody stores.
template <class Tile>
struct Producer {
  static constexpr int kTokenOffset = Tile::kSwap ? Tile::kBytesA : 0;
  static constexpr int kWeightOffset = Tile::kSwap ? 0 : Tile::kBytesA;
  const KernelArgs& args;
  const Place& place;
  typename Tile::Shared& shared;
  uint8_t* ring;
  const CUtensorMap& x_map;
  int m0, n0;
  uint32_t bytes;  // of a stage

  __device__ Producer(const KernelArgs& args, const Place& place, typename Tile::Shared& shared, uint8_t* ring, int m0,
                      int n0)
      : args(args),
        place(place),
        shared(shared),
        ring(ring),
        x_map(args.output.m - m0 < Tile::kTokens ? args.x_rest_map : args.x_map),
        m0(m0),
        n0(n0),
        bytes(static_cast<uint32_t>(Tile::kChannels + min(Tile::kTokens, args.output.m - m0)) * kBlockK) {}

  __device__ void load(const CUtensorMap& map, int i, int stage, int offset, int row) {
    constexpr uint64_t kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&shared.full[stage]), kNormal,
                                 ring + stage * Tile::kStageBytes + offset, (place.k_begin + i) * kBlockK, row);
  }
  __device__ void load_weights(int i, int stage) {
    shared.full[stage].arrive_and_expect_tx(bytes);
    load(args.w_map, i, stage, kWeightOffset, n0);
  }
  __device__ void load_tokens(int i, int stage) { load(x_map, i, stage, kTokenOffset, m0); }

  // All stages once, as soon as their barriers are there.
  __device__ void fill() {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&args.w_map));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&x_map));
    const int first = min(args.stages, place.k_count);
    if (args.constant_weight) {
      for (int i = 0; i < first; ++i) load_weights(i, i);
    }
    wait_for_predecessors();
    for (int i = 0; i < first; ++i) {
      if (!args.constant_weight) load_weights(i, i);
      load_tokens(i, i);
    }
  }

  // The rest, as stages come free.
  __device__ void refill() {
    launch_dependents();
    uint32_t phase = 0;
    for (int i = args.stages, stage = 0; i < place.k_count; ++i) {
      shared.empty[stage].wait(phase);
      load_weights(i, stage);
      load_tokens(i, stage);
      if (++stage == args.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

template <int kCount, class Register>
__device__ inline void fence_registers(Register (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(d[i]);
}

// This warpgroup's product over the block's slice of K.
template <class Tile>
__device__ void multiply(const KernelArgs& args, const Place& place, typename Tile::Shared& shared, const uint8_t* ring,
                         int warpgroup, int thread, typename Tile::Register (&d)[Tile::kCols / 2]) {
  if (place.k_count == 0) {  // a split finer than K: the first product would have set them
#pragma unroll
    for (int i = 0; i < Tile::kCols / 2; ++i) d[i] = 0;
  }
  const uint32_t a0 = low_descriptor(ring + warpgroup * 64 * kBlockK);
  const uint32_t b0 = low_descriptor(ring + Tile::kBytesA);
  uint32_t phase = 0;
  int stage = 0;
  int last = 0;
  for (int i = 0; i < place.k_count; ++i) {
    shared.full[stage].wait(phase);
    const uint32_t offset = static_cast<uint32_t>(stage) * (Tile::kStageBytes / 16);
    fence_registers(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step) {
      Mma<typename Tile::Instruction, Tile::kCols>::run(descriptor_of(a0 + offset + 2 * step),
                                                        descriptor_of(b0 + offset + 2 * step), d, i + step > 0);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();  // the product before this one is done with its stage
    if (i > 0 && thread == 0) shared.empty[last].arrive();
    last = stage;
    if (++stage == args.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  cute::warpgroup_wait<0>();
  fence_registers(d);
}

// The same in blocks of 128 columns, each times its factor and added in fp32.
template <class Tile>
__device__ void multiply_promoted(const KernelArgs& args, const Place& place, typename Tile::Shared& shared,
                                  const uint8_t* ring, int warpgroup, int thread, float (&sums)[Tile::kCols / 2]) {
  FactorReader<typename Tile::Factors, Tile::kSwap, Tile::kCols> reader(args, shared.factors, 64 * warpgroup, thread);
#pragma unroll
  for (float& sum : sums) sum = 0.0F;
  const uint32_t a0 = low_descriptor(ring + warpgroup * 64 * kBlockK);
  const uint32_t b0 = low_descriptor(ring + Tile::kBytesA);
  uint32_t phase = 0;
  int stage = 0;
  for (int i = 0; i < place.k_count; ++i) {
    shared.full[stage].wait(phase);
    const uint32_t offset = static_cast<uint32_t>(stage) * (Tile::kStageBytes / 16);
    float d[Tile::kCols / 2];
    fence_registers(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step) {
      Mma<typename Tile::Instruction, Tile::kCols>::run(descriptor_of(a0 + offset + 2 * step),
                                                        descriptor_of(b0 + offset + 2 * step), d, step > 0);
    }
    cute::warpgroup_commit_batch();
    reader.next(i == place.k_count - 1);
    cute::warpgroup_wait<0>();
    fence_registers(d);
    if (thread == 0) shared.empty[stage].arrive();
    reader.factors.add(d, sums);
    if (++stage == args.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// Fragments to [tokens][channels] in shared memory.
template <class Tile>
__device__ void park(typename Tile::Sum* parked, int warp, int lane,
                     const typename Tile::Register (&d)[Tile::kCols / 2]) {
  using Sum = typename Tile::Sum;
  const int row = 16 * warp + lane / 4;
  const int col = lane % 4 * 2;
  if constexpr (Tile::kSwap) {
    Sum* first = parked + col * Tile::kPitch + row;
#pragma unroll
    for (int i = 0; i < Tile::kCols / 2; ++i) {
      first[(i / 4 * 8 + i % 2) * Tile::kPitch + i / 2 % 2 * 8] = static_cast<Sum>(d[i]);
    }
  } else {
    struct alignas(8) Pair {
      Sum x, y;
    };
    Sum* first = parked + row * Tile::kPitch + col;
#pragma unroll
    for (int i = 0; i < Tile::kCols / 2; i += 2) {
      *reinterpret_cast<Pair*>(first + i / 2 % 2 * 8 * Tile::kPitch + i / 4 * 8) = {static_cast<Sum>(d[i]),
                                                                                    static_cast<Sum>(d[i + 1])};
    }
  }
}

// Adds the partial sums that the other blocks of a split K hold to this thread's share, in place.
template <class Tile>
__device__ void add_other_blocks(const KernelArgs& args, const Place& place, const typename Tile::Share& share,
                                 int32_t* parked) {
  for (int m = share.m; m < share.m_end; m += share.step) {
    auto* own = reinterpret_cast<int4*>(parked + m * Tile::kPitch + share.n);
    int4 low = own[0];
    int4 high = own[1];
#pragma unroll 1
    for (int i = 1; i < args.split; ++i) {
      const int k = place.rank_k + i < args.split ? place.rank_k + i : place.rank_k + i - args.split;
      const uint32_t local = cute::cast_smem_ptr_to_uint(own);
      const int4 a = load_from_block(local, static_cast<uint32_t>(k));
      const int4 b = load_from_block(local + 16, static_cast<uint32_t>(k));
      low = make_int4(low.x + a.x, low.y + a.y, low.z + a.z, low.w + a.w);
      high = make_int4(high.x + b.x, high.y + b.y, high.z + b.z, high.w + b.w);
    }
    own[0] = low;
    own[1] = high;
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) gemm_wgmma(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  uint8_t* ring = memory + Tile::kFixedBytes;
  const Place place(args);
  const int thread = static_cast<int>(threadIdx.x);
  const int m0 = (Tile::kSwap ? place.tile_c : place.tile_r) * Tile::kTokens;
  const int n0 = (Tile::kSwap ? place.tile_r : place.tile_c) * Tile::kChannels;
  const bool producer = warp_of(thread) == Tile::kProducer / 32;
  const bool rehearses = thread >= Tile::kVectors;
  const bool split = args.split > 1;

  Producer<Tile> feed(args, place, shared, ring, m0, n0);
  if (producer) {
    const int lane = thread - Tile::kProducer;
    if constexpr (promotes(Tile::kArithmetic)) {
      if (lane == 0) shared.factors.init();
    }
    if (lane < args.stages) {
      shared.full[lane].init(1);
      shared.empty[lane].init(Tile::kWarpgroups);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
    if (cute::elect_one_sync()) feed.fill();  // before the other warps have arrived
    __syncwarp();
  }
  __syncthreads();

  using Sum = typename Tile::Sum;
  auto* parked = reinterpret_cast<Sum*>(ring);
  const Sum* accs = parked;
  typename Tile::Share share(args.output, m0, n0, place.rank_k, args.split, thread);
  PendingVectors<32, Tile::kTokens, Tile::kChannels> pending;
  if (rehearses) {
    pending.load(args.epilogue, args.output, m0, n0, args.constant_weight, thread - Tile::kVectors);
    if constexpr (promotes(Tile::kArithmetic)) {
      if (args.x_blocks.data != nullptr) {
        FactorWriter<typename Tile::Factors, Tile::kTokens>(args, shared.factors, thread - Tile::kVectors)
            .write(m0, n0);
      }
    }
    share.rehearse();
    accs = reinterpret_cast<const Sum*>(&shared.vectors);  // whatever lies there: nothing comes of it
  } else if (producer) {
    if (cute::elect_one_sync()) feed.refill();
    share.m_end = 0;
  } else {
    typename Tile::Register d[Tile::kCols / 2];
    if constexpr (promotes(Tile::kArithmetic)) {
      multiply_promoted<Tile>(args, place, shared, ring, warpgroup_of(thread), thread % 128, d);
    } else {
      multiply<Tile>(args, place, shared, ring, warpgroup_of(thread), thread % 128, d);
    }
    __syncwarp();
    // Nobody reads the ring any more.
    cutlass::arch::NamedBarrier::sync(Tile::kConsumers, 0);
    park<Tile>(parked, thread / 32, thread % 32, d);
  }
  __syncwarp();
  // The barrier of pass 1: the vectors have come and the accumulators are in place, with a split K in all blocks of the
  // cluster, which have to outlive each other's reads.
  for (int pass = rehearses ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1) {
      if (rehearses) pending.store(args.epilogue, args.output, m0, n0, thread - Tile::kVectors, shared.vectors);
      __syncwarp();
      if (split) {
        cute::cluster_sync();
        if constexpr (std::is_same_v<Sum, int32_t>) {
          if (!rehearses) add_other_blocks<Tile>(args, place, share, parked);
        }
      } else {
        __syncthreads();
      }
      if (rehearses) break;
    }
    finish_tile<Tile::kPitch>(args.epilogue, args.output, shared.vectors, share, accs);
    __syncwarp();
  }
  if (split) cute::cluster_sync();
}

}  // namespace octofuse::wgmma
