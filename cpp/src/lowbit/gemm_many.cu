// Many tokens against low-bit weights on sm_90a, by blocks that stay and work through tiles of 128 to 256 tokens by 128
// or 192 channels.
//
// gemm.cu makes every weight again for 128 tokens, which is likely what bounds it there (cpp/README.md). Here a weight
// is made for up to 256 tokens, and K is not cut: sums of so many tokens leave no registers for those of another slice.
// wgmma adds in an order of K alone, whatever the tile: a token's bits depend neither on the other tokens nor on their
// number, but they are not those of gemm.cu, which cuts K.
//
//   two blocks of a cluster  have the same tokens and neighbouring channels; each copies half of the tokens to both
//   two producer lanes       copy weights into a ring of k-blocks, tokens into one of halves of them, tile after tile
//   2 or 3 consumer          64 channels each: dequantise half a k-block while another is multiplied, then finish
//   warpgroups               their outputs through shared memory, 32 tokens at a time
#include <cutlass/arch/reg_reconfig.h>

#include "lowbit/gemm_consumer.cuh"
#include "lowbit/gemm_many_epilogue.cuh"
#include "lowbit/kernels.h"
#include "octofuse/device.h"

namespace octofuse::lowbit {
namespace {

constexpr int kWeightStages = 3;

// ---- products ----

// The rings as a consumer goes through them.
template <class Traits>
class ManyRings {
  const ManyArgs& args_;
  ManyBarriers& barriers_;
  const char* tokens_;
  const char* weights_;
  RingPosition token_, weight_;
  int thread_;  // of its warpgroup

 public:
  __device__ ManyRings(const ManyArgs& args, ManyBarriers& barriers, const char* tokens, const char* weights)
      : args_(args),
        barriers_(barriers),
        tokens_(tokens),
        weights_(weights),
        token_(0, args.token_stages),
        weight_(0, args.layout.stages),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ const char* wait_for_weights() const {
    barriers_.weights_full[weight_.slot].wait(weight_.phase);
    return weights_ + weight_.slot * args_.layout.stage;
  }
  // Every thread has read them.
  __device__ void release_weights() {
    barriers_.weights_empty[weight_.slot].arrive();
    weight_.next();
  }

