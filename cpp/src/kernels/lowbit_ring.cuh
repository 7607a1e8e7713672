// What a block of lowbit_gemm.cu works on, and the warps that bring it into shared memory by TMA.
#pragma once

#include <algorithm>

#include "kernels/lowbit_stage.cuh"
#include "wgmma/primitives.cuh"
#include "wgmma/tensor_map.h"

namespace octofuse::lowbit {

constexpr int kMostStages = 16;
constexpr int kHalves = 2;          // of a chunk: 64 columns, a row of TMA's widest swizzle
constexpr int kShared = 227 << 10;  // of a block
constexpr int kBarriers = 1024;     // bytes, a multiple of the swizzle's unit

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

// How a stage of the ring lies: both halves of the tokens, codes, scales [group, plane][row], zeros [group][row].
struct Places {
  int tile;  // bytes of a strip's codes
  int codes, scales, zeros, stage;
  int stages;  // of a group
};

struct GemmArgs {
  Epilogue epilogue;
  Groups groups;
  int m, n, planes;
  int split;                      // blocks that share K
  int part_chunks, longer_parts;  // K's parts have so many chunks, the first ones one more
  int tokens_read;                // rows of x's box
  uint32_t base;                  // Levels'
  bool has_zeros, constant_weight, chained;
  Places places;
  CUtensorMap codes, scales, zeros, x;
};

// Of a token's outputs in shared memory.
constexpr int pitch_of(int rows) { return rows + 4; }

// A kernel at compile time. A block's warpgroups share K, in groups of as many as its rows need. Sums of 128 tokens
// take the registers of twice the threads: a group then has two parts of K, one after the other.
template <LowbitFormat kFormat_, int kBits, DType kType_, int kTokens_, int kRows_>
struct Kind {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr DType kType = kType_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = kRows_;
  static constexpr int kStrips = kRows / kStrip;
  using Code = Codes<kFormat, kBits>;
  static constexpr int kValues = kTokens / 2;                                     // sums of a thread
  static constexpr int kParts = kRows == 64 ? 4 : kRows == 128 ? 2 : 1;           // of K, of a block
  static constexpr int kSummers = kRows == 192 ? 384 : kTokens > 64 ? 256 : 512;  // threads that multiply
  static constexpr int kThreads = kSummers + 128;
  static constexpr int kOfGroup = 2 * kRows;  // threads
  static constexpr int kGroups = kSummers / kOfGroup;
  static constexpr int kTurns = kParts / kGroups;       // parts of a group
  static constexpr int kTokenBytes = kTokens * kChunk;  // of half a chunk
  static constexpr int kPitch = pitch_of(kRows);
  static constexpr int kOutputs = kTokens * kPitch;  // of a group
};

struct Barriers {
  FullBarrier full[kMostStages];
  EmptyBarrier empty[kMostStages];
};

// The first token of a block. The last one's tokens may be another's too, which writes the same bits: rows that do not
// exist would cost the copy engine more than rows that do.
template <class Kind>
__device__ int first_token(const GemmArgs& args) {
  return max(0, min(static_cast<int>(blockIdx.z) * Kind::kTokens, args.m - Kind::kTokens));
}

// Parts of K of a group: as many as `turns`, from its turn `turn` on.
template <class Kind>
struct Part {
  int first, end;  // chunks

  __device__ Part(const GemmArgs& args, int group, int turn, int turns) {
    const int part = static_cast<int>(blockIdx.y) * Kind::kParts + group * Kind::kTurns + turn;
    first = chunk_of(args, part);
    end = chunk_of(args, part + turns);
  }

 private:
  __device__ static int chunk_of(const GemmArgs& args, int part) {
    return part * args.part_chunks + min(part, args.longer_parts);
  }
};

// A group's way through its stages.
struct Turn {
  int first, end, slot;
  uint32_t phase = 0;

  __device__ Turn(int group, int stages) : first(group * stages), end(first + stages), slot(first) {}

