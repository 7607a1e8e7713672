// The skinny kernels: for few tokens a GEMM is a stream of weights, and every byte of them is used once. So nothing is
// staged: each thread loads 16-byte pieces of weights and tokens straight into the fragments of mma.sync
// (m16n8k32: tokens are its 16 rows, channels its 8 columns), the warps of a block split K among them, and their
// partial sums meet in shared memory by integer atomics, which are exact in any order.
//
// A fragment wants bytes 4t..4t+3 and 16+4t..16+4t+3 of 32 from thread t of a quad. The order of K inside a product
// does not matter as long as both operands keep the same one, so thread t loads 16 consecutive bytes and feeds them to
// two products.
#include "kernels/gemm_skinny.h"

#include "kernels/launch.h"
#include "kernels/tile_epilogue.cuh"

namespace octofuse::skinny {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSegment = 64;  // bytes of K that one 16-byte load of each quad covers

struct KernelArgs {
  const int8_t* x;
  const int8_t* w;
  int64_t ldx, ldw;
  int k;
  EpilogueArgs epilogue;
  TileOutput output;
  bool constant_weight;
};

__device__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int32_t (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ uint4 load_or_zero(const int8_t* address, bool inside) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (inside) v = __ldg(reinterpret_cast<const uint4*>(address));
  return v;
}

template <int kTokens_, int kChannels_, int kDepth_>
struct Tile {
  static constexpr int kTokens = kTokens_;
  static constexpr int kChannels = kChannels_;
  static constexpr int kDepth = kDepth_;
  static constexpr int kTokenTiles = (kTokens + 15) / 16;
  static constexpr bool kUpper = kTokens > 8;  // rows 8..15 of a product hold tokens
  static constexpr int kGroups = kChannels / 8;
  static constexpr int kStep = kSegment * kDepth;  // bytes of K that a warp takes at a time
  static constexpr int kPitch = kChannels + 4;
  // Registers for two steps of weights decide how many blocks of an SM load side by side.
  static constexpr int kBlocksPerSm = kTokens * kChannels * kDepth <= 128   ? 4
                                      : kTokens * kChannels * kDepth <= 256 ? 3
                                                                            : 2;
};

// What a thread holds of one step of K.
template <class Tile>
struct Weights {
  uint4 of[Tile::kDepth][Tile::kGroups];

  __device__ void load(const KernelArgs& args, int n0, int k, int lane) {
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      const int n = min(n0 + 8 * g + lane / 4, args.output.n - 1);
      const int8_t* row = args.w + n * args.ldw + lane % 4 * 16;
#pragma unroll
      for (int d = 0; d < Tile::kDepth; ++d) {
        const int at = k + d * kSegment;
        of[d][g] = load_or_zero(row + at, at + lane % 4 * 16 < args.k);
      }
    }
  }
};

template <class Tile>
struct Tokens {
  uint4 low[Tile::kTokenTiles][Tile::kDepth];
  uint4 high[Tile::kTokenTiles][Tile::kDepth];

  // Tokens beyond M read as zero.
  __device__ void load(const KernelArgs& args, int k, int lane) {
    const int8_t* x = args.x + lane / 4 * args.ldx + lane % 4 * 16;
#pragma unroll
    for (int tile = 0; tile < Tile::kTokenTiles; ++tile) {
      const int m = 16 * tile + lane / 4;
#pragma unroll
      for (int d = 0; d < Tile::kDepth; ++d) {
        const int at = k + d * kSegment;
        const bool inside = at + lane % 4 * 16 < args.k;
        low[tile][d] = load_or_zero(x + 16 * tile * args.ldx + at, inside && m < args.output.m);
        high[tile][d] = make_uint4(0, 0, 0, 0);
        if constexpr (Tile::kUpper) {
          high[tile][d] = load_or_zero(x + (16 * tile + 8) * args.ldx + at, inside && m + 8 < args.output.m);
        }
      }
    }
  }
};

