// For few tokens a GEMM is a stream of weights, and every byte of them is used once. So nothing is staged: each thread
// loads 16-byte pieces of weights and tokens straight into the fragments of mma.sync (m16n8k32: tokens are its 16 rows,
// channels its 8 columns), the warps of a block split K among them, and their partial sums meet in shared memory.
// Staging the tokens there, for weights of 32 channels in flight in each thread, was slower (H200, 4096 x 4096).
//
// A fragment wants bytes 4t..4t+3 and 16+4t..16+4t+3 of 32 from thread t of a quad. The order of K inside a product
// does not matter as long as both operands keep the same one, so thread t loads 16 consecutive bytes and feeds them to
// two products.
#include "gemm/skinny/run.h"
#include "gemm/skinny/stream.cuh"

namespace octofuse::skinny {
namespace {

constexpr int kSegment = 64;  // bytes of K that one 16-byte load of each quad covers

__device__ void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int32_t (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
  static constexpr int kSums = kTokens * kPitch;  // of a warp
  // Registers for two steps of weights decide how many blocks of an SM load side by side.
  static constexpr int kWeight = kTokens * kChannels * kDepth;
  static constexpr int kBlocksPerSm = kWeight <= 128 ? 4 : kWeight <= 256 && kDepth < 4 ? 3 : kWeight <= 512 ? 2 : 1;
};

// One segment of K: a thread's 16 bytes of token rows lane / 4 and, 8 below, `high`; of each 8 channels in `w`.
template <int kGroups>
__device__ void multiply_segment(const uint4& low, const uint4& high, const uint4 (&w)[kGroups],
                                 int32_t (&acc)[kGroups][4]) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y};
  const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    mma(first, w[g].x, w[g].y, acc[g]);
    mma(second, w[g].z, w[g].w, acc[g]);
  }
}

// The partial sums of a warp: [token][kPitch].
template <class Tile>
__device__ void store(int32_t* sums, int lane, const int32_t (&acc)[Tile::kTokenTiles][Tile::kGroups][4]) {
#pragma unroll
  for (int tile = 0; tile < Tile::kTokenTiles; ++tile) {
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < (Tile::kUpper ? 2 : 1); ++half) {
        const int m = 16 * tile + lane / 4 + 8 * half;
        *reinterpret_cast<int2*>(sums + m * Tile::kPitch + 8 * g + lane % 4 * 2) =
            make_int2(acc[tile][g][2 * half], acc[tile][g][2 * half + 1]);
      }
    }
  }
}

// Adds the other warps' sums to the first one's, where this thread finishes them.
template <class Tile, class Share>
__device__ void add_warps(const Share& share, int32_t* sums) {
#pragma unroll 1
  for (int m = share.m; m < share.m_end; m += share.step) {
    auto* own = reinterpret_cast<int2*>(sums + m * Tile::kPitch + share.n);
    int2 total = make_int2(0, 0);
#pragma unroll
    for (int warp = 0; warp < kStreamWarps; ++warp) {
      const int2 part = own[warp * Tile::kSums / 2];
      total = make_int2(total.x + part.x, total.y + part.y);
    }
    *own = total;
  }
}

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
      multiply_segment(x.low[tile][d], x.high[tile][d], w.of[d], acc[tile]);
    }
  }
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, Tile::kBlocksPerSm) gemm_skinny(const __grid_constant__ KernelArgs args) {
  __shared__ TileVectors<Tile::kTokens, Tile::kChannels> vectors;
  __shared__ __align__(16) int32_t sums[kStreamWarps * Tile::kSums];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int n0 = static_cast<int>(blockIdx.x) * Tile::kChannels;
  constexpr int kAll = kStreamWarps * Tile::kStep;
  const TileShare<Tile::kTokens, Tile::kChannels, kStreamThreads, 2> share(args.output, 0, n0, 0, 1, thread);

  if (thread >= kStreamThreads) {
    load_vectors<32>(args.epilogue, args.output, 0, n0, args.constant_weight, lane, vectors);
  } else {
    // The first weights are on their way before this kernel's predecessor has to be finished.
    Weights<Tile> w;
    Weights<Tile> next_w;
    Tokens<Tile> x;
    Tokens<Tile> next_x;
    int k = thread / 32 * Tile::kStep;
    if (!args.constant_weight) wait_for_predecessors();
    w.load(args, n0, k, lane);
    next_w.load(args, n0, k + kAll, lane);
    wait_for_predecessors();
    launch_dependents();
    x.load(args, k, lane);
    next_x.load(args, k + kAll, lane);
    int32_t acc[Tile::kTokenTiles][Tile::kGroups][4] = {};
#pragma unroll 1
    for (; k < args.k; k += kAll) {
      multiply<Tile>(w, x, acc);
      w = next_w;
      x = next_x;
      next_w.load(args, n0, k + 2 * kAll, lane);
      next_x.load(args, k + 2 * kAll, lane);
    }
    store<Tile>(sums + thread / 32 * Tile::kSums, lane, acc);
  }
  __syncwarp();  // the vector warp's lanes have left their loops one by one
  __syncthreads();
  add_warps<Tile>(share, sums);
  finish_few<Tile::kPitch>(args.epilogue, args.output, vectors, share, sums);
}

}  // namespace

void run(int tile, const GemmArgs& args, int device, cudaStream_t stream) {
  static const void* const kernels[] = {
#define OCTOFUSE_KERNEL(tokens, channels, depth) \
  reinterpret_cast<const void*>(gemm_skinny<Tile<tokens, channels, depth>>),
      OCTOFUSE_SKINNY_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
  };
  const bool chained = is_chained(stream, device);
  if (chained && tile < kGemvTiles && args.outliers.kind() == Outliers::kNone && takes_shared(args, device))
    return run_shared(args, device, stream);
  KernelArgs kernel = kernel_args(args, chained);
  if (tile < kGemvTiles) return run_gemv(tile, kernel, device, chained, stream);
  const auto blocks = static_cast<unsigned>((args.n + kTiles[tile].channels - 1) / kTiles[tile].channels);
  launch_kernel("skinny", kernels[tile - kGemvTiles], dim3(blocks), dim3(kThreads), 0, dim3(1), chained, &kernel,
                stream);
}

}  // namespace octofuse::skinny
