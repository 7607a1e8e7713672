// More than 4 tokens against low-bit weights on sm_90a: out[tokens, channels] = x * w^T. Weights cross memory as codes
// and become fp16, bf16 or int8 in the registers of the threads that multiply them; tokens are of that type already.
// gemm.cu has the kernels of fp16 and bf16, gemm_integer.cu those of int8.
//
// Words. Row tile: 16 output channels. k-block: 128 columns of K. Stage: the shared memory of one k-block, or of half
// of one where too few would fit (kStagesOfBlock); a ring is several stages used in turn. K slice: neighbouring
// k-blocks. Cluster: `split` blocks with the same outputs, which divide the K slices. "Group" is two things: in kGroups
// and KRange a team of consumer warpgroups with a ring of its own; in Groups and `segments` the columns that share a
// scale.
//
//   global memory         shared memory: one stage                  registers of a consumer warpgroup
//   tokens        --TMA-> [run][token][128 bytes] ----------------> (wgmma reads its second operand where it lies)
//   codes         --TMA-> [row tile][plane][lane's words]   --+
//   scales        --TMA-> [segment][plane][channel]         --+---> weights: wgmma's first operand
//   zero points   --TMA-> [segment][channel]                --+     sums: 64 channels x the block's tokens
//                                                                     |
//                         when K is done, in the rings' place:        |
//   out   <-- formula --  sums [group][token][channel]  <-------------+
//
// Who does what:
//   4 producer warps     (gemm_producer.cuh) one lane of each issues copies. With 4 groups a warp copies all that one
//                        group reads; with 2, two warps copy weights and two tokens; with 1, one each, two are idle.
//   barriers             in front of each stage (gemm_ring.cuh): its bytes have arrived; the consumers have read it.
//   consumer warpgroups  (gemm_consumer.cuh) 64 channels each: read the codes, make the operand of a run in registers
//                        (64 columns, of int8 128; of two runs beside 16 tokens), start wgmmas on it, and meanwhile
//                        make the next. More warpgroups than the channels need form groups that divide K. With fewer
//                        groups than slices (the sums of 128 tokens take the registers of twice the threads) a group
//                        takes two, one after the other.
//   then all consumers   leave their sums in the rings' place, add those of the groups, then through distributed shared
//                        memory those of the cluster's blocks. Each block finishes every split-th token.
//
// How K is cut depends on N, K and the kind of weight alone (GemmShape), and slices are added as a fixed tree: a
// token's bits depend neither on the other tokens nor on their number. Sums of int8 are exact: there the number of
// tokens decides as well (integer_shape.h).
//
// Measured on an H200 and left out: int8 products of both bytes of a token, as for few tokens (their sums have to be
// scaled for every k-block: twice as long at 64 tokens); two blocks an SM.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "lowbit/gemm_consumer.cuh"
#include "lowbit/gemm_producer.cuh"
#include "lowbit/shape.h"

namespace octofuse::lowbit {

// ---- the end ----

// A thread's sums to [token][channel] in shared memory.
template <class Traits>
__device__ void store_sums(const typename Traits::Sum (&sums)[Traits::kSums], typename Traits::Sum* outputs) {
  const int thread = static_cast<int>(threadIdx.x) % Traits::kGroupThreads;
#pragma unroll
  for (int i = 0; i < Traits::kSums; ++i) {
    const int token = i / 4 * 8 + thread % 4 * 2 + i % 2;
    outputs[token * Traits::kPitch + thread / 32 * kTileRows + thread % 32 / 4 + i / 2 % 2 * 8] = sums[i];
  }
}

// The sum of kCount numbers (but those from `count` on) as a tree: of neighbours, of neighbouring sums, and so on. So K
// slices give the same bits in whichever groups and blocks they are.
template <int kCount, class Sum>
__device__ inline Quad<Sum> sum_of(Quad<Sum> (&v)[kCount], int count) {
#pragma unroll
  for (int apart = 1; apart < kCount; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * apart) {
      if (i + apart >= count) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i].values[j] = add(v[i].values[j], v[i + apart].values[j]);
    }
  }
  return v[0];
}

// The outputs that a thread adds up and finishes: 4 channels of a token, then of every kStep-th one behind it.
template <class Traits>
struct OutputQuad {
  static constexpr int kOfToken = Traits::kChannels / 4;
  static constexpr int kStep = Traits::kConsumers / kOfToken;
  int token, channel;

  __device__ OutputQuad()
      : token(static_cast<int>(threadIdx.x) / kOfToken), channel(static_cast<int>(threadIdx.x) % kOfToken * 4) {}
  __device__ int at(int of_token) const { return of_token * Traits::kPitch + channel; }
};

