// Up to 4 tokens against low-bit weights, at the speed of their bytes: one block an SM, strips of 16 rows one after the
// other. Its 16 warps share K, each with a ring in shared memory through which its tiles stream; tokens lie beside
// them, converted once while the first tiles are on their way.
#include "kernels/lowbit_kernels.h"

#include <algorithm>

#include "kernels/lowbit_stage.cuh"
#include "octofuse/device.h"

namespace octofuse::lowbit {
namespace {

constexpr int kThreads = 32 * kParts;
constexpr int kFewRows = 3000;

struct GemvArgs {
  Weight w;
  int m, k;
  int log_tokens;  // slots for tokens: 1, 2 or 4
  const void* x;
  int64_t ldx;
  bool pairs_of_x;
  Epilogue epilogue;
  bool constant_weight;
  int stages;  // kDeep or kShallow
};

constexpr int stages_in(int bytes, int stage) {
  return bytes < 3 * stage ? 3 : bytes > 16 * stage ? 16 : bytes / stage;
}

// A kernel at compile time: what Stage asks.
template <LowbitFormat kFormat_, int kBits, bool kPlain, bool kZeros, int kStrips_>
struct Kind {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kStrips = kStrips_;
  using Code = Codes<kFormat, kBits>;
  using Stage = lowbit::Stage<Code, kPlain, kZeros, kStrips>;
  static constexpr int kSlot = (Stage::kBytes + 15) / 16 * 16;
  // Much on its way keeps memory busy while tokens are converted; less does where these need the room. Below 4 bits
  // instructions bound the kernel, and a deeper ring was slower.
  static constexpr int kDeep = stages_in((Stage::kTile < 1024 ? 112 : 160) << 10, kParts* kSlot);
  static constexpr int kShallow = stages_in(72 << 10, kParts* kSlot);
};

// Shared memory: tokens, what there is to know of them, two sets of the parts' sums, rings.
struct Places {
  int facts, parts, ring;

  __host__ __device__ Places(const GemvArgs& args, int strips) {
    const int tokens = 1 << args.log_tokens;
    facts = args.w.chunks * tokens * 2 * kChunk;
    parts = (facts + args.w.chunks * args.w.groups.segments * tokens * 8 + 15) / 16 * 16;
    ring = parts + 2 * kParts * strips * kStrip * tokens * 4;
  }
};

// The tokens' way into shared memory, a chunk of one of them by half a warp at a time. The first values are loaded
// apart: they come while the ring is being filled.
template <LowbitFormat kFormat>
struct Tokens {
  const GemvArgs& args;
  char* memory;
  TokenChunk* facts;
  int count, item;
  RawColumns next;

  __device__ Tokens(const GemvArgs& args, const Places& places, char* memory)
      : args(args),
        memory(memory),
        facts(reinterpret_cast<TokenChunk*>(memory + places.facts)),
        count(args.w.chunks << args.log_tokens),
        item(static_cast<int>(threadIdx.x) / 16) {}

  __device__ void load() {
    const int i = min(item, count - 1);
    const int token = min(i & ((1 << args.log_tokens) - 1), args.m - 1);
    const int k = RawColumns::first_of(i >> args.log_tokens, static_cast<int>(threadIdx.x) % 16);
    next.load(args.x, token * args.ldx, k, args.k, args.pairs_of_x);
  }

  __device__ void convert() {
    const int tokens = 1 << args.log_tokens;
    const int segments = args.w.groups.segments;
#pragma unroll 1
    for (int first = 0; first < count; first += kThreads / 16) {  // the same for all: their shuffles meet
      const int token = item & (tokens - 1);
      const int chunk = item >> args.log_tokens;
      const bool exists = item < count;
      float v[8];
      next.widen(args.w.type, v);
      item += kThreads / 16;
      if (first + kThreads / 16 < count) load();
      convert_chunk(v, exists, memory + chunk * tokens * 2 * kChunk, 2 * tokens, 2 * token,
                    facts + chunk * segments * tokens + token, tokens, segments, kFactor<kFormat>);
    }
  }
};

// This thread's output of the strips that are summed together.
template <class Kind>
struct Place {
  static constexpr int kRows = Kind::Stage::kRows;
  int token, n;
  bool exists;

