// One token against codes of 1 to 3 bits, or planes of them, at the speed of their bytes, in products of single bits:
// mma.sync m16n8k128 counts where a bit of a code and one of an integer are set, in words as they lie in memory.
//
// A product's 16 rows are a plane of the codes; two products have the token's 16 bits as their 8 columns. A quad's lane
// t holds the counts of bits 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t; these times their powers of two, summed over planes of
// uniform codes and over the quad, are the exact integers that lowbit_tile.cuh speaks of, so the bits are those of
// lowbit_gemv.cu. In the quad's sum each lane keeps one row of the 32, or of 16, and what follows is done once for a
// row. More tokens would take as many times the products; those of bytes take four at once.
#include "kernels/lowbit_gemv.cuh"
#include "kernels/lowbit_kernels.h"

namespace octofuse::lowbit {
namespace {

constexpr int kPlane = 256;      // bytes of a tile's plane
constexpr int kRing = 84 << 10;  // bytes of all warps' stages: room for another block beside it
constexpr int kSmall = 640;      // bytes of a chunk: then two of them share the work around them

// A kernel at compile time. kCount: bits of uniform codes, or planes.
template <LowbitFormat kFormat, int kCount, int kGroups_, int kStrips_>
struct Kind {
  static constexpr bool kPlanes = kFormat == LowbitFormat::kPlanes;
  static constexpr int kGroups = kGroups_;
  static constexpr int kStrips = kStrips_;
  static constexpr int kRows = kStrips * kStrip;
  using Stage = lowbit::Stage<Codes<kFormat, kCount>, kGroups, kStrips>;
  static constexpr int kScales = kPlanes ? kCount : 1;             // of a row and segment
  static constexpr int kTogether = kPlanes ? 1 : kCount;           // planes that share one
  static constexpr int kChunks = Stage::kBytes <= kSmall ? 2 : 1;  // of a stage
  static constexpr int kBytes = kChunks * Stage::kBytes;           // of a stage
  static constexpr int kMany = kRing / (kParts * kBytes);
  static constexpr int kShallow = 3;
  static constexpr int kDeep = kMany < kShallow ? kShallow : kMany > 8 ? 8 : kMany;
};

// ---- products ----

// The lane's words of a plane: of row lane / 4, of row lane / 4 + 8.
__device__ inline uint2 plane_words(const char* tile, int lane) {
  return *reinterpret_cast<const uint2*>(tile + lane * 8);
}

// The even bits of one and the odd ones of the other, in one instruction where the compiler would take two.
__device__ inline uint32_t even_or_odd(uint32_t even, uint32_t odd) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, 0x55555555, 0xE4;" : "=r"(d) : "r"(even), "r"(odd));
  return d;
}

// A tile of uniform codes as planes, the lowest first.
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

// Bytes of a row: how many columns have bits 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t of the token.
__device__ inline uint32_t pack_counts(const int32_t* low, const int32_t* high) {
  return __byte_perm(low[0] + low[1] * 256, high[0] + high[1] * 256, 0x5410);
}

// What a lane does with its counts.
struct Lane {
  int lane;
  uint32_t powers[2];  // of two, as the second operand of their sum: columns 2 t and 2 t + 1 are the low and high bits
  bool odd;
  int row;  // of the sums that it keeps
  DType type;

  __device__ Lane(int lane, int strips, DType type)
      : lane(lane),
        odd(lane % 2 == 1),
        row(lane / 4 + lane % 2 * 8 + (strips == 2 ? lane % 4 / 2 * kStrip : 0)),
        type(type) {
    const int column = lane / 4;
    const uint32_t both = 0x0201U << (lane % 4 * 2) << (column % 2 * 16);  // the highest bit's is negative
    powers[0] = strips == 1 || column < 4 ? both : 0;
    powers[1] = column < 4 ? 0 : both;
  }

  // In registers, not made again for every chunk.
  __device__ void keep() { asm volatile("" : "+r"(powers[0]), "+r"(powers[1]), "+r"(row)); }

