// What a block of lowbit_gemm.cu works on, and the warps that bring it into shared memory by TMA.
#pragma once

#include <algorithm>

#include "kernels/lowbit_stage.cuh"
#include "wgmma/primitives.cuh"
#include "wgmma/tensor_map.h"

namespace octofuse::lowbit {

constexpr int kSummers = 512;  // threads: more would have too few registers
constexpr int kThreads = kSummers + 128;
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
  int m, n, chunks, planes;
  int split;        // blocks that share K
  int tokens_read;  // rows of x's box
  uint32_t base;    // Levels'
  bool has_zeros, constant_weight;
  Places places;
  CUtensorMap codes, scales, zeros, x;
};

// A kernel at compile time. A block's warpgroups share K, in groups of as many as its rows need: with 128 rows tokens
// are read half as often, with 64 there are more blocks.
template <LowbitFormat kFormat_, int kBits, DType kType_, int kTokens_, int kRows_>
struct Kind {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr DType kType = kType_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kRows = kRows_;
  static constexpr int kStrips = kRows / kStrip;
  using Code = Codes<kFormat, kBits>;
  static constexpr int kValues = kTokens / 2;  // sums of a thread
  static constexpr int kOfGroup = 2 * kRows;   // threads
  static constexpr int kGroups = kSummers / kOfGroup;
  static constexpr int kTokenBytes = kTokens * kChunk;  // of half a chunk
  static constexpr int kPitch = kRows + 4;              // of a token's outputs
  static constexpr int kOutputs = kTokens * kPitch;     // of a group
};

template <class Kind>
Places places_of(const GemmArgs& args) {
  Places places;
  const int rows = args.groups.segments * Kind::kRows;
  places.tile = Kind::Code::kBytes * (Kind::Code::kPlanes ? args.planes : 1);
  places.codes = kHalves * Kind::kTokenBytes;
  places.scales = places.codes + Kind::kStrips * places.tile;
  places.zeros = places.scales + args.planes * rows * 2;
  const int end = places.zeros + (args.has_zeros ? rows : 0);
  places.stage = (end + 1023) / 1024 * 1024;  // the swizzle's unit
  // At least 2: a stage comes free when the next one is being multiplied.
  places.stages = std::min((kShared - kBarriers) / places.stage, kMostStages) / Kind::kGroups;
  return places;
}

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

// A group's part of K.
struct Part {
  int first, end;  // chunks

  __device__ Part(const GemmArgs& args, unsigned groups, unsigned group) {
    const unsigned parts = static_cast<unsigned>(args.split * groups);
    const unsigned part = blockIdx.y * groups + group;
    const auto chunks = static_cast<unsigned>(args.chunks);  // of at most 131071 columns
    first = static_cast<int>(chunks * part / parts);
    end = static_cast<int>(chunks * (part + 1) / parts);
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
  const Part part_;
  int first_slot_, stages_, stage_, tile_, block_;
  uint32_t bytes_;  // of a chunk

 public:
  __device__ Feeder(const GemmArgs& args, Barriers& barriers, char* ring, int group)
      : args_(args),
        barriers_(barriers),
        ring_(ring),
        part_(args, Kind::kGroups, static_cast<unsigned>(group)),
        first_slot_(group * args.places.stages),
        stages_(args.places.stages),
        stage_(args.places.stage),
        tile_(args.places.tile / 8),
        block_(static_cast<int>(blockIdx.x)) {
    const int rows = args.groups.segments * Kind::kRows;
    bytes_ = static_cast<uint32_t>(kHalves * args.tokens_read * kChunk + Kind::kStrips * args.places.tile +
                                   args.planes * rows * 2 + (args.has_zeros ? rows : 0));
  }

  // Weights for every stage once; what nothing in flight writes before earlier kernels have ended.
  __device__ void start() const {
    for (int i = 0; i < stages_; ++i) {
      barriers_.full[first_slot_ + i].init(1);
      barriers_.empty[first_slot_ + i].init(Kind::kOfGroup);
    }
    cutlass::arch::fence_barrier_init();
    if (!args_.constant_weight) wait_for_earlier_kernels();
    int slot = first_slot_;
    for (int chunk = part_.first; chunk < ahead(); ++chunk) bring_weights(chunk, slot++);
  }

  // The tokens for these stages, and then all as stages come free.
  __device__ void run(bool weights, bool tokens) const {
    wait_for_earlier_kernels();
    int slot = first_slot_;
    if (tokens) {
      for (int chunk = part_.first; chunk < ahead(); ++chunk) bring_tokens(chunk, slot++);
    }
    slot = first_slot_;
    uint32_t phase = 0;
#pragma unroll 1
    for (int chunk = ahead(); chunk < part_.end; ++chunk) {
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
