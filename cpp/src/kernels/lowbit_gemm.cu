// More than 4 tokens against low-bit weights by mma.sync: codes and tokens stream through shared memory, chunk by
// chunk, and 8 warps share them: 2 strips and half of the tokens each.
#include "kernels/lowbit_kernels.h"
#include "kernels/lowbit_quarters.cuh"

namespace octofuse::lowbit {
namespace {

constexpr int kThreads = kSummers;
constexpr int kMostShared = 224 << 10;
constexpr int kMostTokens = 32;  // of a launch

// A kernel at compile time; a warp has kTiles tiles of 4 tokens.
template <LowbitFormat kFormat_, int kBits>
struct Kind {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kTiles = 4;
  static constexpr int kTokens = 8 * kTiles;
  static constexpr int kValues = 4 * kTiles;  // of a thread
  static constexpr int kStages = 4;
  using Code = Codes<kFormat, kBits>;
  static constexpr int kColumnBytes = 2 * kTokens * kChunk;
};

// How a stage lies: codes, tokens, what there is to know of them, scales and zeros of every segment.
template <class Kind>
struct Places {
  int tile;  // bytes
  int columns, facts, scales, zeros, stage;

  __host__ __device__ explicit Places(const Weight& w) {
    const int segments = w.groups.segments;
    tile = Kind::Code::kBytes * (Kind::Code::kPlanes ? w.planes : 1);
    columns = kBlockStrips * tile;
    facts = columns + Kind::kColumnBytes;
    scales = facts + segments * Kind::kTokens * 8;
    zeros = scales + segments * w.planes * kBlockRows * 2;
    stage = zeros + (w.zero != nullptr ? segments * kBlockRows : 0);
  }
  __host__ __device__ int total() const {
    return max(Kind::kStages * stage, Kind::kTokens * (kBlockRows + 4) * 4) + Kind::kValues * kThreads * 4;
  }
};

// A chunk into a stage.
template <class Kind>
__device__ void bring(const GemmArgs& args, const Places<Kind>& places, int chunk, char* stage) {
  const Weight& w = args.w;
  const int thread = static_cast<int>(threadIdx.x);
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
  const int first = static_cast<int>(blockIdx.x) * kBlockStrips;
  const int last = (w.n - 1) / kStrip;
  const int pieces = places.tile / 16;
#pragma unroll
  for (int i = thread; i < kBlockStrips * pieces; i += kThreads) {
    const int64_t tile = static_cast<int64_t>(min(first + i / pieces, last)) * w.chunks + chunk;
    copy_to_stage(to + i * 16, w.packed + tile * places.tile + i % pieces * 16);
  }
  const int rows = w.groups.segments * w.planes;
  for (int i = thread; i < rows * (kBlockRows / 8); i += kThreads) {
    const int row = i / (kBlockRows / 8);
    const uint16_t* const from = w.scale_row(chunk, row / w.planes, row % w.planes);
    const int n = first * kStrip + i % (kBlockRows / 8) * 8;
    if (w.wide && n < w.n) {
      copy_to_stage(to + places.scales + i * 16, from + n);
    } else {
      auto* const scales = reinterpret_cast<uint16_t*>(stage + places.scales) + i * 8;
      for (int j = 0; j < 8; ++j) scales[j] = from[min(n + j, w.n - 1)];
    }
  }
  if (w.zero == nullptr) return;
  for (int i = thread; i < w.groups.segments * (kBlockRows / 16); i += kThreads) {
    const uint8_t* const from = w.zero_row(chunk, i / (kBlockRows / 16));
    const int n = first * kStrip + i % (kBlockRows / 16) * 16;
    if (w.wide && n < w.n) {
      copy_to_stage(to + places.zeros + i * 16, from + n);
    } else {
      auto* const zeros = reinterpret_cast<uint8_t*>(stage + places.zeros) + i * 16;
      for (int j = 0; j < 16; ++j) zeros[j] = from[min(n + j, w.n - 1)];
    }
  }
}

// Its tokens: what the kernel before has written.
template <class Kind>
__device__ void bring_tokens(const GemmArgs& args, const Places<Kind>& places, int chunk, char* stage) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
  const char* const columns = args.columns + static_cast<int64_t>(chunk) * Kind::kColumnBytes;
#pragma unroll
  for (int i = thread * 16; i < Kind::kColumnBytes; i += kThreads * 16) {
    copy_to_stage(to + places.columns + i, columns + i);
  }
  const int bytes = args.w.groups.segments * Kind::kTokens * 8;
  const char* const facts = reinterpret_cast<const char*>(args.facts) + static_cast<int64_t>(chunk) * bytes;
  for (int i = thread * 16; i < bytes; i += kThreads * 16) copy_to_stage(to + places.facts + i, facts + i);
}

// What a warp multiplies: strips 2 * (warp / 2) and the next, tokens from warp % 2 * kTokens / 2 on.
template <class Kind>
struct Products {
  using Code = typename Kind::Code;
  static constexpr int kTiles = Kind::kTiles;
  static constexpr int kValues = Kind::kValues;
  const Weight& w;
  const Places<Kind>& places;
  int lane, strip, tile;
  float y[2][kTiles][2] = {};