  // A plane's products with a token's bits, of this lane's row.
  template <int kStrips>
  __device__ int product(const uint2* const (&planes)[kStrips], const uint2& bits) const {
    uint32_t counts[4] = {};
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      int32_t low[4];
      int32_t high[4];
      count_bits(*planes[i], bits.x, low);
      count_bits(*planes[i], bits.y, high);
      counts[2 * i] = pack_counts(low, high);
      counts[2 * i + 1] = pack_counts(low + 2, high + 2);
    }
    int32_t sums[4] = {};
    mma<false>(counts, powers[0], kStrips == 2 ? powers[1] : 0, sums);
    return (odd ? sums[2] : sums[0]) + (odd ? sums[3] : sums[1]) * 256;
  }
};

// A chunk's products with the token's bits.
template <class Kind>
__device__ float multiply_chunk(const GemvArgs& args, const Lane& at, char* stage, uint2 bits,
                                const TokenChunk* facts) {
  using Stage = typename Kind::Stage;
  float y = 0.0F;
#pragma unroll
  for (int plane = 0; plane < Kind::kScales; ++plane) {
    uint2 planes[Kind::kStrips][Kind::kTogether];
#pragma unroll
    for (int i = 0; i < Kind::kStrips; ++i) {
      planes_of<Kind::kTogether>(stage + i * Stage::kTile + plane * kPlane, at.lane, planes[i]);
    }
#pragma unroll
    for (int segment = 0; segment < Kind::kGroups; ++segment) {
      // The bits of its steps, of which a byte of each word has two.
      constexpr int kApart = 8 / Kind::kGroups;
      const uint32_t mask = ((0x01010101U << kApart) - 0x01010101U) << segment * kApart;
      const uint2 of_segment = make_uint2(bits.x & mask, bits.y & mask);
      int sum = 0;
#pragma unroll
      for (int i = Kind::kTogether - 1; i >= 0; --i) {
        const uint2* of_strips[Kind::kStrips];
#pragma unroll
        for (int j = 0; j < Kind::kStrips; ++j) of_strips[j] = &planes[j][i];
        sum = sum * 2 + at.product<Kind::kStrips>(of_strips, of_segment);
      }
      int twice_zero = Stage::Code::kTwiceMiddle;
      if (Stage::has_zeros(args.w)) twice_zero = 2 * Stage::zeros(stage)[segment * Kind::kRows + at.row];
      const int total = sum * 2 - twice_zero * facts[segment].sum;
      const uint16_t scale = Stage::scales(stage)[(segment * Kind::kScales + plane) * Kind::kRows + at.row];
      y = __fmaf_rn(static_cast<float>(total), half_of(scale, at.type), y);
    }
  }
  return y;
}

