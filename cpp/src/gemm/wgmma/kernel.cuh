// One 8-bit GEMM kernel for sm_90a, from one token to thousands: a block computes one tile of the output over one slice
// of K and ends.
//
//   consumer warpgroups multiply 64 rows each (wgmma, both operands from shared memory, sums in registers); of small
//                       tiles two of them the same rows, in turns
//   a producer thread   copies 128-byte-wide slices of both operands into a ring of stages (TMA)
//   a vector warp       reads the tile's scales and bias meanwhile
//   two warps more      take columns of weights out of the ring where x has outliers (LLM.int8(), columns.cuh)
//   then                partial sums are added, exactly: of warpgroups, and of a split K across the cluster; every
//                       block finishes its share of the tile (epilogue/tile.cuh); of float8, and with gathered
//                       outliers, K is in one piece
//
// Measured on an H200 and left out: multicast of operands within clusters of 2 and 4 (never more than 2 % faster, often
// slower), 256 x 128 tiles, and an epilogue unrolled over registers (fetching its code cost more than it saved).
//
// wgmma's 64-row side is called rows, its 8..256-wide side cols. Usually rows are tokens and cols output channels; for
// few tokens the operands are swapped, so that no tensor-core row is wasted and a block streams weights.
#pragma once

#include "gemm/wgmma/producer.cuh"

