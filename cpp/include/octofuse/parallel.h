// What the ranks of a parallel model tell each other over memory that they can all write to.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"

namespace octofuse {

constexpr int kMaxRanks = 8;
constexpr int kGatherBlocks = 16;        // of every call: a block counts its own calls, on all ranks alike
constexpr int64_t kMaxGather = 1 << 24;  // bytes of a rank
constexpr int kGatherUnit = 8;           // bytes that travel together, with 8 bytes that say which call they belong to

// out[row] = the rows of every rank's x one behind the other, in the ranks' order: row_units[r] units of rank r. All
// ranks make the same calls in the same order, on one stream each.
//
// inboxes[r]: gather_inbox_bytes(capacity, ranks) of rank r's memory, that were zero once; a rank writes its part into
// every other one's, and reads its own. calls: kGatherBlocks counters of this rank, that were zero once.
struct GatherArgs {
  int rows = 0, ranks = 0, rank = 0;
  int row_units[kMaxRanks] = {};
  int64_t capacity = 0;     // bytes of one rank's rows, at most
  const void* x = nullptr;  // contiguous
  void* out = nullptr;      // contiguous
  void* inboxes[kMaxRanks] = {};
  uint32_t* calls = nullptr;
  uint64_t limit = 0;  // ns that a part may let the others wait, before the kernel traps
};

constexpr int64_t gather_inbox_bytes(int64_t capacity, int ranks) { return 2 * ranks * 2 * capacity; }

void gather(const GatherArgs& args, int device, Stream stream);

}  // namespace octofuse
