// The dp4a kernel for one token and few weights, a block an SM: each thread loads its share of the weights straight
// into the registers that it multiplies from, all of it at once, before earlier kernels have to be finished. A step of
// the GPT-2 124M, whose layers have at most 2.4 MB, takes 140 us so and 155 with gemv_shared.cu, which serves larger
// ones; the XL, whose projections have 2.6 MB, takes as long with them here (H200, batch 1). Copying the next kernel's
// weights into the L2 cache meanwhile changed nothing.
#include "gemm/skinny/gemv.cuh"
#include "rows/token.cuh"

namespace octofuse::skinny {
namespace {

constexpr int kChannels = kRegisterChannels;  // of a warp, at most

template <class T>
struct OwnToken : rows::Token<T, kStreamThreads> {
  using Base = rows::Token<T, kStreamThreads>;
  __device__ explicit OwnToken(const TokenArgs& args) : Base(args.rows, args.per_token, memory()) {}

  __device__ void finish(int thread) {
    this->prepare(thread);
    sync_streams();
  }

 private:
  __device__ static int8_t* memory() {
    __shared__ alignas(16) int8_t bytes[Base::kCopyColumns];
    return bytes;
  }
};

struct GivenToken {
  const TokenArgs& args;

  __device__ explicit GivenToken(const TokenArgs& args) : args(args) {}
  __device__ void prefetch(int) {}
  __device__ void finish(int) {}
  __device__ const int8_t* data() const { return args.gemm.x; }
  __device__ float scale(float given) const { return given; }
};

template <class Token>
__device__ void stream_channels(const KernelArgs& args, Token& token, int n0, int32_t* sums) {
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int k_warp = warp & ((1 << args.log_k_warps) - 1);
  WeightStream<1, kChannels> stream(args, n0 + (warp >> args.log_k_warps) * args.warp_channels,
                                    k_warp * kSpan + thread % 32 * 16);
  if (!args.constant_weight) wait_for_predecessors();
  stream.load();
  token.prefetch(thread);
  wait_for_predecessors();
  token.finish(thread);
  stream.multiply(token.data(), 0);
  stream.store(sums + warp * kChannels, 0, thread % 32);
}

// What happens once a block costs more in fetching instructions than in executing them. So while earlier kernels run,
// the epilogue is rehearsed on whatever shared memory holds, and nothing is stored: by the vector warp, which has
// nothing in flight that it would have to wait for.
template <class Token>
__global__ void __launch_bounds__(kThreads, 2) gemv_registers(const __grid_constant__ TokenArgs all) {
  constexpr int kMost = kStreamWarps * kChannels;  // channels of a block, where a warp spans K
  __shared__ TileVectors<1, kMost> vectors;
  __shared__ int32_t sums[kMost];
  __shared__ float residuals[kMost];
  const KernelArgs& args = all.gemm;
  const int thread = static_cast<int>(threadIdx.x);
  const bool loads_vectors = thread >= kStreamThreads;
  const int channels = (kStreamWarps >> args.log_k_warps) * args.warp_channels;
  const int n0 = static_cast<int>(blockIdx.x) * channels;
  const EpilogueArgs& e = args.epilogue;
  Token token(all);
  // The thread's channel; of every group of warps that share K warp_channels, whose partial sums lie kChannels apart.
  const int n = thread % kStreamThreads;
  const int group = n / args.warp_channels;
  const int parts = (group << args.log_k_warps) * kChannels + n - group * args.warp_channels;
  launch_dependents();  // they wait for this one's end, and have time to rehearse until then
#pragma unroll 1
  for (bool rehearses = args.constant_weight && loads_vectors;; rehearses = false) {
    if (!rehearses) {
      if (loads_vectors) {
        load_vector_warp(args, n0, channels, thread % 32, residuals, vectors);
      } else {
        stream_channels(args, token, n0, sums);
      }
      __syncwarp();  // the vector warp's lanes have left their loops one by one
      __syncthreads();
    }
    if (n < channels && n0 + n < args.output.n && (rehearses || !loads_vectors)) {
      int32_t total = 0;
#pragma unroll
      for (int i = 0; i < kStreamWarps; ++i) total += i >> args.log_k_warps == 0 ? sums[parts + i * kChannels] : 0;
      const Operands<1> operands{{vectors.w_scale[n]},     {token.scale(vectors.x_scale[0])},
                                 {vectors.bias[n]},        {e.residual == nullptr ? -0.0F : residuals[n]},
                                 {vectors.minus_w_sum[n]}, {vectors.x_zero[0]}};
      finish_one(e, args.output, args.output.offset(0, n0 + n), total, operands, vectors.out_inverse, !rehearses);
    }
    if (!rehearses) return;
    __syncwarp();
  }
}

}  // namespace

void run_registers(TokenArgs args, int device, bool chained, cudaStream_t stream) {
  KernelArgs& gemm = args.gemm;
  gemm.log_k_warps = log_k_warps(gemm.k);
  const int groups = kStreamWarps >> gemm.log_k_warps;
  const int slots = device_capability(device).sm_count * groups;
  gemm.warp_channels = (gemm.output.n + slots - 1) / slots;
  while (1 << gemm.log_channels < groups * gemm.warp_channels) ++gemm.log_channels;
  const auto blocks =
      static_cast<unsigned>((gemm.output.n + groups * gemm.warp_channels - 1) / (groups * gemm.warp_channels));
  const void* function = args.type == DType::kInt8 ? reinterpret_cast<const void*>(gemv_registers<GivenToken>)
                         : args.type == DType::kFloat16
                             ? reinterpret_cast<const void*>(gemv_registers<OwnToken<__half>>)
                             : reinterpret_cast<const void*>(gemv_registers<OwnToken<__nv_bfloat16>>);
  launch_kernel("skinny", function, dim3(blocks), dim3(kThreads), 0, dim3(1), chained, &args, stream);
}

}  // namespace octofuse::skinny