  __device__ int token_slot() const { return token_.slot; }
  __device__ uint32_t wait_for_tokens() {
    barriers_.tokens_full[token_.slot].wait(token_.phase);
    const uint32_t tokens = wgmma::low_descriptor(tokens_) + token_.slot * (Traits::kTokenBytes / 16);
    token_.next();
    return tokens;
  }
  // Tensor cores have read them: one thread tells each block that writes there.
  __device__ void release_tokens(int slot) const {
    if (thread_ < kSharing) barriers_.tokens_empty[slot].arrive(static_cast<uint32_t>(thread_));
  }
};

// The sums of a tile, in multiply_blocks()' form.
template <class Traits>
__device__ void multiply_tile(const ManyArgs& args, const char* table, ManyRings<Traits>& rings,
                              float (&sums)[Traits::kSums]) {
  Operand<Traits> operand(args, table);
  uint32_t a[kHalves][4 * kProducts];
#pragma unroll
  for (float& sum : sums) sum = 0.0F;
#pragma unroll
  for (float& sum : sums) cute::warpgroup_fence_operand(sum);
  const char* stage = rings.wait_for_weights();
  operand.start(stage);
  operand.make(stage, 0, a[0]);
  int first = 0;  // the slots of a k-block's halves
  int last = -1;
  int k_blocks = args.k_blocks;
#pragma unroll 1
  while (true) {
    first = rings.token_slot();
    multiply<Traits>(rings.wait_for_tokens(), 0, a[0], sums);
    cute::warpgroup_wait<1>();
    if (last >= 0) rings.release_tokens(last);
    operand.make(stage, 1, a[1]);
    rings.release_weights();
    last = rings.token_slot();
    multiply<Traits>(rings.wait_for_tokens(), 0, a[1], sums);
    if (--k_blocks == 0) break;
    stage = rings.wait_for_weights();
    operand.start(stage);
    cute::warpgroup_wait<1>();
    rings.release_tokens(first);
    operand.make(stage, 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  rings.release_tokens(first);
  rings.release_tokens(last);
#pragma unroll
  for (float& sum : sums) cute::warpgroup_fence_operand(sum);
}

template <class Traits>
__device__ void consume(const ManyArgs& args, ManyBarriers& barriers, const char* tokens, const char* weights,
                        char* staging) {
  wait_for_predecessors();
  const int warpgroup = wgmma::warpgroup_of(static_cast<int>(threadIdx.x));
  char* const own = staging + warpgroup * kManyStagingBytes;
  ManyRings<Traits> rings(args, barriers, tokens, weights);
#pragma unroll 1
  for (ManyWalk<Traits> tile(args); tile.valid(); tile.next()) {
    const int channel = tile.channel_tile * Traits::kChannels + warpgroup * 64;
    const uint32_t bias = FragmentEpilogue<Traits>::load_bias(args, channel);
    float sums[Traits::kSums];
    multiply_tile<Traits>(args, tokens - Traits::kTableBytes, rings, sums);
    __syncwarp();  // a lane or two told the blocks that a stage is free; stmatrix wants whole warps
    if (args.by_pieces) {
      FragmentEpilogue<Traits>(args, own, channel, bias).finish(sums, tile.token);
    } else {
#pragma unroll 1
      for (int part = 0; part < Traits::kTokens; part += kPart) {
        finish_quads(args, sums, tile.token + part, channel, warpgroup, reinterpret_cast<float*>(own));
        drop_part(sums);
      }
    }
  }
}

template <class Traits>
__device__ void init_barriers(const ManyArgs& args, ManyBarriers& barriers) {
  for (int i = 0; i < args.layout.stages; ++i) {
    barriers.weights_full[i].init(1);
    barriers.weights_empty[i].init(Traits::kConsumers);
  }
  for (int i = 0; i < args.token_stages; ++i) {
    barriers.tokens_full[i].init(1);
    barriers.tokens_empty[i].init(Traits::kConsumers / 128 * kSharing);
  }
  cutlass::arch::fence_barrier_init();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) gemm_many_kernel(const __grid_constant__ ManyArgs args) {
  extern __shared__ __align__(1024) char memory[];
  ManyBarriers& barriers = *reinterpret_cast<ManyBarriers*>(memory);
  char* const tokens = memory + kBarrierBytes + Traits::kTableBytes;
  char* const weights = tokens + args.token_stages * Traits::kTokenBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const bool is_producer = wgmma::warpgroup_of(thread) == Traits::kConsumers / 128;
  if (thread == Traits::kConsumers) init_barriers<Traits>(args, barriers);
  if constexpr (Traits::Code::kCodebook) {
    CodebookDequantizer<Traits::kType>::template fill<Traits::kConsumers>(
        reinterpret_cast<uint32_t*>(tokens - Traits::kTableBytes), args.levels);
  }
  __syncwarp();
  cute::cluster_sync();  // each block's barriers are there before the other one arrives at them
  launch_dependents();
  if (is_producer) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kConsumers == 256 ? 40 : 32>();
    const ManyProducer<Traits> producer(args, barriers);
    if (thread == Traits::kConsumers) producer.weights(weights);
    if (thread == Traits::kConsumers + 32) producer.tokens(tokens);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumers == 256 ? 232 : 160>();
    consume<Traits>(args, barriers, tokens, weights, weights + args.layout.stages * args.layout.stage);
  }
  __syncwarp();
  cute::cluster_sync();  // a block may still hear from the other: it must not end first
}

// ---- launch ----

template <class Traits>
GemmKernel many_kernel_of() {
  static DeviceFlags raised;
  return kernel_of<Traits>(reinterpret_cast<const void*>(gemm_many_kernel<Traits>), &raised);
}

template <DType kType>
GemmKernel kernel_for(const LowbitArgs& args, const ManyShape& shape) {
  GemmKernel kernel{};
  with_format(args, [&](auto format) {
    using Format = decltype(format);
    const auto of = [&](auto tokens, auto channels) {
      kernel = many_kernel_of<GemmTraits<Format::kFormat, Format::kBits, kType, tokens.value, channels.value>>();
    };
    constexpr auto k128 = std::integral_constant<int, 128>();
    constexpr auto k192 = std::integral_constant<int, 192>();
    if (shape.channels == 192) return of(k128, k192);
    if (shape.tokens == 128) return of(k128, k128);
    if (shape.tokens == 192) return of(k192, k128);
    of(std::integral_constant<int, 256>(), k128);
  });
  return kernel;
}

}  // namespace

void run_gemm_many(const LowbitArgs& given, int device, cudaStream_t stream) {
  const Weight w(given);
  const ManyShape shape(given.m, given.n, w.k_blocks);
  const GemmKernel kernel = given.type == DType::kFloat16 ? kernel_for<DType::kFloat16>(given, shape)
                                                          : kernel_for<DType::kBFloat16>(given, shape);
  allow_shared_memory(kernel.function, kMostShared, device, *kernel.raised);
  ManyArgs args{gemm_args_of(given, w, kernel, 1, shape.tokens / kSharing, 0, is_chained(stream, device))};
  args.layout.stages = kWeightStages;
  const int fixed = kBarrierBytes + kernel.table_bytes + args.layout.stages * args.layout.stage +
                    (kernel.threads / 128 - 1) * kManyStagingBytes;
  const int token_stage = shape.tokens * kBlockK;
  args.k_blocks = w.k_blocks;
  args.token_stages = std::min((kMostShared - fixed) / token_stage, kMostStages);
  args.token_tiles = shape.token_tiles;
  args.channel_pairs = shape.channel_pairs;
  args.clusters = static_cast<int>(std::min<int64_t>(device_capability(device).sm_count / kSharing, shape.tiles()));
  args.by_pieces = given.out_type == given.type && given.n % 8 == 0 && is_aligned(given.out);
  launch_kernel("lowbit_gemm_many", kernel.function, dim3(static_cast<unsigned>(args.clusters * kSharing)),
                dim3(static_cast<unsigned>(kernel.threads)), fixed + args.token_stages * token_stage, dim3(kSharing),
                args.chained, &args, stream);
}

}  // namespace octofuse::lowbit
