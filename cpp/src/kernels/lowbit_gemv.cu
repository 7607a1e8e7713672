// Up to 4 tokens against low-bit weights, at the speed of their bytes: one block an SM, one or two strips of 16 rows
// after the other, in products of int8.
#include "kernels/lowbit_gemv.cuh"
#include "kernels/lowbit_kernels.h"

namespace octofuse::lowbit {
namespace {

constexpr int stages_in(int bytes, int stage) {
  return bytes < 3 * stage ? 3 : bytes > 16 * stage ? 16 : bytes / stage;
}

// A kernel at compile time: what Stage asks.
template <LowbitFormat kFormat_, int kBits, int kGroups, int kStrips_>
struct Kind {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kStrips = kStrips_;
  using Code = Codes<kFormat, kBits>;
  using Stage = lowbit::Stage<Code, kGroups, kStrips>;
  static constexpr int kBytes = Stage::kBytes;
  // Much on its way keeps memory busy while tokens are converted; less does where these need the room. Below 4 bits
  // instructions bound the kernel, and a deeper ring was slower.
  static constexpr int kDeep = stages_in((Stage::kTile < 1024 ? 112 : 160) << 10, kParts* kBytes);
  static constexpr int kShallow = stages_in(72 << 10, kParts* kBytes);
};

// A chunk's products: `x` this lane's 16 bytes of its token; `facts` of its token.
template <class Kind>
__device__ void multiply(const Weight& w, const char* x, const TokenChunk* facts, int tokens, char* stage, int lane,
                         float (&y)[Kind::kStrips][2]) {
  using Stage = typename Kind::Stage;
  using Code = typename Kind::Code;
  constexpr int kStrips = Kind::kStrips;
  const uint4 columns[2] = {*reinterpret_cast<const uint4*>(x), *reinterpret_cast<const uint4*>(x + AsBytes::kHalf)};
  const int segments = Stage::kGroups > 0 ? Stage::kGroups : w.groups.segments;
  float of_chunk[kStrips][2] = {};
#pragma unroll
  for (int plane = 0; plane < Code::kCount; ++plane) {
    uint32_t words[kStrips][Code::kWords];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      read_words<Code::kWidth>(stage + (strip * Code::kCount + plane) * Code::kBytes, lane, words[strip]);
    }
    int32_t acc[kStrips][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4& v = columns[step / 2];
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        uint32_t a[4];
        codes_of_step<Kind::kFormat, Code::kPlanes ? 1 : Code::kWidth>(words[strip], step, a);
        mma<Code::kSparse>(a, step % 2 == 0 ? v.x : v.z, step % 2 == 0 ? v.y : v.w, acc[strip]);
      }
      if ((step + 1) * segments % kSteps != 0) continue;
      const int segment = step * segments / kSteps;
      const int sum = facts[segment * tokens].sum;
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        float scale[2];
        int twice_zero[2];
        read_scales<Stage>(w.type, stage, segment, plane, strip, lane, scale);
        read_zeros<Stage>(w, stage, segment, strip, lane, twice_zero);
        add_products<Kind::kFormat>(acc[strip], scale, twice_zero, sum, of_chunk[strip]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kStrips * 2; ++i) {
    y[i / 2][i % 2] = __fmaf_rn(of_chunk[i / 2][i % 2], facts->power, y[i / 2][i % 2]);
  }
}

template <class Kind>
__global__ void __launch_bounds__(kThreads, 1) gemv_kernel(const __grid_constant__ GemvArgs args) {
  extern __shared__ __align__(128) char memory[];
  const int stages = args.stages;
  constexpr int kRows = Kind::Stage::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int part = this_warp();
  const int strips = args.strips;
  const int chunks = args.w.chunks;
  const int tokens = 1 << args.log_tokens;
  const int first = static_cast<int>(blockIdx.x) * Kind::kStrips;
  const int next = static_cast<int>(gridDim.x) * Kind::kStrips;
  char* const ring = memory + args.places.ring + part * stages * Kind::Stage::kBytes;
  if (!args.constant_weight) wait_for_earlier_kernels();
  let_later_kernels_start();
  Bringer<typename Kind::Stage> bringer(args.w, lane);
  bringer.begin(part < chunks ? first : strips, part);
  const auto bring = [&](char* stage) {
    if (bringer.strip < strips) {
      bringer.bring(stage);
      bringer.advance(kParts);
      if (bringer.chunk >= chunks) bringer.begin(bringer.strip + next, part);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const int segments = Kind::Stage::kGroups > 0 ? Kind::Stage::kGroups : args.w.groups.segments;
  const Tokens<AsBytes> x_tokens(args, args.log_tokens, segments, memory);
  if (!args.chained) x_tokens.load();  // else they may not be there yet
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) bring(ring + i * Kind::Stage::kBytes);
  if (args.chained) {
    wait_for_earlier_kernels();
    x_tokens.load();
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    wait_for_copies<Kind, 1>(stages);
  }
  x_tokens.convert(kFactor<Kind::kFormat>);
  __syncthreads();
  const int column = lane / 4 & (2 * tokens - 1);  // of x; a token's slots may be fewer than a product's columns
  const char* const x = memory + (part * tokens + column / 2) * 2 * kChunk + column % 2 * AsBytes::kLow + lane % 4 * 16;
  const auto* const facts = reinterpret_cast<const TokenChunk*>(memory + args.places.facts) +
                            (lane % 4 & (tokens - 1)) + part * segments * tokens;
  const int pitch = kRows * tokens;
  const int x_step = kParts * tokens * 2 * kChunk;
  const int facts_step = kParts * segments * tokens;
  char* stage = ring;
  char* before = ring + (stages - 1) * Kind::Stage::kBytes;  // the one before it
  int turn = 0;
#pragma unroll 1
  for (int strip = first; strip < strips; strip += next) {
    const Place<kRows> place(args, strip);
    Addends<1> addends;
    if (place.exists) addends = args.epilogue.load<1>(place.token, place.n);  // needed when the strips are summed
    float y[Kind::kStrips][2] = {};
    const char* columns = x;
    const TokenChunk* of_columns = facts;
#pragma unroll 1
    for (int chunk = part; chunk < chunks; chunk += kParts) {
      wait_for_copies<Kind, 2>(stages);
      __syncwarp();  // this stage has arrived, and the one before has been read
      bring(before);
      multiply<Kind>(args.w, columns, of_columns, tokens, stage, lane, y);
      columns += x_step;
      of_columns += facts_step;
      before = stage;
      stage = stage == ring + (stages - 1) * Kind::Stage::kBytes ? ring : stage + Kind::Stage::kBytes;
    }
    auto* const parts = reinterpret_cast<float*>(memory + args.places.parts) + turn * kParts * pitch;
    if (lane % 4 < tokens) {
      float* const mine = parts + part * pitch + lane % 4 * kRows + lane / 4;
#pragma unroll
      for (int i = 0; i < Kind::kStrips * 2; ++i) mine[i * 8] = y[i / 2][i % 2];
    }
    __syncthreads();
    if (place.exists) {
      const float* const sums = parts + static_cast<int>(threadIdx.x);
      const float sum[1] = {sum_of_parts([&](int i) { return sums[i * pitch]; })};
      args.epilogue.store(sum, addends, place.token, place.n);
    }
    turn ^= 1;
  }
}

// The kernel of these arguments. Two strips at a time share what is done once for a chunk; where there are few, or a
// ring of such stages does not fit, one. Narrow codes come here for more than one token, or where rows of scales are
// not aligned: one kernel has to do.
template <class Kind>
Gemv kernel_of() {
  return gemv_of<Kind>(gemv_kernel<Kind>);
}

template <LowbitFormat kFormat, int kBits, int kGroups>
Gemv with_strips(const GemvArgs& args) {
  constexpr int kTile = Codes<kFormat, kBits>::kBytes * Codes<kFormat, kBits>::kCount;
  constexpr bool kIsByte = kFormat == LowbitFormat::kUniform && kBits == 8;
  if constexpr (kTile < 1024 || (kTile == 1024 && kGroups == 4)) {
    return kernel_of<Kind<kFormat, kBits, kGroups, 2>>();
  } else {
    if constexpr (kTile == 1024 || (kIsByte && kGroups < 4)) {
      const Gemv two = kernel_of<Kind<kFormat, kBits, kGroups, 2>>();
      if (!args.few_strips && two.fits(args)) return two;
    }
    return kernel_of<Kind<kFormat, kBits, kGroups, 1>>();
  }
}

template <LowbitFormat kFormat, int kBits>
Gemv with_groups(const GemvArgs& args) {
  const int segments = args.w.groups.segments;
  if constexpr (kFormat == LowbitFormat::kUniform && (kBits == 4 || kBits == 8)) {
    if (segments == 2 && args.w.wide) return with_strips<kFormat, kBits, 2>(args);
    if (segments == 4 && args.w.wide) return with_strips<kFormat, kBits, 4>(args);
  }
  if constexpr (kBits != 7) {
    if (segments == 1 && args.w.wide) return with_strips<kFormat, kBits, 1>(args);
  }
  return kernel_of<Kind<kFormat, kBits, 0, 1>>();
}

template <LowbitFormat kFormat, int kBits>
Gemv with_bits(int bits, const GemvArgs& args) {
  if constexpr (kBits > 1) {
    if (bits < kBits) return with_bits<kFormat, kBits - 1>(bits, args);
  }
  return with_groups<kFormat, kBits>(args);
}

Gemv kernel_for(const LowbitArgs& given, const GemvArgs& args) {
  if (given.format == LowbitFormat::kUniform) return with_bits<LowbitFormat::kUniform, 8>(given.bits, args);
  if (given.format == LowbitFormat::kPlanes) return with_bits<LowbitFormat::kPlanes, 8>(given.bits, args);
  return with_groups<LowbitFormat::kSparse12, 8>(args);
}

}  // namespace

bool takes_gemv(const LowbitArgs& given, int device) {
  const GemvArgs args(given, false, device);
  return given.m <= 4 && kernel_for(given, args).fits(args);
}

void run_gemv(const LowbitArgs& given, int device, cudaStream_t stream) {
  const GemvArgs args(given, is_chained(stream, device), device);
  kernel_for(given, args).launch("lowbit_gemv", args, device, stream);
}

}  // namespace octofuse::lowbit