template <class Tile>
__device__ void multiply(const Weights<Tile>& w, const Tokens<Tile>& x,
                         int32_t (&acc)[Tile::kTokenTiles][Tile::kGroups][4]) {
#pragma unroll
  for (int d = 0; d < Tile::kDepth; ++d) {
#pragma unroll
    for (int tile = 0; tile < Tile::kTokenTiles; ++tile) {
      const uint4 low = x.low[tile][d];
      const uint4 high = x.high[tile][d];
      const uint32_t first[4] = {low.x, high.x, low.y, high.y};
      const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int g = 0; g < Tile::kGroups; ++g) {
        mma(first, w.of[d][g].x, w.of[d][g].y, acc[tile][g]);
        mma(second, w.of[d][g].z, w.of[d][g].w, acc[tile][g]);
      }
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocksPerSm) gemm_skinny(const __grid_constant__ KernelArgs args) {
  __shared__ TileVectors<Tile::kTokens, Tile::kChannels> vectors;
  __shared__ __align__(16) int32_t sums[Tile::kTokens * Tile::kPitch];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int n0 = static_cast<int>(blockIdx.x) * Tile::kChannels;
  constexpr int kAll = kWarps * Tile::kStep;
  int k = thread / 32 * Tile::kStep;

  // The first weights are on their way before this kernel's predecessor has to be finished.
  Weights<Tile> w;
  Weights<Tile> next_w;
  Tokens<Tile> x;
  Tokens<Tile> next_x;
  if (!args.constant_weight) wait_for_earlier_kernels();
  w.load(args, n0, k, lane);
  next_w.load(args, n0, k + kAll, lane);
  wait_for_earlier_kernels();
  let_later_kernels_start();
  x.load(args, k, lane);
  next_x.load(args, k + kAll, lane);
  for (int i = thread; i < Tile::kTokens * Tile::kPitch; i += kThreads) sums[i] = 0;

  // Waiting for these beside its other loads costs the last warp nothing.
  if (thread >= kThreads - 32) load_vectors<32>(args.epilogue, args.output, 0, n0, true, lane, vectors);

  int32_t acc[Tile::kTokenTiles][Tile::kGroups][4] = {};
#pragma unroll 1
  for (; k < args.k; k += kAll) {
    multiply<Tile>(w, x, acc);
    w = next_w;
    x = next_x;
    next_w.load(args, n0, k + 2 * kAll, lane);
    next_x.load(args, k + 2 * kAll, lane);
  }
  __syncthreads();

#pragma unroll
  for (int tile = 0; tile < Tile::kTokenTiles; ++tile) {
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < (Tile::kUpper ? 4 : 2); ++i) {
        const int m = 16 * tile + lane / 4 + i / 2 * 8;
        atomicAdd(&sums[m * Tile::kPitch + 8 * g + lane % 4 * 2 + i % 2], acc[tile][g][i]);
      }
    }
  }
  __syncthreads();
  const TileShare<Tile::kTokens, Tile::kChannels, kThreads, 2> share(args.output, 0, n0, 0, 1, thread);
  finish_few<Tile::kPitch>(args.epilogue, args.output, vectors, share, sums);
}

// One to four tokens: no tensor core, so a warp reads 512 consecutive bytes of a row, the pattern that streamed fastest
// on an H200 (4 rows a warp, many warps: 96 % of the copy bandwidth). Two groups of 8 warps take 4 channels each.
constexpr int kGemvThreads = 512;
constexpr int kGemvChannels = 8;
constexpr int kGemvRows = 4;

