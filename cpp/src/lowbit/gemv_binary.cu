// One token against codes of 1 to 3 bits, or up to 4 planes, at the speed of their bytes, in products of single bits:
// mma.sync m16n8k128 counts the columns where a bit of a code and a bit of the token's integer are both set. It reads
// the codes as they lie in memory, with nothing to unpack.
//
// A product's 16 rows are a plane of the codes of 16 channels; two products have the token's 16 bits as their 8
// columns. A quad's lane t then holds the counts of bits 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t. These times their powers of
// two, summed over planes of uniform codes and over the quad, are the exact integers that codes.cuh speaks of, so the
// result has the bits of gemv_int8.cu. In the quad's sum each lane keeps one channel of the 32, or of 16, and what
// follows is done once for a channel. More tokens would take as many times the products; those of bytes take four
// tokens at once.
#include "device/mma.cuh"
#include "lowbit/gemv.cuh"
#include "lowbit/kernels.h"

namespace octofuse::lowbit {
namespace {

constexpr int kPlane = 256;      // bytes of a plane of a tile
constexpr int kRing = 84 << 10;  // bytes of all warps' stages: leaves room for another block on the SM

// A kernel at compile time. kCount: bits of uniform codes, or planes.
// kNorm: it normalises its token itself.
template <LowbitFormat kFormat, int kCount, int kGroups_, int kRowTiles_, bool kNorm_>
struct Traits {
  static constexpr bool kPlanes = kFormat == LowbitFormat::kPlanes;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr bool kNorm = kNorm_;
  static constexpr int kShares = 2;
  static constexpr int kNormShares = 1;
  static constexpr int kChannels = kRowTiles * kTileRows;
  using Stage = lowbit::Stage<Codes<kFormat, kCount>, kGroups, kRowTiles>;
  static constexpr int kScales = kPlanes ? kCount : 1;                     // of a channel and segment
  static constexpr int kTogether = kPlanes ? 1 : kCount;                   // planes that share one
  static constexpr int kBlocks = k_blocks_of_binary_stage(Stage::kBytes);  // k-blocks of a stage: two share the loop
  static constexpr int kBytes = kBlocks * Stage::kBytes;                   // of a stage
  static constexpr int kMany = kRing / (kSlices * kBytes);
  static constexpr int kDeep = kMany < kShallowStages ? kShallowStages : kMany > 8 ? 8 : kMany;
  static constexpr int kTableBytes = 0;
  static constexpr bool kShallowForOneStage = false;  // its deep ring is small
};

// ---- products ----

// The lane's words of a plane: of channel lane / 4, of channel lane / 4 + 8.
__device__ inline uint2 plane_words(const char* tile, int lane) {
  return *reinterpret_cast<const uint2*>(tile + lane * 8);
}

// The even bits of one word and the odd bits of the other, in one instruction where the compiler would take two.
__device__ inline uint32_t even_or_odd(uint32_t even, uint32_t odd) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, 0x55555555, 0xE4;" : "=r"(d) : "r"(even), "r"(odd));
  return d;
}

// This lane's words of a tile of uniform codes as planes, the lowest bit first.
template <int kBits>
__device__ inline void planes_of(const char* tile, int lane, uint2 (&planes)[kBits]) {
  if constexpr (kBits == 1) {
    planes[0] = plane_words(tile, lane);
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(tile + lane * 16);
    planes[0] = make_uint2(even_or_odd(v.x, v.y << 1), even_or_odd(v.z, v.w << 1));
    planes[1] = make_uint2(even_or_odd(v.x >> 1, v.y), even_or_odd(v.z >> 1, v.w));
    if constexpr (kBits == 3) planes[2] = plane_words(tile + 2 * kPlane, lane);
  }
}

__device__ inline void count_bits(const uint2& a, uint32_t b, int32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a.x), "r"(a.y), "r"(b), "r"(0));
}

// The counts of a channel, a byte each: how many columns have bits 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t of the token.
__device__ inline uint32_t pack_counts(const int32_t* low, const int32_t* high) {
  return __byte_perm(low[0] + low[1] * 256, high[0] + high[1] * 256, 0x5410);
}

// From a lane's counts to the sums that it keeps. The counts are bytes of the first operand of an int8 product whose
// second operand are the powers of two that they stand for: so the tensor core adds over the quad.
struct Counter {
  int lane;
  uint32_t powers[2];  // this lane's part of the second operand: columns 2 t and 2 t + 1 are the low and high bits
  bool odd;
  int channel;  // of the row tiles: the one whose sum this lane keeps
  DType type;

  __device__ Counter(int lane, int row_tiles, DType type)
      : lane(lane),
        odd(lane % 2 == 1),
        channel(lane / 4 + lane % 2 * 8 + (row_tiles == 2 ? lane % 4 / 2 * kTileRows : 0)),
        type(type) {
    const int column = lane / 4;
    const uint32_t both = 0x0201U << (lane % 4 * 2) << (column % 2 * 16);  // the highest bit's is negative
    powers[0] = row_tiles == 1 || column < 4 ? both : 0;
    powers[1] = column < 4 ? 0 : both;
  }

