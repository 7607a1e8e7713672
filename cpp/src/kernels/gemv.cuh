// One to four tokens: no tensor core, so a warp reads 512 consecutive bytes of each of its rows of weights, and has all
// of them in flight at once: the pattern that streamed fastest on an H200. K is shared by as many warps of the block as
// it fills; the others take further rows.
#pragma once

#include <algorithm>

#include "kernels/rows.cuh"
#include "kernels/skinny.cuh"
#include "kernels/skinny_tiles.h"

namespace octofuse::skinny {

constexpr int kSpan = 512;  // bytes of a row that a warp reads at once

// The one output of the tile that a thread finishes, if it has one. Of every k_warps warps `rows` channels, whose
// partial sums lie kRows apart, and those of tokens kMost.
template <int kRows, int kMost>
struct OneOutput {
  int m, parts;  // its token; where the first of its partial sums lies

  __device__ OneOutput(const KernelArgs& args, int channels, int thread) : m(thread / channels) {
    const int n = thread - m * channels;
    const int group = n / args.rows;
    parts = m * kMost + group * args.k_warps * kRows + n - group * args.rows;
  }
};

// A warp's rows of weights, in steps of kSpan bytes times the warps that share K.
template <int kTokens, int kRows>
struct Stream {
  const KernelArgs& args;
  int rows, k, step;  // this warp's rows that exist; this lane's place in them, and from one to the next
  const int8_t* row;  // the first of them
  uint4 w[kRows];
  int32_t acc[kRows][kTokens] = {};

  __device__ Stream(const KernelArgs& args, int n, int k)
      : args(args),
        rows(min(args.rows, args.output.n - n)),
        k(k),
        step(args.k_warps * kSpan),
        row(args.w + static_cast<int64_t>(n) * args.ldw) {}

  __device__ void load() {
    const int8_t* at = row + k;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      w[i] = load_or_zero(at, i < rows && k < args.k);
      at += args.ldw;
    }
  }

  __device__ void multiply(const int8_t* tokens, int64_t ldx) {
#pragma unroll 1
    while (k < args.k) {
      uint4 x[kTokens];
#pragma unroll
      for (int m = 0; m < kTokens; ++m) x[m] = load_or_zero(tokens + m * ldx + k, m < args.output.m);
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

  // The warp's sums to `sums` ([token][pitch]), lane by lane.
  __device__ void store(int32_t* sums, int pitch, int lane) {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      int32_t mine = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t sum = __reduce_add_sync(0xFFFFFFFFU, acc[i][m]);
        if (lane == i) mine = sum;
      }
      if (lane < kRows) sums[m * pitch + lane] = mine;
    }
  }
};

// What the vector warp brings: the residual of the tile in fp32, [token][channels], and the tile's vectors. All loads
// are in flight together.
template <int kTokens, int kChannels>
__device__ void bring_vectors(const KernelArgs& args, int n0, int channels, int lane, float* residuals,
                              TileVectors<kTokens, kChannels>& vectors) {
  const EpilogueArgs& e = args.epilogue;
  const TileOutput& output = args.output;
  PendingVectors<32, kTokens, kChannels> pending;
  pending.load(e, output, 0, n0, args.constant_weight, lane);
  const bool half = e.residual_type != DType::kFloat32;
#pragma unroll 2
  for (int i = lane; e.residual != nullptr && i < output.m * channels; i += 32) {
    const int m = i / channels;
    const int64_t at = m * e.residual_ld + min(n0 + i - m * channels, output.n - 1);
    const uint32_t bits =
        half ? static_cast<const uint16_t*>(e.residual)[at] : static_cast<const uint32_t*>(e.residual)[at];
    residuals[i] = bias_of(bits, e.residual_type);
  }
  pending.store(e, output, 0, n0, lane, vectors);
}

template <class Out>
__device__ void finish_one(const EpilogueArgs& e, Out* out, int32_t sum, const Operands<1>& operands, float out_inverse,
                           bool stores) {
  int32_t acc[1] = {sum};
  Out values[1];
  const auto activate = [&](auto& t) { activate_by<Out, false>(e.activation, t); };
  epilogue<Out>(acc, operands, activate, e.clamp_low, out_inverse, values);
  if (stores) *out = values[0];
}

__device__ inline void finish_one(const EpilogueArgs& e, const TileOutput& output, int64_t at, int32_t sum,
                                  const Operands<1>& operands, float out_inverse, bool stores) {
  switch (output.type) {
    case DType::kFloat16:
      return finish_one(e, static_cast<__half*>(output.out) + at, sum, operands, out_inverse, stores);
    case DType::kBFloat16:
      return finish_one(e, static_cast<__nv_bfloat16*>(output.out) + at, sum, operands, out_inverse, stores);
    case DType::kFloat32:
      return finish_one(e, static_cast<float*>(output.out) + at, sum, operands, out_inverse, stores);
    case DType::kInt8:
      return finish_one(e, static_cast<int8_t*>(output.out) + at, sum, operands, out_inverse, stores);
    default:
      if (stores) static_cast<int32_t*>(output.out)[at] = sum;
  }
}