  __device__ void next() {
    slot = slot + 1 < end ? slot + 1 : first;
    phase ^= slot == first ? 1U : 0U;
  }
};

// ---- the warps that bring ----

// One lane brings a group's weights, its tokens, or both: to issue a chunk's copies takes about as long as to multiply
// it.
template <class Kind>
class Feeder {
  const GemmArgs& args_;
  Barriers& barriers_;
  char* ring_;
  const Part<Kind> part_;
  int first_slot_, stages_, stage_, tile_, block_;
  uint32_t bytes_;  // of a chunk

 public:
  __device__ Feeder(const GemmArgs& args, Barriers& barriers, char* ring, int group)
      : args_(args),
        barriers_(barriers),
        ring_(ring),
        part_(args, group, 0, Kind::kTurns),
        first_slot_(group * args.places.stages),
        stages_(args.places.stages),
        stage_(args.places.stage),
        tile_(args.places.tile / 8),
        block_(static_cast<int>(blockIdx.x)) {
    const int rows = args.groups.segments * Kind::kRows;
    bytes_ = static_cast<uint32_t>(kHalves * args.tokens_read * kChunk + Kind::kStrips * args.places.tile +
                                   args.planes * rows * 2 + (args.has_zeros ? rows : 0));
  }

  __device__ void init() const {
#pragma unroll 1
    for (int i = 0; i < stages_; ++i) {
      barriers_.full[first_slot_ + i].init(1);
      barriers_.empty[first_slot_ + i].init(Kind::kOfGroup);
    }
    cutlass::arch::fence_barrier_init();
  }

  // What nothing in flight writes before earlier kernels have ended, for every stage once: chunk by chunk, so that the
  // first one can be multiplied while the others arrive.
  __device__ void start(bool weights, bool tokens) const {
    if (!args_.constant_weight) wait_for_earlier_kernels();
    int slot = first_slot_;
#pragma unroll 1
    for (int chunk = part_.first; chunk < ahead(); ++chunk, ++slot) {
      if (weights) bring_weights(chunk, slot);
      if (tokens && !args_.chained) bring_tokens(chunk, slot);
    }
  }

  // The rest, as stages come free.
  __device__ void run(bool weights, bool tokens) const {
    wait_for_earlier_kernels();
    int slot = first_slot_;
    if (tokens && args_.chained) {
#pragma unroll 1
      for (int chunk = part_.first; chunk < ahead(); ++chunk) bring_tokens(chunk, slot++);
    }
    slot = first_slot_;
    uint32_t phase = 0;  // of the round before
#pragma unroll 1
    for (int chunk = part_.first + stages_; chunk < part_.end; ++chunk) {
      barriers_.empty[slot].wait(phase);
      if (weights) bring_weights(chunk, slot);
      if (tokens) bring_tokens(chunk, slot);
      if (++slot < first_slot_ + stages_) continue;
      slot = first_slot_;
      phase ^= 1;
    }
  }

 private:
  __device__ int ahead() const { return min(part_.end, part_.first + stages_); }

  __device__ void copy(const CUtensorMap& map, int slot, int offset, int column, int row) const {
    constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&barriers_.full[slot]), kNormal,
                                 ring_ + slot * stage_ + offset, column, row);
  }

  __device__ void bring_weights(int chunk, int slot) const {
    barriers_.full[slot].arrive_and_expect_tx(bytes_);
    copy(args_.codes, slot, args_.places.codes, chunk * tile_, block_ * Kind::kStrips);
    const int group = args_.groups.of(chunk, 0);
    copy(args_.scales, slot, args_.places.scales, block_ * Kind::kRows, group * args_.planes);
    if (args_.has_zeros) copy(args_.zeros, slot, args_.places.zeros, block_ * Kind::kRows, group);
  }

  __device__ void bring_tokens(int chunk, int slot) const {
    const int token = first_token<Kind>(args_);
    copy(args_.x, slot, 0, chunk * kChunk, token);
    copy(args_.x, slot, Kind::kTokenBytes, chunk * kChunk + kChunk / kHalves, token);
  }
};

}  // namespace octofuse::lowbit
