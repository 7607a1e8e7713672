// The products of gemm_many: a warpgroup makes the operand of a run while another is multiplied.
#pragma once

#include "lowbit/gemm_consumer.cuh"
#include "lowbit/gemm_many_producer.cuh"

namespace octofuse::lowbit {

// Two rings, of runs of tokens and of k-blocks of weights, as a consumer goes through them.
template <class Traits>
class TwoRings {
  const ManyArgs& args_;
  ManyBarriers& barriers_;
  const char* tokens_;
  const char* weights_;
  RingPosition token_, weight_;
  int thread_;  // of its warpgroup

 public:
  __device__ TwoRings(const ManyArgs& args, ManyBarriers& barriers, const char* tokens, const char* weights)
      : args_(args),
        barriers_(barriers),
        tokens_(tokens),
        weights_(weights),
        token_(args.token_stages),
        weight_(args.layout.stages),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ const char* wait_for_weights() {
    const int slot = weight_.slot;
    barriers_.weights_full[slot].wait(weight_.phase);
    weight_.next();
    return weights_ + slot * args_.layout.stage;
  }
  // Behind products that take what was read: to issue these, a warp waits for its reads. For an arrival it does not,
  // and of 8 bits the next weights were copied over what had not been read yet.
  __device__ void release_weights(int slot) { barriers_.weights_empty[slot].arrive(); }

  __device__ int weight_slot() const { return weight_.slot; }
  __device__ int token_slot() const { return token_.slot; }
  __device__ uint64_t wait_for_tokens() {
    barriers_.tokens_full[token_.slot].wait(token_.phase);
    const uint32_t tokens = wgmma::low_descriptor(tokens_) + token_.slot * (Traits::kTokenBytes / 16);
    token_.next();
    return wgmma::descriptor_of(tokens);
  }
  // Tensor cores have read them: one thread tells each block that writes there.
  __device__ void release_tokens(int slot) const {
    if constexpr (Traits::kSplitsK) {
      if (thread_ == 0) barriers_.tokens_empty[slot].arrive();
    } else {
      if (thread_ < kSharing) barriers_.tokens_empty[slot].arrive(static_cast<uint32_t>(thread_));
    }
  }
};

// ---- two rings ----

// The sums of a tile, in multiply_tile()'s form. A turn has two runs; last: the slot of a run before them, or -1. With
// another end in the middle of a turn ptxas moved each product's descriptor from a register: 102 instructions for a
// k-block of int8 in the place of 90.
template <class Traits, bool kPlain>
__device__ void multiply_turns(Operand<Traits, kPlain>& operand, TwoRings<Traits>& rings, int turns, const char* stage,
                               int weights, int last, uint32_t (&a)[2][kOperandWords<Traits>],
                               typename Traits::Sum (&sums)[Traits::kSums]) {
  const auto next_stage = [&] {
    const int slot = rings.weight_slot();
    stage = rings.wait_for_weights();
    operand.start(stage);
    return slot;
  };
  int first = -1;  // the slots of both runs of a turn
#pragma unroll 1
  while (turns > 0) {
    first = rings.token_slot();
    int next = 0;
    if constexpr (Traits::kAsksAhead) next = next_stage();
    multiply<Traits>(rings.wait_for_tokens(), 0, a[0], sums);
    if constexpr (Traits::kIntegers) {
      rings.release_weights(weights);
      weights = Traits::kAsksAhead ? next : next_stage();
    }
    cute::warpgroup_wait<1>();
    if (last >= 0) rings.release_tokens(last);
    operand.make(stage, Traits::kRuns - 1, a[1]);
    last = rings.token_slot();
    if (Traits::kAsksAhead && turns > 1) next = next_stage();
    multiply<Traits>(rings.wait_for_tokens(), 0, a[1], sums);
    rings.release_weights(weights);
    if (--turns == 0) break;
    weights = Traits::kAsksAhead ? next : next_stage();
    cute::warpgroup_wait<1>();
    rings.release_tokens(first);
    operand.make(stage, 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  if (first >= 0) rings.release_tokens(first);
  rings.release_tokens(last);
}

// turns: k-blocks. sums: what they are added to.
template <class Traits, bool kPlain>
__device__ void multiply_tile(const ManyArgs& args, const char* table, TwoRings<Traits>& rings, int turns,
                              typename Traits::Sum (&sums)[Traits::kSums]) {
  Operand<Traits, kPlain> operand(args, table);
  uint32_t a[2][kOperandWords<Traits>];
  for_each_sum(sums, [](auto& sum) { cute::warpgroup_fence_operand(sum); });
  int weights = rings.weight_slot();  // the slot of those that are being multiplied
  const char* stage = rings.wait_for_weights();
  operand.start(stage);
  operand.make(stage, 0, a[0]);
  int last = -1;
  if constexpr (Traits::kIntegers) {  // a k-block has one run: an odd one goes first, so that a turn has one end
    if (turns % 2 == 1) {
      last = rings.token_slot();
      multiply<Traits>(rings.wait_for_tokens(), 0, a[0], sums);
      rings.release_weights(weights);
      cute::warpgroup_wait<0>();
      if (turns > 1) {
        weights = rings.weight_slot();
        stage = rings.wait_for_weights();
        operand.start(stage);
        operand.make(stage, 0, a[0]);
      }
    }
    turns /= 2;
  }
  multiply_turns<Traits, kPlain>(operand, rings, turns, stage, weights, last, a, sums);
  for_each_sum(sums, [](auto& sum) { cute::warpgroup_fence_operand(sum); });
}

// ---- one ring, two parts ----

// The sums of a tile of two parts, which are multiplied in turn: of one all runs, then of the other.
template <class Traits, bool kPlain>
__device__ void multiply_two_parts(const ManyArgs& args, const char* table, OneRing<Traits>& ring, int k_blocks,
                                   typename Traits::Sum (&sums)[2][Traits::kSums]) {
  Operand<Traits, kPlain> operand(args, table);
  uint32_t a[2][kOperandWords<Traits>];
  fence(sums[0], sums[1]);
  int stage = ring.take();
  operand.start(ring.memory(stage), 0);
  operand.make(ring.memory(stage), 0, a[0]);
  int last = -1;  // the stage before
#pragma unroll 1
  while (true) {
    const uint64_t tokens = ring.tokens(stage);
    multiply<Traits>(tokens, 0, a[0], sums[0]);
    if constexpr (Traits::kRuns == 2) {
      cute::warpgroup_wait<1>();
      ring.release(last);
      operand.make(ring.memory(stage), 1, a[1]);
      multiply<Traits>(tokens, 1, a[1], sums[0]);
      operand.start(ring.memory(stage), 1);
      cute::warpgroup_wait<1>();
      operand.make(ring.memory(stage), 0, a[0]);
      multiply<Traits>(tokens, 0, a[0], sums[1]);
      cute::warpgroup_wait<1>();
    } else {
      operand.start(ring.memory(stage), 1);
      cute::warpgroup_wait<1>();
      ring.release(last);
    }
    operand.make(ring.memory(stage), Traits::kRuns - 1, a[1]);
    multiply<Traits>(tokens, Traits::kRuns - 1, a[1], sums[1]);
    last = stage;
    if (--k_blocks == 0) break;
    stage = ring.take();
    operand.start(ring.memory(stage), 0);
    cute::warpgroup_wait<1>();
    operand.make(ring.memory(stage), 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  ring.release(last);
  fence(sums[0], sums[1]);
}

}  // namespace octofuse::lowbit