template <class Kind>
__global__ void __launch_bounds__(kThreads, 2) bits_kernel(const __grid_constant__ GemvArgs args) {
  extern __shared__ __align__(128) char memory[];
  constexpr int kRows = Kind::kRows;
  constexpr int kBytes = Kind::kBytes;
  const int part = this_warp();
  const int strips = args.strips;
  const int chunks = args.w.chunks;
  const int first = static_cast<int>(blockIdx.x) * Kind::kStrips;
  const int next = static_cast<int>(gridDim.x) * Kind::kStrips;
  const int ring_bytes = args.stages * kBytes;
  char* const ring = memory + args.places.ring + part * ring_bytes;
  constexpr int kGroups = Kind::kGroups;
  Lane at(static_cast<int>(threadIdx.x % 32), Kind::kStrips, args.w.type);
  if constexpr (kGroups == 1) at.keep();  // others have no registers for it
  const Tokens<AsBits> x_tokens(args, 0, kGroups, memory);
  if (!args.chained) x_tokens.load();  // else they may not be there yet
  if (!args.constant_weight) wait_for_earlier_kernels();
  let_later_kernels_start();
  Bringer<typename Kind::Stage> bringer(args.w, at.lane);
  bringer.begin(part < chunks ? first : strips, part);
  const auto bring = [&](char* stage) {
    if (bringer.strip < strips) {
#pragma unroll
      for (int i = 0; i < Kind::kChunks; ++i) {
        if (i == 0 || bringer.chunk < chunks) bringer.bring(stage + i * Kind::Stage::kBytes);
        bringer.advance(kParts);
      }
      if (bringer.chunk >= chunks) bringer.begin(bringer.strip + next, part);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll 1
  for (int i = 0; i < args.stages - 1; ++i) bring(ring + i * kBytes);
  if (args.chained) {
    wait_for_earlier_kernels();
    x_tokens.load();
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    wait_for_copies<Kind, 1>(args.stages);
  }
  x_tokens.convert(Kind::kPlanes ? 1.0F : 0.5F);
  __syncthreads();
  const char* const x = memory + part * 2 * kChunk + at.lane * 8;
  const auto* const facts = reinterpret_cast<const TokenChunk*>(memory + args.places.facts) + part * kGroups;
  char* stage = ring;
  char* before = ring + ring_bytes - kBytes;  // the one before it
  int turn = 0;
#pragma unroll 1
  for (int strip = first; strip < strips; strip += next) {
    const Place<kRows> place(args, strip);
    Addends<1> addends;
    if (place.exists) addends = args.epilogue.load<1>(place.token, place.n);  // needed when the strips are summed
    float y = 0.0F;
    const char* columns = x;
    const TokenChunk* of_columns = facts;
#pragma unroll 1
    for (int chunk = part; chunk < chunks; chunk += Kind::kChunks * kParts) {
      wait_for_copies<Kind, 2>(args.stages);
      __syncwarp();  // this stage has arrived, and the one before has been read
      bring(before);
#pragma unroll
      for (int i = 0; i < Kind::kChunks; ++i) {
        if (i > 0 && chunk + i * kParts >= chunks) break;
        const uint2 bits = *reinterpret_cast<const uint2*>(columns);
        y = __fmaf_rn(multiply_chunk<Kind>(args, at, stage + i * Kind::Stage::kBytes, bits, of_columns),
                      of_columns->power, y);
        columns += kParts * 2 * kChunk;
        of_columns += kParts * kGroups;
      }
      before = stage;
      stage = stage == ring + ring_bytes - kBytes ? ring : stage + kBytes;
    }
    auto* const parts = reinterpret_cast<float*>(memory + args.places.parts) + turn * kParts * kRows;
    if (Kind::kStrips == 2 || at.lane % 4 < 2) parts[part * kRows + at.row] = y;
    __syncthreads();
    if (place.exists) {
      const float* const sums = parts + static_cast<int>(threadIdx.x);
      const float sum[1] = {sum_of_parts([&](int i) { return sums[i * kRows]; })};
      args.epilogue.store(sum, addends, place.token, place.n);
    }
    turn ^= 1;
  }
}

// ---- launch ----

template <class Kind>
Gemv kernel_of() {
  return gemv_of<Kind>(bits_kernel<Kind>);
}

// Two strips at a time share what is done once for a chunk; where there are few, more blocks count for more.
template <LowbitFormat kFormat, int kCount, int kGroups>
Gemv with_strips(const GemvArgs& args) {
  if (args.few_strips) return kernel_of<Kind<kFormat, kCount, kGroups, 1>>();
  return kernel_of<Kind<kFormat, kCount, kGroups, 2>>();
}

template <LowbitFormat kFormat, int kCount>
Gemv with_count(const GemvArgs& args, int count) {
  if constexpr (kCount > 1) {
    if (count < kCount) return with_count<kFormat, kCount - 1>(args, count);
  }
  if (args.w.groups.segments == 4) return kernel_of<Kind<kFormat, kCount, 4, 2>>();
  if (args.w.groups.segments == 2) return with_strips<kFormat, kCount, 2>(args);
  return with_strips<kFormat, kCount, 1>(args);
}

Gemv kernel_for(const LowbitArgs& given, const GemvArgs& args) {
  if (given.format == LowbitFormat::kPlanes) return with_count<LowbitFormat::kPlanes, 4>(args, given.bits);
  return with_count<LowbitFormat::kUniform, 3>(args, given.bits);
}

}  // namespace

bool takes_gemv_bits(const LowbitArgs& given, int device) {
  const int most = given.format == LowbitFormat::kPlanes ? 4 : given.format == LowbitFormat::kUniform ? 3 : 0;
  const GemvArgs args(given, false, device);
  return given.m == 1 && given.bits <= most && args.w.wide && kernel_for(given, args).fits(args);
}

void run_gemv_bits(const LowbitArgs& given, int device, cudaStream_t stream) {
  const GemvArgs args(given, is_chained(stream, device), device);
  kernel_for(given, args).launch("lowbit_gemv_bits", args, device, stream);
}

}  // namespace octofuse::lowbit