namespace octofuse::wgmma {

template <int kCount, class Register>
__device__ inline void fence_registers(Register (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(d[i]);
}

// A position in the ring, whose length the host knows: where it goes round, a multiple of the K slices.
struct Position {
  int stages;
  int stage = 0;
  uint32_t phase = 0;
  __device__ void next() {
    ++stage;
    wrap();
  }
  __device__ void wrap() {
    if (stage < stages) return;
    stage -= stages;
    phase ^= 1;
  }
};

// This warpgroup's product over its blocks of the block's slice of K: every kSlices-th one.
template <class Tile>
__device__ void multiply(const KernelArgs& args, const Place& place, typename Tile::Shared& shared, const uint8_t* ring,
                         int warpgroup, int thread, typename Tile::Register (&d)[Tile::kCols / 2]) {
  const int slice = Tile::kSlices == 1 ? 0 : warpgroup / Tile::kWarpgroups;
  if (Tile::kSlices > 1) warpgroup -= slice * Tile::kWarpgroups;
  if (place.k_count <= slice) {  // nothing to multiply: the first product would have set them
#pragma unroll
    for (int i = 0; i < Tile::kCols / 2; ++i) d[i] = 0;
  }
  const uint32_t a0 = low_descriptor(ring + warpgroup * 64 * kBlockK);
  const uint32_t b0 = low_descriptor(ring + Tile::kBytesA);
  Position at{args.stages, slice};
  if (Tile::kSlices > 1) at.wrap();  // K of one block
  int last = 0;
  for (int i = slice; i < place.k_count; i += Tile::kSlices) {
    shared.full[at.stage].wait(at.phase);
    const uint32_t offset = static_cast<uint32_t>(at.stage) * (Tile::kStageBytes / 16);
    fence_registers(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kBlockK / 32; ++step) {
      Mma<typename Tile::Instruction, Tile::kCols>::run(descriptor_of(a0 + offset + 2 * step),
                                                        descriptor_of(b0 + offset + 2 * step), d, i + step > slice);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();  // the product before this one is done with its stage
    if (i > slice && thread == 0) shared.empty[last].arrive();
    last = at.stage;
    at.stage += Tile::kSlices;
    at.wrap();
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
template <class Tile, class Register>
__device__ void park(typename Tile::Sum* parked, int warp, int lane, const Register (&d)[Tile::kCols / 2]) {
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

// Adds the other K slices' sums of this thread's share to the first one's, those of the other blocks of a split K too.
template <class Tile>
__device__ void add_slices(const KernelArgs& args, const Place& place, const typename Tile::Share& share,
                           int32_t* parked) {
  const auto add = [](int4& to, const int4& v) { to = make_int4(to.x + v.x, to.y + v.y, to.z + v.z, to.w + v.w); };
  for (int m = share.m; m < share.m_end; m += share.step) {
#pragma unroll
    for (int row = 0; row < Tile::kRowsOfToken; ++row) {
      int32_t* const own = parked + m * Tile::kTokenPitch + row * Tile::kPitch + share.n;
      int4* const sums = reinterpret_cast<int4*>(own);
      int4 low = sums[0];
      int4 high = sums[1];
#pragma unroll
      for (int slice = 1; slice < Tile::kSlices; ++slice) {
        const int4* const other = reinterpret_cast<const int4*>(own + slice * Tile::kSliceSums);
        add(low, other[0]);
        add(high, other[1]);
      }
#pragma unroll 1
      for (int i = 1; i < args.split; ++i) {
        const int k = place.rank_k + i < args.split ? place.rank_k + i : place.rank_k + i - args.split;
#pragma unroll
        for (int slice = 0; slice < Tile::kSlices; ++slice) {
          const uint32_t local = cute::cast_smem_ptr_to_uint(own + slice * Tile::kSliceSums);
          add(low, load_from_block(local, static_cast<uint32_t>(k)));
          add(high, load_from_block(local + 16, static_cast<uint32_t>(k)));
        }
      }
      sums[0] = low;
      sums[1] = high;
    }
  }
}

// What a consumer does with its part of the tile: multiplies it, and parks the sums in the ring's place.
template <class Tile>
__device__ void consume_tile(const typename Tile::Args& args, const Place& place, typename Tile::Shared& shared,
                             uint8_t* ring, int m0, int n0, int thread) {
  typename Tile::Register d[Tile::kCols / 2];
  // Nobody reads the ring any more behind the barrier; those that take columns told so before they were multiplied.
  const auto park_sums = [&](const auto& sums) {
    __syncwarp();
    cutlass::arch::NamedBarrier::sync(Tile::kConsumers, 0);
    auto* const parked = reinterpret_cast<typename Tile::Sum*>(ring) + thread / Tile::kSliceThreads * Tile::kSliceSums;
    park<Tile>(parked, thread % Tile::kSliceThreads / 32, thread % 32, sums);
  };
  if constexpr (Tile::kGathered) {
    wait_for_predecessors();
    TileOutliers<Tile> outliers(args, m0, n0, thread);
    multiply<Tile>(args, place, shared, ring, warpgroup_of(thread), thread % 128, d);
    outliers.multiply(place, shared, ring, d);
    float sums[Tile::kCols / 2];
#pragma unroll
    for (int i = 0; i < Tile::kCols / 2; ++i) sums[i] = float_of(d[i], outliers.count());
    park_sums(sums);
  } else {
    if constexpr (promotes(Tile::kArithmetic)) {
      multiply_promoted<Tile>(args, place, shared, ring, warpgroup_of(thread), thread % 128, d);
    } else {
      multiply<Tile>(args, place, shared, ring, warpgroup_of(thread), thread % 128, d);
    }
    park_sums(d);
  }
}

template <class Tile>
__device__ void take_columns(const OutlierKernelArgs& args, const Place& place, typename Tile::Shared& shared,
                             const uint8_t* ring, int m0, int thread) {
  wait_for_predecessors();
  float scale[(Tile::kTokens + 32 * kTakers - 1) / (32 * kTakers)];  // on their way beside the product
  const auto for_each_token = [&](auto f) {
#pragma unroll
    for (int i = 0; i * 32 * kTakers < Tile::kTokens; ++i) {
      const int token = thread + i * 32 * kTakers;
      if (token < Tile::kTokens) f(token, scale[i]);
    }
  };
  for_each_token(
      [&](int token, float& value) { value = scale_at(args.epilogue.x_scale, min(m0 + token, args.output.m - 1)); });
  ColumnTaker<Tile> taker(args, shared, ring + (Tile::kSwap ? 0 : Tile::kBytesA), thread);
  Position at{args.stages};
  for_each_token([&](int token, float& value) { shared.scales[token] = value; });
  taker.take(at, place.k_count, 0);
}

// What the vector warp reads for the epilogue beside the product.
template <class Tile>
struct VectorWarp {
  const typename Tile::Args& args;
  typename Tile::Shared& shared;
  int m0, n0, lane;
  PendingVectors<32, Tile::kTokens, Tile::kChannels> pending;
  float2 factors;

  __device__ void load() {
    pending.load(args.epilogue, args.output, m0, n0, args.constant_weight, lane);
    if constexpr (Tile::kDigits) factors = load_factors(args, m0, lane);
    if constexpr (promotes(Tile::kArithmetic)) {
      if (args.x_blocks.data != nullptr) {
        FactorWriter<typename Tile::Factors, Tile::kTokens>(args, shared.factors, lane).write(m0, n0);
      }
    }
  }
  __device__ void store() const {
    pending.store(args.epilogue, args.output, m0, n0, lane, shared.vectors);
    if constexpr (Tile::kGathered) {  // they are in the sums already
      if (*args.outliers.count == 0) return;
      for (int i = lane; i < Tile::kTokens; i += 32) shared.vectors.x_scale[i] = 1.0F;
    }
    if constexpr (Tile::kDigits) {
      if (lane < Tile::kTokens) shared.digits.of_token[lane] = factors;
    }
  }
};

// Barriers, and the first copies before the other warps have arrived: by the producer's warp and the vector warp.
template <class Tile>
__device__ void start(const KernelArgs& args, typename Tile::Shared& shared, Producer<Tile>& feed, int thread) {
  if (warp_of(thread) == Tile::kVectors / 32) {
    if (cute::elect_one_sync()) {
      // One lane: ptxas lets lanes come one by one where each initialises its own, 1 us for a ring of 16 stages.
#pragma unroll 1
      for (int i = 0; i < args.stages; ++i) shared.empty[i].init(Tile::kWarpgroups + (Tile::kGathered ? 1 : 0));
      cutlass::arch::fence_barrier_init();
    }
  } else if (warp_of(thread) == Tile::kProducer / 32) {
    if (cute::elect_one_sync()) {
      if constexpr (promotes(Tile::kArithmetic)) shared.factors.init();
      if constexpr (Tile::kGathered) shared.columns.init(1);  // of one tile: no slot is filled again
      feed.begin();
    }
  }
  __syncwarp();
}

// The sums of the whole K in a thread's share, of one row a token.
template <class Tile>
__device__ void complete(const typename Tile::Args& args, const Place& place, const typename Tile::Shared& shared,
                         const typename Tile::Share& share, typename Tile::Sum* parked) {
  if constexpr (std::is_same_v<typename Tile::Sum, int32_t>) {  // of others K is in one piece
    if (Tile::kSlices > 1 || args.split > 1) add_slices<Tile>(args, place, share, parked);
    if constexpr (Tile::kDigits) join_share<Tile>(shared.digits, share, parked);
  }
}

template <class Tile>
__device__ void finish(const typename Tile::Args& args, const typename Tile::Shared& shared,
                       const typename Tile::Share& share, const typename Tile::Sum* accs) {
  if constexpr (Tile::kGathered || Tile::kDigits) {
    finish_half<Tile::kTokenPitch>(args.epilogue, args.output, shared.vectors, share,
                                   reinterpret_cast<const float*>(accs));
  } else {
    finish_tile<Tile::kPitch>(args.epilogue, args.output, shared.vectors, share, accs);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    gemm_wgmma(const __grid_constant__ typename Tile::Args args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  uint8_t* ring = memory + Tile::kFixedBytes;
  const Place place(args);
  const int thread = static_cast<int>(threadIdx.x);
  const int row0 = (Tile::kSwap ? place.tile_c : place.tile_r) * Tile::kRowsOfX;
  const int m0 = row0 / Tile::kRowsOfToken;
  const int n0 = (Tile::kSwap ? place.tile_r : place.tile_c) * Tile::kChannels;
  const bool producer = warp_of(thread) == Tile::kProducer / 32;
  const bool takes = Tile::kGathered && thread >= Tile::kTaker;
  const bool rehearses = thread >= Tile::kVectors && !takes;
  const bool split = args.split > 1;

  Producer<Tile> feed(args, place, shared, ring, row0, n0);
  start<Tile>(args, shared, feed, thread);
  __syncthreads();

  using Sum = typename Tile::Sum;
  auto* parked = reinterpret_cast<Sum*>(ring);
  const Sum* accs = parked;
  typename Tile::Share share(args.output, m0, n0, place.rank_k, args.split, thread);
  VectorWarp<Tile> vectors{args, shared, m0, n0, thread - Tile::kVectors};
  if (rehearses) {
    vectors.load();
    share.rehearse();
    accs = reinterpret_cast<const Sum*>(&shared.vectors);  // whatever lies there: nothing comes of it
  } else if (producer) {
    if (cute::elect_one_sync()) feed.go_on();
    share.m_end = 0;
  } else if (takes) {
    if constexpr (Tile::kGathered) take_columns<Tile>(args, place, shared, ring, m0, thread - Tile::kTaker);
    share.m_end = 0;
  } else {
    consume_tile<Tile>(args, place, shared, ring, m0, n0, thread);
  }
  __syncwarp();
  // The barrier of pass 1: the vectors have come and the accumulators are in place, with a split K in all blocks of the
  // cluster, which have to outlive each other's reads.
  for (int pass = rehearses ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1) {
      if (rehearses) vectors.store();
      __syncwarp();
      if (split) {
        cute::cluster_sync();
      } else {
        __syncthreads();
      }
      if (rehearses) break;
      complete<Tile>(args, place, shared, share, parked);
    }
    finish<Tile>(args, shared, share, accs);
    __syncwarp();
  }
  if (split) cute::cluster_sync();
}

}  // namespace octofuse::wgmma