  // Keeps constants in registers: the compiler would compute them again for every k-block.
  __device__ void keep() { asm volatile("" : "+r"(powers[0]), "+r"(powers[1]), "+r"(channel)); }

  // The product of a plane with the token's integers for this lane's channel.
  template <int kRowTiles>
  __device__ int product(const uint2* const (&planes)[kRowTiles], const uint2& bits) const {
    uint32_t counts[4] = {};
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      int32_t low[4];
      int32_t high[4];
      count_bits(*planes[i], bits.x, low);
      count_bits(*planes[i], bits.y, high);
      counts[2 * i] = pack_counts(low, high);
      counts[2 * i + 1] = pack_counts(low + 2, high + 2);
    }
    int32_t sums[4] = {};
    mma_int8<false>(counts, powers[0], kRowTiles == 2 ? powers[1] : 0, sums);
    return (odd ? sums[2] : sums[0]) + (odd ? sums[3] : sums[1]) * 256;
  }
};

// The products of a k-block with the token's integers, for this lane's channel.
template <class Traits>
__device__ float multiply_block(const GemvArgs& args, const Counter& counter, char* stage, uint2 bits,
                                const ScaleAndSum* scales_and_sums) {
  using Stage = typename Traits::Stage;
  float y = 0.0F;
#pragma unroll
  for (int plane = 0; plane < Traits::kScales; ++plane) {
    uint2 planes[Traits::kRowTiles][Traits::kTogether];
#pragma unroll
    for (int i = 0; i < Traits::kRowTiles; ++i) {
      planes_of<Traits::kTogether>(stage + i * Stage::kTile + plane * kPlane, counter.lane, planes[i]);
    }
#pragma unroll
    for (int segment = 0; segment < Traits::kGroups; ++segment) {
      // The bits of the segment's steps alone: each byte of a word has two bits for each of the four steps.
      constexpr int kApart = 8 / Traits::kGroups;
      const uint32_t mask = ((0x01010101U << kApart) - 0x01010101U) << segment * kApart;
      const uint2 of_segment = make_uint2(bits.x & mask, bits.y & mask);
      int sum = 0;
#pragma unroll
      for (int i = Traits::kTogether - 1; i >= 0; --i) {
        const uint2* of_tiles[Traits::kRowTiles];
#pragma unroll
        for (int j = 0; j < Traits::kRowTiles; ++j) of_tiles[j] = &planes[j][i];
        sum = sum * 2 + counter.product<Traits::kRowTiles>(of_tiles, of_segment);
      }
      int twice_zero = Stage::Code::kPlanes ? 1 : args.w.twice_zero;
      if (Stage::has_zeros(args.w)) twice_zero = 2 * Stage::zeros(stage)[segment * Traits::kChannels + counter.channel];
      const int total = sum * 2 - twice_zero * scales_and_sums[segment].sum;
      const int at = (segment * Traits::kScales + plane) * Traits::kChannels + counter.channel;
      y = __fmaf_rn(static_cast<float>(total), half_of(Stage::scales(stage)[at], counter.type), y);
    }
  }
  return y;
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 2) binary_kernel(const __grid_constant__ GemvArgs args) {
  extern __shared__ __align__(128) char memory[];
  using Stage = typename Traits::Stage;
  constexpr int kChannels = Traits::kChannels;
  constexpr int kBytes = Traits::kBytes;
  const int slice = this_warp();
  const int row_tiles = args.row_tiles;
  const int k_blocks = args.w.k_blocks;
  const int of_unit = args.of_unit(Traits::kRowTiles);
  const int first = static_cast<int>(blockIdx.x) * of_unit;
  const int next = static_cast<int>(gridDim.x) * of_unit;
  const int ring_bytes = args.stages * kBytes;
  char* const ring = memory + args.layout.ring + slice * ring_bytes;
  constexpr int kGroups = Traits::kGroups;
  Counter counter(static_cast<int>(threadIdx.x % 32), Traits::kRowTiles, args.w.type);
  if constexpr (kGroups == 1) counter.keep();  // others have no registers for it
  Tokens<Traits, BinaryOperand> x_tokens(args, 0, kGroups, memory);
  if (!args.chained) x_tokens.load();  // else they may not be there yet
  if (!args.constant_weight) wait_for_predecessors();
  launch_dependents();
  StageProducer<Stage> producer(args.w, counter.lane);
  producer.seek(slice < k_blocks ? first : row_tiles, slice);
  const auto produce = [&](char* stage) {
    if (producer.row_tile() < row_tiles) {
#pragma unroll
      for (int i = 0; i < Traits::kBlocks; ++i) {
        if (i == 0 || producer.k_block() < k_blocks) producer.copy(stage + i * Stage::kBytes);
        producer.advance(kSlices);
      }
      if (producer.k_block() >= k_blocks) producer.seek(producer.row_tile() + next, slice);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < args.stages - 1; ++i) produce(ring + i * kBytes);
  prepare_tokens(args, x_tokens, memory, kSlices * kChannels, Traits::kPlanes ? 1.0F : 0.5F);
  __syncthreads();
  const char* const x = memory + slice * 2 * kBlockK + counter.lane * 8;
  const auto* const scales_and_sums =
      reinterpret_cast<const ScaleAndSum*>(memory + args.layout.scales_and_sums) + slice * kGroups;
  char* stage = ring;
  char* before = ring + ring_bytes - kBytes;  // the one before it
  int turn = 0;
#pragma unroll 1
  for (int row_tile = first; row_tile < row_tiles; row_tile += next) {
    const ThreadOutput<kChannels> output(args, row_tile);
    Addends<1> addends;
    if (output.exists) addends = args.epilogue.load<1>(output.token, output.n);  // needed when the slices are summed
    float y = 0.0F;
    const char* columns = x;
    const ScaleAndSum* of_columns = scales_and_sums;
#pragma unroll 1
    for (int k_block = slice; k_block < k_blocks; k_block += Traits::kBlocks * kSlices) {
      wait_for_stages<Traits>(args.stages);
      __syncwarp();  // this stage has arrived, and the one before has been read
      produce(before);
#pragma unroll
      for (int i = 0; i < Traits::kBlocks; ++i) {
        if (i > 0 && k_block + i * kSlices >= k_blocks) break;
        const uint2 bits = *reinterpret_cast<const uint2*>(columns);
        y = __fmaf_rn(multiply_block<Traits>(args, counter, stage + i * Stage::kBytes, bits, of_columns),
                      of_columns->scale, y);
        columns += kSlices * 2 * kBlockK;
        of_columns += kSlices * kGroups;
      }
      before = stage;
      stage = stage == ring + ring_bytes - kBytes ? ring : stage + kBytes;
    }
    // Two sets in turn: a warp that is ahead writes the other one.
    auto* const sums = reinterpret_cast<float*>(memory + args.layout.sums) + turn * kSlices * kChannels;
    if (Traits::kRowTiles == 2 || counter.lane % 4 < 2) sums[slice * kChannels + counter.channel] = y;
    __syncthreads();
    if (output.exists) {
      const float* const of_slice = sums + static_cast<int>(threadIdx.x);
      const float sum[1] = {sum_of_slices([&](int i) { return of_slice[i * kChannels]; })};
      args.epilogue.store(sum, addends, output.token, output.n);
    }
    turn ^= 1;
  }
}

// ---- the kernel of a weight, as binary_row_tiles() has it ----

template <LowbitFormat kFormat, int kCount, int kGroups, int kRowTiles>
GemvKernel kernel_of(bool has_norm) {
  using Plain = Traits<kFormat, kCount, kGroups, kRowTiles, false>;
  using Normed = Traits<kFormat, kCount, kGroups, kRowTiles, true>;
  return has_norm ? gemv_of<Normed, binary_kernel<Normed>>() : gemv_of<Plain, binary_kernel<Plain>>();
}

// Two row tiles at a time share what is done once for a k-block; where there are few, more blocks count for more.
template <LowbitFormat kFormat, int kCount, int kGroups>
GemvKernel with_row_tiles(const GemvArgs& args) {
  const bool has_norm = args.norm.kind != Norm::kNone;
  if constexpr (binary_row_tiles(kGroups, true) == 1) {
    if (args.few_row_tiles && !args.gated()) return kernel_of<kFormat, kCount, kGroups, 1>(has_norm);
  }
  return kernel_of<kFormat, kCount, kGroups, 2>(has_norm);
}

template <LowbitFormat kFormat, int kCount>
GemvKernel with_count(const GemvArgs& args, int count) {
  if constexpr (kCount > 1) {
    if (count < kCount) return with_count<kFormat, kCount - 1>(args, count);
  }
  if (args.w.groups.segments == 4) return with_row_tiles<kFormat, kCount, 4>(args);
  if (args.w.groups.segments == 2) return with_row_tiles<kFormat, kCount, 2>(args);
  return with_row_tiles<kFormat, kCount, 1>(args);
}

GemvKernel kernel_for(const LowbitArgs& given, const GemvArgs& args) {
  if (given.format == LowbitFormat::kPlanes) return with_count<LowbitFormat::kPlanes, 4>(args, given.bits);
  return with_count<LowbitFormat::kUniform, 3>(args, given.bits);
}

}  // namespace

void run_gemv_binary(const LowbitArgs& given, const NormArgs& norm, int device, cudaStream_t stream) {
  const GemvArgs args(given, norm, is_chained(stream, device), device);
  kernel_for(given, args).launch("lowbit_gemv_binary", args, device, stream);
}

}  // namespace octofuse::lowbit