  __device__ Products(const Weight& w, const Places<Kind>& places)
      : w(w),
        places(places),
        lane(static_cast<int>(threadIdx.x) % 32),
        strip(static_cast<int>(threadIdx.x) / 64 * 2),
        tile(static_cast<int>(threadIdx.x) / 32 % 2 * kTiles) {}

  __device__ int planes() const { return Code::kPlanes ? w.planes : 1; }

  __device__ const TokenChunk* facts(const char* stage, int segment) const {
    return reinterpret_cast<const TokenChunk*>(stage + places.facts) + segment * Kind::kTokens + tile * 4 + lane % 4;
  }

  // What a segment's sums are multiplied by: of rows lane / 4 and lane / 4 + 8 of both strips.
  __device__ void read_group(const char* stage, int segment, int plane, float (&scale)[2][2], int (&zero)[2][2]) const {
    const auto* const scales = reinterpret_cast<const uint16_t*>(stage + places.scales);
    const auto* const zeros = reinterpret_cast<const uint8_t*>(stage + places.zeros);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = (strip + i / 2) * kStrip + lane / 4 + i % 2 * 8;
      scale[i / 2][i % 2] = half_of(scales[(segment * planes() + plane) * kBlockRows + row], w.type);
      zero[i / 2][i % 2] = w.zero == nullptr ? Code::kTwiceMiddle : 2 * zeros[segment * kBlockRows + row];
    }
  }

  __device__ void multiply(const char* stage) {
    const int segments = w.groups.segments;
    float of_chunk[2][kTiles][2] = {};
#pragma unroll 1
    for (int plane = 0; plane < planes(); ++plane) {
      uint32_t words[2][Code::kWords];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        read_words<Code::kWidth>(stage + ((strip + i) * planes() + plane) * Code::kBytes, lane, words[i]);
      }
      int32_t acc[2][kTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          codes_of_step<Kind::kFormat, Code::kPlanes ? 1 : Code::kWidth>(words[i], step, a[i]);
        const char* const columns =
            stage + places.columns + InQuads<1>::offset(2 * Kind::kTokens, tile * 8 + lane / 4, step * 4 + lane % 4);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const uint2 b = *reinterpret_cast<const uint2*>(columns + j * 256);
#pragma unroll
          for (int i = 0; i < 2; ++i) mma<Code::kSparse>(a[i], b.x, b.y, acc[i][j]);
        }
        if ((step + 1) * segments % kSteps == 0) add_segment(stage, step * segments / kSteps, plane, acc, of_chunk);
      }
    }
    const TokenChunk* const of_tokens = facts(stage, 0);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float power = of_tokens[j * 4].power;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i / 2][j][i % 2] = __fmaf_rn(of_chunk[i / 2][j][i % 2], power, y[i / 2][j][i % 2]);
      }
    }
  }

  __device__ void add_segment(const char* stage, int segment, int plane, int32_t (&acc)[2][kTiles][4],
                              float (&of_chunk)[2][kTiles][2]) const {
    float scale[2][2];
    int zero[2][2];
    read_group(stage, segment, plane, scale, zero);
    const TokenChunk* const of_tokens = facts(stage, segment);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int sum = of_tokens[j * 4].sum;
#pragma unroll
      for (int i = 0; i < 2; ++i) add_products<Kind::kFormat>(acc[i][j], scale[i], zero[i], sum, of_chunk[i][j]);
    }
  }

  // f(value, index) for all of this thread's sums.
  template <class F>
  __device__ void for_each(F f) {
#pragma unroll
    for (int i = 0; i < Kind::kValues; ++i) f(y[i / (2 * kTiles)][i / 2 % kTiles][i % 2], i);
  }
  __device__ int row_of(int i) const { return (strip + i / (2 * kTiles)) * kStrip + lane / 4 + i % 2 * 8; }
  __device__ int token_of(int i) const { return (tile + i / 2 % kTiles) * 4 + lane % 4; }
};

