// One to four tokens: no tensor core, so a warp reads 512 consecutive bytes of each of its rows of weights, and has all
// of them in flight at once: the pattern that streamed fastest on an H200. K is shared by as many warps of the block as
// it fills; the others take further rows.
#include "kernels/skinny.cuh"
#include "kernels/skinny_tiles.h"

namespace octofuse::skinny {
namespace {

constexpr int kSpan = 512;  // bytes of a row that a warp reads at once

// One output of the tile for each thread.
struct OneOutput {
  static constexpr int kPiece = 1;
  static constexpr int step = 1;
  int m, m_end, n;
  int m0 = 0;
  int n0;
  static constexpr bool stores = true;

  __device__ OneOutput(const TileOutput& output, int tokens, int n0, int channels, int thread) : n0(n0) {
    m = thread / channels;
    n = thread % channels;
    m_end = m < min(tokens, output.m) && n0 + n < output.n ? m + 1 : 0;
  }
};

template <int kTokens, int kRows>
struct Stream {
  const KernelArgs& args;
  int rows, k;        // this warp's rows that exist; this lane's place in them
  const int8_t* row;  // the first of them
  uint4 w[kRows];
  int32_t acc[kRows][kTokens] = {};

  __device__ Stream(const KernelArgs& args, int first, int k)
      : args(args), rows(args.output.n - first), k(k), row(args.w + first * args.ldw) {}

  __device__ void load() {
    const int8_t* at = row + k;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      w[i] = load_or_zero(at, i < rows && k < args.k);
      at += args.ldw;
    }
  }

  __device__ void multiply(int step) {
#pragma unroll 1
    while (k < args.k) {
      uint4 x[kTokens];
#pragma unroll
      for (int m = 0; m < kTokens; ++m) x[m] = load_or_zero(args.x + m * args.ldx + k, m < args.output.m);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
          acc[i][m] = __dp4a(static_cast<int>(w[i].x), static_cast<int>(x[m].x), acc[i][m]);
          acc[i][m] = __dp4a(static_cast<int>(w[i].y), static_cast<int>(x[m].y), acc[i][m]);
          acc[i][m] = __dp4a(static_cast<int>(w[i].z), static_cast<int>(x[m].z), acc[i][m]);
          acc[i][m] = __dp4a(static_cast<int>(w[i].w), static_cast<int>(x[m].w), acc[i][m]);
        }
      }
      k += step;
      load();
    }
    __syncwarp();
  }

  // The warp's sums to `sums` ([token][kStreams * kRows]), lane by lane.
  __device__ void store(int32_t* sums, int lane) {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      int32_t mine = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t sum = __reduce_add_sync(0xFFFFFFFFU, acc[i][m]);
        if (lane == i) mine = sum;
      }
      if (lane < kRows) sums[m * kStreams * kRows + lane] = mine;
    }
  }
};

// Blocks of an SM: as many as keep all of a 4096 x 4096 matrix in flight, while a thread's share stays in registers.
template <int kTokens, int kRows>
constexpr int kBlocksPerSm = kTokens * kRows == 4   ? 5
                             : kTokens * kRows == 8 ? 4
                                                    : 3;

template <int kTokens, int kRows>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kTokens, kRows>)
    gemv(const __grid_constant__ KernelArgs args) {
  constexpr int kMost = kStreams * kRows;  // channels of a block, where a warp spans K
  __shared__ TileVectors<kTokens, kMost> vectors;
  __shared__ int32_t sums[kTokens * kMost];
  __shared__ int32_t totals[kTokens * kMost];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int channels = kMost / args.k_warps;
  const int n0 = static_cast<int>(blockIdx.x) * channels;
  const OneOutput share(args.output, kTokens, n0, channels, thread);

  if (warp == kStreams) {
    load_vectors<32>(args.epilogue, args.output, 0, n0, args.constant_weight, lane, vectors);
  } else {
    const int slice = warp & (args.k_warps - 1);
    Stream<kTokens, kRows> stream(args, n0 + warp / args.k_warps * kRows, slice * kSpan + lane * 16);
    // The first weights are on their way before this kernel's predecessor has to be finished.
    if (!args.constant_weight) wait_for_earlier_kernels();
    stream.load();
    wait_for_earlier_kernels();
    let_later_kernels_start();
    stream.multiply(args.k_warps * kSpan);
    stream.store(sums + warp * kRows, lane);
  }
  __syncwarp();  // the vector warp's lanes have left their loops one by one
  __syncthreads();
  if (share.m >= share.m_end) return;
  const int32_t* parts = sums + (share.m * kStreams + share.n / kRows * args.k_warps) * kRows + share.n % kRows;
  int32_t total = 0;
  for (int i = 0; i < args.k_warps; ++i) total += parts[i * kRows];
  totals[share.m * kMost + share.n] = total;
  finish_few<kMost>(args.epilogue, args.output, vectors, share, totals);
}

}  // namespace

void run_gemv(int tile, KernelArgs args, bool chained, cudaStream_t stream) {
  static const void* const kernels[] = {
#define OCTOFUSE_KERNEL(tokens, rows) reinterpret_cast<const void*>(gemv<tokens, rows>),
      OCTOFUSE_GEMV_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
  };
  args.k_warps = 1;
  while (args.k_warps < kStreams && args.k_warps * kSpan < args.k) args.k_warps *= 2;
  const int channels = kStreams / args.k_warps * kTiles[tile].channels;
  const auto blocks = static_cast<unsigned>((args.output.n + channels - 1) / channels);
  launch_kernel("skinny", kernels[tile], dim3(blocks), dim3(kThreads), 0, dim3(1), chained, &args, stream);
}

}  // namespace octofuse::skinny