template <int kTokens>
__global__ void __launch_bounds__(kGemvThreads, kTokens == 1 ? 3 : 2) gemv(const __grid_constant__ KernelArgs args) {
  constexpr int kPitch = kGemvChannels + 4;
  constexpr int kAll = 8 * 512;
  __shared__ TileVectors<kTokens, kGemvChannels> vectors;
  __shared__ __align__(16) int32_t sums[kTokens * kPitch];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int n0 = static_cast<int>(blockIdx.x) * kGemvChannels;
  const int first = thread / 256 * kGemvRows;  // of this warp's channels
  int k = thread / 32 % 8 * 512 + lane * 16;

  const int8_t* rows[kGemvRows];
  uint4 w[kGemvRows];
#pragma unroll
  for (int i = 0; i < kGemvRows; ++i) rows[i] = args.w + min(n0 + first + i, args.output.n - 1) * args.ldw;
  if (!args.constant_weight) wait_for_earlier_kernels();
#pragma unroll
  for (int i = 0; i < kGemvRows; ++i) w[i] = load_or_zero(rows[i] + k, k < args.k);
  wait_for_earlier_kernels();
  let_later_kernels_start();
  if (thread < kTokens * kPitch) sums[thread] = 0;

  if (thread >= kGemvThreads - 32) load_vectors<32>(args.epilogue, args.output, 0, n0, true, lane, vectors);

  int32_t acc[kGemvRows][kTokens] = {};
#pragma unroll 1
  while (k < args.k) {
    uint4 x[kTokens];
#pragma unroll
    for (int m = 0; m < kTokens; ++m) x[m] = load_or_zero(args.x + m * args.ldx + k, m < args.output.m);
#pragma unroll
    for (int i = 0; i < kGemvRows; ++i) {
#pragma unroll
      for (int m = 0; m < kTokens; ++m) {
        acc[i][m] = __dp4a(static_cast<int>(w[i].x), static_cast<int>(x[m].x), acc[i][m]);
        acc[i][m] = __dp4a(static_cast<int>(w[i].y), static_cast<int>(x[m].y), acc[i][m]);
        acc[i][m] = __dp4a(static_cast<int>(w[i].z), static_cast<int>(x[m].z), acc[i][m]);
        acc[i][m] = __dp4a(static_cast<int>(w[i].w), static_cast<int>(x[m].w), acc[i][m]);
      }
    }
    k += kAll;
#pragma unroll
    for (int i = 0; i < kGemvRows; ++i) w[i] = load_or_zero(rows[i] + k, k < args.k);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kGemvRows; ++i) {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      const int32_t sum = __reduce_add_sync(0xFFFFFFFFU, acc[i][m]);
      if (lane == 0) atomicAdd(&sums[m * kPitch + first + i], sum);
    }
  }
  __syncthreads();
  const TileShare<kTokens, kGemvChannels, kGemvThreads, 1> share(args.output, 0, n0, 0, 1, thread);
  finish_few<kPitch>(args.epilogue, args.output, vectors, share, sums);
}

}  // namespace

void run(int tile, const GemmArgs& args, int device, cudaStream_t stream) {
  static const void* const kernels[] = {
#define OCTOFUSE_KERNEL(tokens) reinterpret_cast<const void*>(gemv<tokens>),
      OCTOFUSE_GEMV_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
#define OCTOFUSE_KERNEL(tokens, channels, depth) \
  reinterpret_cast<const void*>(gemm_skinny<Tile<tokens, channels, depth>>),
          OCTOFUSE_SKINNY_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
  };
  const bool chained = is_chained(stream, device);
  KernelArgs kernel{args.x,
                    args.w,
                    args.ldx,
                    args.ldw,
                    static_cast<int>(args.k),
                    args.epilogue,
                    output_of(args),
                    chained && args.constant_weight};
  const auto blocks = static_cast<unsigned>((args.n + kTiles[tile].channels - 1) / kTiles[tile].channels);
  const auto threads = static_cast<unsigned>(kTiles[tile].depth == 0 ? kGemvThreads : kThreads);
  launch_kernel("skinny", kernels[tile], dim3(blocks), dim3(threads), 0, dim3(1), chained, &kernel, stream);
}

}  // namespace octofuse::skinny