template <class Kind>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ int4 shared[];
  char* const memory = reinterpret_cast<char*>(shared);
  constexpr int kStages = Kind::kStages;
  const Places<Kind> places(args.w);
  float* const four =
      reinterpret_cast<float*>(memory + places.total()) - Kind::kValues * kThreads + threadIdx.x;  // parts, added up
  const int first = static_cast<int>(blockIdx.y) * (kParts / kQuarters);
  const int chunks = args.w.chunks;
  if (!args.constant_weight) wait_for_earlier_kernels();
  let_later_kernels_start();
  Walk ahead{first, first};
  ahead.settle(first, chunks);
  Walk walk = ahead;
  const auto advance = [&](Walk& at) { at.advance(first, chunks); };
  Walk of_tokens = ahead;
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {  // codes, before the kernel in front has to be finished
    if (ahead.ended(first)) break;
    bring<Kind>(args, places, ahead.chunk, memory + i * places.stage);
    advance(ahead);
  }
  wait_for_earlier_kernels();
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (!of_tokens.ended(first)) bring_tokens<Kind>(args, places, of_tokens.chunk, memory + i * places.stage);
    asm volatile("cp.async.commit_group;" ::: "memory");
    advance(of_tokens);
  }
  Products<Kind> products(args.w, places);
  products.for_each([&](float&, int i) { four[i * kThreads] = 0.0F; });
  int slot = 0;
#pragma unroll 1
  while (!walk.ended(first)) {
    asm volatile("cp.async.wait_group %0;" : : "n"(kStages - 2) : "memory");
    __syncthreads();  // this stage has arrived, and the one before has been read
    if (!ahead.ended(first)) {
      char* const stage = memory + (slot == 0 ? kStages - 1 : slot - 1) * places.stage;
      bring<Kind>(args, places, ahead.chunk, stage);
      bring_tokens<Kind>(args, places, ahead.chunk, stage);
      advance(ahead);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    products.multiply(memory + slot * places.stage);
    slot = slot == kStages - 1 ? 0 : slot + 1;
    const int part = walk.part;
    advance(walk);
    if (walk.part == part) continue;
    products.for_each([&](float& value, int i) {
      four[i * kThreads] = __fadd_rn(four[i * kThreads], value);
      value = 0.0F;
    });
  }
  products.for_each([&](float& value, int i) { value = four[i * kThreads]; });
  finish(args, products, reinterpret_cast<float*>(memory));
}

template <class Kind>
void launch(GemmArgs args, void* scratch, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const auto* function = reinterpret_cast<const void*>(gemm_kernel<Kind>);
  allow_shared_memory(function, kMostShared, device, raised);
  convert_tokens<Kind::kFormat, InQuads<1>>(args, Kind::kTokens, true, scratch, device, stream);
  const auto rows = static_cast<unsigned>((args.w.n + kBlockRows - 1) / kBlockRows);
  launch_kernel("lowbit_gemm", function, dim3(rows, kQuarters), dim3(kThreads), Places<Kind>(args.w).total(), dim3(1),
                is_chained(stream, device), &args, stream);
}

template <int kBits>
void launch_uniform(int bits, const GemmArgs& args, void* scratch, int device, cudaStream_t stream) {
  if (bits == kBits) return launch<Kind<LowbitFormat::kUniform, kBits>>(args, scratch, device, stream);
  if constexpr (kBits > 1) launch_uniform<kBits - 1>(bits, args, scratch, device, stream);
}

}  // namespace

size_t gemm_scratch(const LowbitArgs& args) { return Scratch(Weight(args), kMostTokens).total; }

void run_gemm(const LowbitArgs& given, void* scratch, int device, cudaStream_t stream) {
  for_each_launch<kMostTokens>(given, [&](const GemmArgs& args) {
    if (given.format == LowbitFormat::kUniform) return launch_uniform<8>(given.bits, args, scratch, device, stream);
    if (given.format == LowbitFormat::kSparse12) {
      return launch<Kind<LowbitFormat::kSparse12, 0>>(args, scratch, device, stream);
    }
    launch<Kind<LowbitFormat::kPlanes, 0>>(args, scratch, device, stream);
  });
}

}  // namespace octofuse::lowbit