// Adds the groups' sums, in the place of the first group's.
template <class Traits>
__device__ void add_groups(const GemmArgs& args, typename Traits::Sum* outputs) {
  if constexpr (Traits::kGroups > 1) {
    barrier_sync<kConsumerBarrier, Traits::kConsumers>();
    OutputQuad<Traits> quad;
#pragma unroll 1
    for (int token = quad.token; token < min(Traits::kTokens, args.m); token += OutputQuad<Traits>::kStep) {
      Quad<typename Traits::Sum> v[Traits::kGroups];
#pragma unroll
      for (int i = 0; i < Traits::kGroups; ++i) {
        v[i] = *reinterpret_cast<const Quad<typename Traits::Sum>*>(outputs + i * Traits::kOutputs + quad.at(token));
      }
      *reinterpret_cast<Quad<typename Traits::Sum>*>(outputs + quad.at(token)) = sum_of(v, Traits::kGroups);
    }
  }
}

template <class Sum>
__device__ inline Quad<Sum> load_sums(uint32_t local, int block) {
  const int4 bits = wgmma::load_from_block(local, static_cast<uint32_t>(block));
  return reinterpret_cast<const Quad<Sum>&>(bits);
}

// Every block of the cluster adds up and finishes every args.split-th token.
template <class Traits>
__device__ void finish(const GemmArgs& args, const typename Traits::Sum* outputs) {
  using Stored = std::conditional_t<Traits::kIntegers, int32_t, float>;
  const uint32_t local = cute::cast_smem_ptr_to_uint(outputs);
  const int token0 = first_token<Traits>(args);
  OutputQuad<Traits> quad;
  const int n = static_cast<int>(blockIdx.x) * Traits::kChannels + quad.channel;
  if (n >= args.n) return;
#pragma unroll 1
  for (int token = quad.token * args.split + static_cast<int>(blockIdx.y); token < min(Traits::kTokens, args.m);
       token += OutputQuad<Traits>::kStep * args.split) {
    const Addends<4> addends = args.epilogue.load<4>(token0 + token, n);
    Quad<typename Traits::Sum> v[kMostSplit];
#pragma unroll
    for (int block = 0; block < kMostSplit; ++block) {
      if (block < args.split) v[block] = load_sums<typename Traits::Sum>(local + quad.at(token) * 4, block);
    }
    const Quad<typename Traits::Sum> sum = sum_of(v, args.split);
    Stored y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = static_cast<Stored>(sum.values[i]);
    args.epilogue.store(y, addends, token0 + token, n);
  }
}

// Makes memory of the rings' barriers, among which the sums will lie: what holds a barrier may not be written to in
// another way before (PTX ISA, mbarrier.inval). Without it single pairs of sums were wrong under racecheck's delays.
template <class Traits>
__device__ void invalidate_barriers(const GemmArgs& args, char* rings) {
  const int barrier = static_cast<int>(threadIdx.x);  // a stage has two
  if (barrier < 2 * Traits::kGroups * args.layout.stages) {
    const char* const place = rings + barrier / 2 * args.layout.stage - kBarriersOfStage + barrier % 2 * 8;
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" : : "r"(shared_address(place)) : "memory");
  }
  barrier_sync<kConsumerBarrier, Traits::kConsumers>();
}

// A consumer warpgroup's way: the sums of its group's K slices, which it leaves in shared memory and adds to the
// others'.
template <class Traits, bool kPlain>
__device__ void multiply_slices(const GemmArgs& args, const char* table, char* rings) {
  constexpr int kWarpgroups = Traits::kGroupThreads / 128;
  const int group = wgmma::warpgroup_of(static_cast<int>(threadIdx.x)) / kWarpgroups;
  OneRing<Traits> ring(rings + group * args.layout.stages * args.layout.stage, args.layout);
  typename Traits::Sum sums[Traits::kSums];
  typename Traits::Sum total[Traits::kSums];
#pragma unroll 1
  for (int i = 0; i < Traits::kSlicesOfGroup; ++i) {
    const KRange<Traits> range(args, group, i, 1);
    for_each_sum(sums, [](auto& sum) { sum = 0; });
    multiply_tile<Traits, kPlain>(args, table, ring, range.end - range.first, sums);
#pragma unroll
    for (int j = 0; j < Traits::kSums; ++j) total[j] = i == 0 ? sums[j] : add(total[j], sums[j]);
  }
  barrier_sync<kConsumerBarrier, Traits::kConsumers>();  // nobody reads the rings any more
  invalidate_barriers<Traits>(args, rings);
  auto* const outputs = reinterpret_cast<typename Traits::Sum*>(rings);
  store_sums<Traits>(total, outputs + group * Traits::kOutputs);
  add_groups<Traits>(args, outputs);
}