  __device__ Place(const GemvArgs& args, int strip)
      : token(static_cast<int>(threadIdx.x) / kRows),
        n(strip * kStrip + static_cast<int>(threadIdx.x) % kRows),
        exists(token < args.m && n < args.w.n) {}
};

// A chunk's products: `x` this lane's 16 bytes of its token, `half` behind which the next 16 lie; `facts` of its token.
template <class Kind>
__device__ void multiply(const Weight& w, const char* x, int half, const TokenChunk* facts, int tokens, char* stage,
                         int lane, float (&y)[Kind::kStrips][2]) {
  using Stage = typename Kind::Stage;
  using Code = typename Kind::Code;
  constexpr int kStrips = Kind::kStrips;
  const uint4 columns[2] = {*reinterpret_cast<const uint4*>(x), *reinterpret_cast<const uint4*>(x + half)};
  const int segments = Stage::kSegments == 1 ? 1 : w.groups.segments;
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
  extern __shared__ int4 shared[];
  char* const memory = reinterpret_cast<char*>(shared);
  const int stages = args.stages;
  constexpr int kRows = Kind::Stage::kRows;
  const Places places(args, Kind::kStrips);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int part = static_cast<int>(threadIdx.x) / 32;
  const int strips = (args.w.n + kStrip - 1) / kStrip;
  const int chunks = args.w.chunks;
  const int tokens = 1 << args.log_tokens;
  const int first = static_cast<int>(blockIdx.x) * Kind::kStrips;
  const int next = static_cast<int>(gridDim.x) * Kind::kStrips;
  char* const ring = memory + places.ring + part * stages * Kind::kSlot;
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
  Tokens<Kind::kFormat> x_tokens(args, places, memory);
  bring(ring);
  bring(ring + Kind::kSlot);
  wait_for_earlier_kernels();
  x_tokens.load();
#pragma unroll 1
  for (int i = 2; i < stages - 1; ++i) bring(ring + i * Kind::kSlot);
  x_tokens.convert();
  __syncthreads();
  const int column = lane / 4 & (2 * tokens - 1);  // of x; a token's slots may be fewer than a product's columns
  const int segments = args.w.groups.segments;
  const char* const x = memory + place_of_eighth(2 * tokens, column, lane % 4) + part * tokens * 2 * kChunk;
  const int half = tokens * kChunk;
  const auto* const facts =
      reinterpret_cast<const TokenChunk*>(memory + places.facts) + (lane % 4 & (tokens - 1)) + part * segments * tokens;
  const int pitch = kRows * tokens;
  const int x_step = kParts * tokens * 2 * kChunk;
  const int facts_step = kParts * segments * tokens;
  char* stage = ring;
  char* before = ring + (stages - 1) * Kind::kSlot;  // the one before it
  int turn = 0;
#pragma unroll 1
  for (int strip = first; strip < strips; strip += next) {
    const Place<Kind> place(args, strip);
    Addends addends;
    if (place.exists) addends = args.epilogue.load(place.token, place.n);  // needed when the strips are summed
    float y[Kind::kStrips][2] = {};
    const char* columns = x;
    const TokenChunk* of_columns = facts;
#pragma unroll 1
    for (int chunk = part; chunk < chunks; chunk += kParts) {
      if (stages == Kind::kDeep) {  // all but the youngest copies; an immediate
        asm volatile("cp.async.wait_group %0;" : : "n"(Kind::kDeep - 2) : "memory");
      } else {
        asm volatile("cp.async.wait_group %0;" : : "n"(Kind::kShallow - 2) : "memory");
      }
      __syncwarp();  // this stage has arrived, and the one before has been read
      bring(before);
      multiply<Kind>(args.w, columns, half, of_columns, tokens, stage, lane, y);
      columns += x_step;
      of_columns += facts_step;
      before = stage;
      stage = stage == ring + (stages - 1) * Kind::kSlot ? ring : stage + Kind::kSlot;
    }
    auto* const parts = reinterpret_cast<float*>(memory + places.parts) + turn * kParts * pitch;
    if (lane % 4 < tokens) {
      float* const mine = parts + part * pitch + lane % 4 * kRows + lane / 4;
#pragma unroll
      for (int i = 0; i < Kind::kStrips * 2; ++i) mine[i * 8] = y[i / 2][i % 2];
    }
    __syncthreads();
    if (place.exists) {
      const float* const sums = parts + static_cast<int>(threadIdx.x);
      args.epilogue.store(sum_of_parts([&](int i) { return sums[i * pitch]; }), addends, place.token, place.n);
    }
    turn ^= 1;
  }
}

template <class Kind>
int bytes_of(const GemvArgs& args, int stages) {
  return Places(args, Kind::kStrips).ring + kParts * stages * Kind::kSlot;
}

template <class Kind>
void launch(const GemvArgs& given, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const auto* function = reinterpret_cast<const void*>(gemv_kernel<Kind>);
  const int most = device_capability(device).shared_memory;
  allow_shared_memory(function, most, device, raised);
  GemvArgs args = given;
  args.stages = bytes_of<Kind>(args, Kind::kDeep) <= most ? Kind::kDeep : Kind::kShallow;
  const int units = (args.w.n + Kind::Stage::kRows - 1) / Kind::Stage::kRows;
  const int blocks = std::min(units, device_capability(device).sm_count);
  launch_kernel("lowbit_gemv", function, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                bytes_of<Kind>(args, args.stages), dim3(1), is_chained(stream, device), &args, stream);
}

// f(Kind()) for the kernel of these arguments. Two strips at a time share what is done once for a chunk; where there
// are few, or a stage is large enough, more blocks or stages count for more.
template <LowbitFormat kFormat, int kBits, bool kZeros, class F>
auto with_strips(const GemvArgs& args, F f) {
  if constexpr (Codes<kFormat, kBits>::kBytes * Codes<kFormat, kBits>::kCount <= 1024) {
    if (args.w.n >= kFewRows) return f(Kind<kFormat, kBits, true, kZeros, 2>());
  }
  return f(Kind<kFormat, kBits, true, kZeros, 1>());
}

template <LowbitFormat kFormat, int kBits, class F>
auto with_kind(const GemvArgs& args, F f) {
  constexpr bool kMayHaveZeros = kFormat == LowbitFormat::kUniform;
  if (kBits == 7 || args.w.groups.segments > 1 || !args.w.wide)
    return f(Kind<kFormat, kBits, false, kMayHaveZeros, 1>());
  if constexpr (kMayHaveZeros && kBits != 7) {
    if (args.w.zero != nullptr) return with_strips<kFormat, kBits, true>(args, f);
  }
  if constexpr (kBits != 7) return with_strips<kFormat, kBits, false>(args, f);
}

template <LowbitFormat kFormat, int kBits, class F>
auto with_bits(int bits, const GemvArgs& args, F f) {
  if constexpr (kBits > 1) {
    if (bits < kBits) return with_bits<kFormat, kBits - 1>(bits, args, f);
  }
  return with_kind<kFormat, kBits>(args, f);
}

template <class F>
auto with_kernel(const LowbitArgs& given, F f) {
  GemvArgs args{Weight(given),         given.m, given.k, 0, given.x, given.ldx, false, Epilogue(given),
                given.constant_weight, 0};
  while (1 << args.log_tokens < args.m) ++args.log_tokens;
  args.pairs_of_x = given.k % 2 == 0 && given.ldx % 2 == 0 && reinterpret_cast<uintptr_t>(given.x) % 4 == 0;
  const auto call = [&](auto kind) { return f(kind, args); };
  if (given.format == LowbitFormat::kUniform) return with_bits<LowbitFormat::kUniform, 8>(given.bits, args, call);
  if (given.format == LowbitFormat::kPlanes) return with_bits<LowbitFormat::kPlanes, 8>(given.bits, args, call);
  return with_kind<LowbitFormat::kSparse12, 8>(args, call);
}

}  // namespace

bool takes_gemv(const LowbitArgs& args, int device) {
  const int most = device_capability(device).shared_memory;
  return args.m <= 4 && with_kernel(args, [&](auto kind, const GemvArgs& of) {
           using Kind = decltype(kind);
           return bytes_of<Kind>(of, Kind::kShallow) <= most;
         });
}

void run_gemv(const LowbitArgs& args, int device, cudaStream_t stream) {
  with_kernel(args, [&](auto kind, const GemvArgs& of) { launch<decltype(kind)>(of, device, stream); });
}

}  // namespace octofuse::lowbit
