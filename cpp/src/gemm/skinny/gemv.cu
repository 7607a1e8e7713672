// One to four tokens: no tensor core, so a warp reads 512 consecutive bytes of each of its channels, and has all
// of them in flight at once: the pattern that streamed fastest on an H200. K is shared by as many warps of the block as
// it fills; the others take further channels.
#include "gemm/skinny/gemv.cuh"

#include <algorithm>

#include "epilogue/digits.cuh"
#include "gemm/skinny/tiles.h"

namespace octofuse::skinny {
namespace {

// The one output of the tile that a thread finishes, if it has one. Of every group of warps that share K warp_channels
// channels, whose partial sums lie kChannels apart, and those of tokens kMost.
template <int kChannels, int kMost>
struct OneOutput {
  int m, n, parts;  // its token and channel; where the first of its partial sums lies

  __device__ void find(const KernelArgs& args, int thread) {
    m = thread >> args.log_channels;
    n = thread & ((1 << args.log_channels) - 1);
    const int group = n / args.warp_channels;
    parts = m * kMost + (group << args.log_k_warps) * kChannels + n - group * args.warp_channels;
  }
};

// Blocks of an SM: as many as keep all of a 4096 x 4096 matrix in flight, while a thread's share stays in registers.
// (Weights on their way through shared memory instead, with room for more blocks, were slower: 0.1 to 0.6 us a kernel.)
template <int kTokens, int kChannels, bool kDigits>
constexpr int kBlocksPerSm = (kTokens * kChannels == 4   ? 5
                              : kTokens * kChannels == 8 ? 4
                                                         : 3) -
                             (kDigits ? 1 : 0);

// What the streaming warps do. Their weights are on their way before anything else, and before earlier kernels have to
// be finished: with the positions of outputs found first, 4096 to 12288 squared took 8 to 11 % longer.
template <int kTokens, int kChannels, int kMost, bool kDigits, class Output>
__device__ void stream_channels(const KernelArgs& args, int n0, int32_t* sums, Output& share) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int k_warp = warp & ((1 << args.log_k_warps) - 1);
  WeightStream<kTokens, kChannels> stream(args, n0 + (warp >> args.log_k_warps) * args.warp_channels,
                                          k_warp * kSpan + thread % 32 * 16);
  if (!args.constant_weight) wait_for_predecessors();
  stream.load();
  share.find(args, thread);
  wait_for_predecessors();
  if constexpr (kDigits) {
    DigitSums<kChannels, kMost> digits(args, sums + kMost + warp * kChannels);
    stream.multiply(args.x, args.ldx, digits);
  } else {
    stream.multiply(args.x, args.ldx);
  }
  stream.store(sums + warp * kChannels, kMost, thread % 32);
}

// A block's channels for all tokens: of every group of warps that share K `args.warp_channels`.
//
// What happens once a block costs more in fetching instructions than in executing them. So while earlier kernels run,
// the epilogue is rehearsed on whatever shared memory holds, and nothing is stored: by the vector warp, which has
// nothing in flight that it would have to wait for.
//
// kDigits: LLM.int8() of one token.
template <int kTokens, int kChannels, bool kDigits>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kTokens, kChannels, kDigits>)
    gemv(const __grid_constant__ KernelArgs args) {
  constexpr int kMost = kStreamWarps * kChannels;  // channels of a block, where a warp spans K
  __shared__ TileVectors<kTokens, kMost> vectors;
  __shared__ int32_t sums[(kDigits ? kDigitRows : kTokens) * kMost];
  __shared__ float residuals[kTokens * kMost];
  __shared__ float2 factors;
  const int thread = static_cast<int>(threadIdx.x);
  const bool loads_vectors = thread >= kStreamThreads;
  const int channels = (kStreamWarps >> args.log_k_warps) * args.warp_channels;
  const int n0 = static_cast<int>(blockIdx.x) * channels;
  const EpilogueArgs& e = args.epilogue;
  OneOutput<kChannels, kMost> share;
  launch_dependents();  // they wait for this one's end, and have time to load until then
  if (loads_vectors) share.find(args, thread - kStreamThreads);
#pragma unroll 1
  for (bool rehearses = args.constant_weight && loads_vectors;; rehearses = false) {
    if (!rehearses) {
      if (loads_vectors) {
        load_vector_warp(args, n0, channels, thread % 32, residuals, vectors);
        if (kDigits && thread % 32 == 0) factors = *reinterpret_cast<const float2*>(args.factors);
      } else {
        stream_channels<kTokens, kChannels, kMost, kDigits>(args, n0, sums, share);
      }
      __syncwarp();  // the vector warp's lanes have left their loops one by one
      __syncthreads();
    }
    const bool inside = share.m < args.output.m && share.n < channels && n0 + share.n < args.output.n;
    if (inside && (rehearses || !loads_vectors)) {
      const auto total_of = [&](int row) {
        int32_t total = 0;
#pragma unroll
        for (int i = 0; i < kStreamWarps; ++i)
          total += i >> args.log_k_warps == 0 ? sums[share.parts + row * kMost + i * kChannels] : 0;
        return total;
      };
      const float residual = e.residual == nullptr ? -0.0F : residuals[share.m * channels + share.n];
      const Operands<1> operands{{vectors.w_scale[share.n]},     {vectors.x_scale[share.m]},
                                 {vectors.bias[share.n]},        {residual},
                                 {vectors.minus_w_sum[share.n]}, {vectors.x_zero[share.m]}};
      const int64_t at = args.output.offset(share.m, n0 + share.n);
      if constexpr (kDigits) {
        const int32_t totals[kDigitRows] = {total_of(0), total_of(1), total_of(2), total_of(3)};
        finish_one(e, args.output, at, join_digits(totals, factors), operands, vectors.out_inverse, !rehearses);
      } else {
        finish_one(e, args.output, at, total_of(0), operands, vectors.out_inverse, !rehearses);
      }
    }
    if (!rehearses) return;
    __syncwarp();
  }
}

}  // namespace

void run_gemv(int tile, KernelArgs args, int device, bool chained, cudaStream_t stream) {
  static const void* const kernels[] = {
#define OCTOFUSE_KERNEL(tokens, channels) reinterpret_cast<const void*>(gemv<tokens, channels, false>),
      OCTOFUSE_GEMV_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
  };
  static const void* const with_digits[] = {
#define OCTOFUSE_KERNEL(tokens, channels) reinterpret_cast<const void*>(gemv<tokens, channels, true>),
      OCTOFUSE_ONE_TOKEN_TILES(OCTOFUSE_KERNEL)
#undef OCTOFUSE_KERNEL
  };
  args.log_k_warps = log_k_warps(args.k);
  const int groups = kStreamWarps >> args.log_k_warps;
  // Fewer channels where N has not enough for every SM.
  const int slots = device_capability(device).sm_count * groups;
  args.warp_channels = std::min(kTiles[tile].channels, (args.output.n + slots - 1) / slots);
  while (1 << args.log_channels < groups * args.warp_channels) ++args.log_channels;
  const auto blocks =
      static_cast<unsigned>((args.output.n + groups * args.warp_channels - 1) / (groups * args.warp_channels));
  const void* const kernel = args.factors == nullptr ? kernels[tile] : with_digits[tile];
  launch_kernel("skinny", kernel, dim3(blocks), dim3(kThreads), 0, dim3(1), chained, &args, stream);
}

}  // namespace octofuse::skinny
