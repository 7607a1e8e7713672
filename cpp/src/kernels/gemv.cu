// One to four tokens: no tensor core, so a warp reads 512 consecutive bytes of each of its rows of weights, and has all
// of them in flight at once: the pattern that streamed fastest on an H200. K is shared by as many warps of the block as
// it fills; the others take further rows.
#include "kernels/gemv.cuh"

#include <algorithm>

namespace octofuse::skinny {
namespace {

// The one output of the tile that a thread finishes, if it has one. Of every k_warps warps `rows` channels, whose
// partial sums lie kRows apart, and those of tokens kMost.
template <int kRows, int kMost>
struct OneOutput {
  int m, n, parts;  // its token and channel; where the first of its partial sums lies

  __device__ void find(const KernelArgs& args, int thread) {
    m = thread >> args.log_channels;
    n = thread & ((1 << args.log_channels) - 1);
    const int group = n / args.rows;
    parts = m * kMost + (group << args.log_k_warps) * kRows + n - group * args.rows;
  }
};

// Blocks of an SM: as many as keep all of a 4096 x 4096 matrix in flight, while a thread's share stays in registers.
// (Weights on their way through shared memory instead, with room for more blocks, were slower: 0.1 to 0.6 us a kernel.)
template <int kTokens, int kRows>
constexpr int kBlocksPerSm = kTokens * kRows == 4   ? 5
                             : kTokens * kRows == 8 ? 4
                                                    : 3;

// What the streaming warps do. Their weights are on their way before anything else, and before earlier kernels have to
// be finished: with the places of outputs found first, 4096 to 12288 squared took 8 to 11 % longer.
template <int kTokens, int kRows, class Output>
__device__ void stream_rows(const KernelArgs& args, int n0, int32_t* sums, int pitch, Output& share) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int k_warp = warp & ((1 << args.log_k_warps) - 1);
  Stream<kTokens, kRows> stream(args, n0 + (warp >> args.log_k_warps) * args.rows, k_warp * kSpan + thread % 32 * 16);
  if (!args.constant_weight) wait_for_earlier_kernels();
  stream.load();
  share.find(args, thread);
  wait_for_earlier_kernels();
  stream.multiply(args.x, args.ldx);
  stream.store(sums + warp * kRows, pitch, thread % 32);
}

// A block's channels for all tokens: of every group of warps that share K `args.rows`.
//
// What happens once a block costs more in fetching instructions than in executing them. So while earlier kernels run,
// the epilogue is rehearsed on whatever shared memory holds, and nothing is stored: by the vector warp, which has
// nothing in flight that it would have to wait for.
template <int kTokens, int kRows>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kTokens, kRows>)
    gemv(const __grid_constant__ KernelArgs args) {
  constexpr int kMost = kStreams * kRows;  // channels of a block, where a warp spans K
  __shared__ TileVectors<kTokens, kMost> vectors;
  __shared__ int32_t sums[kTokens * kMost];
  __shared__ float residuals[kTokens * kMost];
  const int thread = static_cast<int>(threadIdx.x);
  const bool brings_vectors = thread >= kStreamThreads;
  const int channels = (kStreams >> args.log_k_warps) * args.rows;
  const int n0 = static_cast<int>(blockIdx.x) * channels;
  const EpilogueArgs& e = args.epilogue;
  OneOutput<kRows, kMost> share;
  let_later_kernels_start();  // they wait for this one's end, and have time to load until then
  if (brings_vectors) share.find(args, thread - kStreamThreads);
#pragma unroll 1
  for (bool rehearses = args.constant_weight && brings_vectors;; rehearses = false) {
    if (!rehearses) {
      if (brings_vectors) {
        bring_vectors(args, n0, channels, thread % 32, residuals, vectors);
      } else {
        stream_rows<kTokens, kRows>(args, n0, sums, kMost, share);
      }
      __syncwarp();  // the vector warp's lanes have left their loops one by one
      __syncthreads();
    }
    const bool inside = share.m < args.output.m && share.n < channels && n0 + share.n < args.output.n;
    if (inside && (rehearses || !brings_vectors)) {
      int32_t total = 0;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) total += i >> args.log_k_warps == 0 ? sums[share.parts + i * kRows] : 0;
      const float residual = e.residual == nullptr ? -0.0F : residuals[share.m * channels + share.n];
      const Operands<1> operands{{vectors.w_scale[share.n]},     {vectors.x_scale[share.m]},
                                 {vectors.bias[share.n]},        {residual},
                                 {vectors.minus_w_sum[share.n]}, {vectors.x_zero[share.m]}};
      finish_one(e, args.output, args.output.offset(share.m, n0 + share.n), total, operands, vectors.out_inverse,
                 !rehearses);
    }
    if (!rehearses) return;
    __syncwarp();
  }
}

}  // namespace

void run_gemv(int tile, KernelArgs args, int device, bool chained, cudaStream_t stream) {
  static const void* const kernels[] = {
#define OCTOFUSE_KERNEL(tokens, rows) reinterpret_cast<const void*>(gemv<tokens, rows>),
      OCTOFUSE_GEMV_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
  };
  while (1 << args.log_k_warps < kStreams && (kSpan << args.log_k_warps) < args.k) ++args.log_k_warps;
  const int groups = kStreams >> args.log_k_warps;
  // Fewer rows where N has not enough for every SM.
  const int slots = device_capability(device).sm_count * groups;
  args.rows = std::min(kTiles[tile].channels, (args.output.n + slots - 1) / slots);
  while (1 << args.log_channels < groups * args.rows) ++args.log_channels;
  const auto blocks = static_cast<unsigned>((args.output.n + groups * args.rows - 1) / (groups * args.rows));
  launch_kernel("skinny", kernels[tile], dim3(blocks), dim3(kThreads), 0, dim3(1), chained, &args, stream);
}

}  // namespace octofuse::skinny