// Registers of a consumer thread where an equal share is not enough, else 0.
template <class Traits>
constexpr int registers_of() {
  if (Traits::kTokens > 64) return Traits::kConsumers == 256 ? 224 : 152;
  return Traits::kOperandRuns == 2 && Traits::kConsumers == 512 ? 104 : 0;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) char memory[];
  char* const table = memory;
  char* const rings = memory + Traits::kTableBytes + kBarrierBytes;
  const int thread = static_cast<int>(threadIdx.x);
  // The compiler knows this condition to be the same for a warp, and keeps descriptors in uniform registers.
  const bool is_producer = wgmma::warpgroup_of(thread) == Traits::kConsumers / 128;
  const int warp = wgmma::warp_of(thread) - Traits::kConsumers / 32;
  // The four producer warps: with four groups warp i copies all of group i; with two, warps 0 and 1 copy weights, 2 and
  // 3 tokens; with one, warp 0 weights, warp 1 tokens. Consumers compute these three as well, and do not use them.
  const int group = warp & (Traits::kGroups - 1);
  const Producer<Traits> producer(args, rings + group * args.layout.stages * args.layout.stage, group);
  const bool copies_weights = warp < Traits::kGroups;
  const bool copies_tokens = Traits::kGroups == 4 || warp / Traits::kGroups == 1;
  if (is_producer) {
    if (copies_weights && cute::elect_one_sync()) producer.init();
    __syncwarp();
    if constexpr (Traits::kGroups < 4) barrier_sync<kProducerBarrier, 128>();  // other warps copy the tokens
    if (cute::elect_one_sync()) producer.start(copies_weights, copies_tokens);
    __syncwarp();
  }
  if constexpr (Traits::Code::kCodebook) {  // the consumers' warps, who read it, fill it
    CodebookDequantizer<Traits::kType>::template fill<Traits::kConsumers>(reinterpret_cast<uint32_t*>(table),
                                                                          args.levels);
  }
  __syncthreads();
  launch_dependents();
  // For 128 tokens producers hand registers to the consumers, whose sums need more than an equal share, and for 16,
  // where the operand of a whole k-block does. Behind the point where both roles meet again ptxas allocates for the
  // smaller number: so the sums leave registers before it.
  constexpr int kRegisters = registers_of<Traits>();
  if (is_producer) {
    if constexpr (kRegisters > 0) cutlass::arch::warpgroup_reg_dealloc<56>();
    if ((copies_weights || copies_tokens) && cute::elect_one_sync()) producer.run(copies_weights, copies_tokens);
  } else {
    if constexpr (kRegisters > 0) cutlass::arch::warpgroup_reg_alloc<kRegisters>();
    with_plain<Traits>(args, [&](auto plain) { multiply_slices<Traits, plain.value>(args, table, rings); });
    // finish() reads x_scale, bias and residual. A full barrier implies that producers have waited, but an empty K
    // slice has none.
    wait_for_predecessors();
  }
  __syncwarp();
  // Every thread of the blocks that share K meets here, in one place of the code: the sums are where the others look.
  if (args.split == 1) {
    __syncthreads();
  } else {
    cute::cluster_arrive();
    cute::cluster_wait();
  }
  if (!is_producer) finish<Traits>(args, reinterpret_cast<typename Traits::Sum*>(rings));
  __syncwarp();
  if (args.split > 1) {  // a block outlives the others' reads of its memory
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
}

// ---- launch ----

template <class Traits>
GemmKernel gemm_kernel_of() {
  if constexpr (Traits::kIntegers) {
    // A group multiplies one stage, waits for the next, and has not given the one before back. Of two levels 4 groups
    // of a k-block have scales.
    constexpr int kScales = Traits::kFormat == LowbitFormat::kTwoLevel ? 4 * 2 * Traits::kChannels : 0;
    constexpr int64_t kStage = round_up(
        Traits::kTokenBytes + Traits::kRowTiles * Traits::Code::kBytes + kScales + kBarriersOfStage, kBarrierBytes);
    static_assert((kMostShared - kBarrierBytes) / kStage / Traits::kGroups >= 3);
  }
  static DeviceFlags raised;
  GemmKernel kernel = kernel_of<Traits>(reinterpret_cast<const void*>(gemm_kernel<Traits>), &raised);
  kernel.stage_barriers = kBarriersOfStage;
  kernel.stages_of_block = Traits::kStagesOfBlock;
  kernel.codes_by_run = Traits::kStagesOfBlock == 2 && Traits::kCodesByRun;
  return kernel;
}

// Launches one kernel; split: blocks that divide K.
void launch_gemm(const LowbitArgs& given, const GemmKernel& kernel, int split, int device, cudaStream_t stream);

}  // namespace octofuse::lowbit