// Blocks of an SM: as many as keep all of a 4096 x 4096 matrix in flight, while a thread's share stays in registers.
// (Weights on their way through shared memory instead, with room for more blocks, were slower: 0.1 to 0.6 us a kernel.)
template <int kTokens, int kRows>
constexpr int kBlocksPerSm = kTokens * kRows == 4   ? 5
                             : kTokens * kRows == 8 ? 4
                                                    : 3;

// A line for each streaming thread of the grid, and nobody waits: while kernels of a chain wait for each other, memory
// goes on to deliver. Small weights alone: without the limit a step of the GPT-2 XL took 1057 us, and 997 before (H200;
// the 124M's 160 and 175, smaller changes included).
__device__ inline void bring_ahead(const Ahead& ahead, int thread) {
  constexpr int64_t kLine = 128;
  constexpr int64_t kMost = 4 << 20;
  if (ahead.bytes > kMost) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kStreamThreads + thread;
  for (int64_t at = first * kLine; at < ahead.bytes; at += static_cast<int64_t>(gridDim.x) * kStreamThreads * kLine) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(static_cast<const char*>(ahead.data) + at));
  }
}

// What the streaming warps do: their weights are on their way before earlier kernels have to be finished.
template <int kTokens, int kRows, class Input>
__device__ void stream_rows(const KernelArgs& args, Input& input, int n0, int32_t* sums, int pitch) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int k = (warp & (args.k_warps - 1)) * kSpan + lane * 16;
  Stream<kTokens, kRows> stream(args, n0 + warp / args.k_warps * args.rows, k);
  if (!args.constant_weight) wait_for_earlier_kernels();
  stream.load();
  if (args.constant_weight) bring_ahead(args.ahead, thread);
  input.prefetch(thread);
  wait_for_earlier_kernels();
  input.prepare(thread);
  stream.multiply(input.data(), input.ld());
  stream.store(sums + warp * kRows, pitch, lane);
}

// A block's channels for all tokens: of every k_warps warps `args.rows`. `input` brings the tokens: prefetch() before,
// and prepare() after earlier kernels have finished, both called by the streaming threads, then data() and ld();
// scale(m, given) is token m's scale.
//
// What happens once a block costs more in fetching instructions than in executing them. So while earlier kernels run,
// the epilogue is rehearsed on whatever shared memory holds, and nothing is stored: by the vector warp, which has
// nothing in flight that it would have to wait for. (With prepare() rehearsed as well a GPT-2's step took 232 us, and
// without 205, another change included.)
template <int kTokens, int kRows, class Input>
__device__ void gemv_tile(const KernelArgs& args, Input& input) {
  constexpr int kMost = kStreams * kRows;  // channels of a block, where a warp spans K
  __shared__ TileVectors<kTokens, kMost> vectors;
  __shared__ int32_t sums[kTokens * kMost];
  __shared__ float residuals[kTokens * kMost];
  const int thread = static_cast<int>(threadIdx.x);
  const bool brings_vectors = thread >= kStreamThreads;
  const int channels = kStreams / args.k_warps * args.rows;
  const int n0 = static_cast<int>(blockIdx.x) * channels;
  const EpilogueArgs& e = args.epilogue;
  const int place = thread % kStreamThreads;  // of the output, [token][channels]
  const OneOutput<kRows, kMost> share(args, channels, place);
  let_later_kernels_start();  // they wait for this one's end, and have time to rehearse until then
#pragma unroll 1
  for (bool rehearses = args.constant_weight && brings_vectors;; rehearses = false) {
    if (!rehearses) {
      if (brings_vectors) {
        bring_vectors(args, n0, channels, thread % 32, residuals, vectors);
      } else {
        stream_rows<kTokens, kRows>(args, input, n0, sums, kMost);
      }
      __syncwarp();  // the vector warp's lanes have left their loops one by one
      __syncthreads();
    }
    const int n = place - share.m * channels;
    if (share.m < args.output.m && n0 + n < args.output.n && (rehearses || !brings_vectors)) {
      int32_t total = 0;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) total += i < args.k_warps ? sums[share.parts + i * kRows] : 0;
      const float residual = e.residual == nullptr ? -0.0F : residuals[place];
      const float x_scale = input.scale(share.m, vectors.x_scale[share.m]);
      const Operands<1> operands{{vectors.w_scale[n]},     {x_scale},
                                 {vectors.bias[n]},        {residual},
                                 {vectors.minus_w_sum[n]}, {vectors.x_zero[share.m]}};
      finish_one(e, args.output, args.output.offset(share.m, n0 + n), total, operands, vectors.out_inverse, !rehearses);
    }
    if (!rehearses) return;
    __syncwarp();
  }
}

// Sets how many of the block's warps share K, and how many rows they take, fewer where N has not enough for every SM;
// returns the number of blocks.
inline unsigned gemv_blocks(int tile, int sm_count, KernelArgs& args) {
  args.k_warps = 1;
  while (args.k_warps < kStreams && args.k_warps * kSpan < args.k) args.k_warps *= 2;
  const int groups = kStreams / args.k_warps;
  args.rows = std::min(kTiles[tile].channels, (args.output.n + sm_count * groups - 1) / (sm_count * groups));
  return static_cast<unsigned>((args.output.n + groups * args.rows - 1) / (groups * args.rows));
}

}  // namespace octofuse::skinny
