// What the ranks of a parallel model tell each other over memory that they can all write to.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/row_pass.h"

namespace octofuse {

constexpr int kMaxRanks = 8;
constexpr int kCallCounters = 256;       // blocks or clusters of a call at most: each reads a counter of its own
constexpr int64_t kMaxGather = 1 << 26;  // bytes of a rank
constexpr int kGatherUnit = 8;           // bytes that travel together, with 8 bytes that say which call they belong to
constexpr int kBulkUnit = 16;            // bytes of a bulk gather's units
constexpr int kBulkSpan = 1 << 15;       // bytes of a bulk gather that one flag tells of

// All ranks make the same calls in the same order, on one stream each.
//
// inboxes[r]: gather_inbox_bytes(capacity, bulk, ranks) of rank r's memory, that were zero once; a rank writes its part
// into every other one's, and reads its own. calls: kCallCounters counters of this rank, that were zero once; every
// call adds one to each.
struct Peers {
  int ranks = 0, rank = 0;
  int64_t capacity = 0;  // bytes of one rank's rows, at most
  int64_t bulk = 0;      // the same of a bulk gather at a time, a multiple of kBulkSpan
  void* inboxes[kMaxRanks] = {};
  uint32_t* calls = nullptr;
  uint64_t limit = 0;  // ns that a part may let the others wait, before the kernel traps
};

// Units and their calls, twice; behind them what is gathered in bulk, twice, and a flag for each span of it.
constexpr int64_t gather_inbox_bytes(int64_t capacity, int64_t bulk, int ranks) {
  return 2 * ranks * (2 * capacity + bulk) + ranks * (bulk / kBulkSpan) * int64_t{sizeof(uint32_t)};
}

// Small parts travel in units beside their call's number, those above `capacity` in bulk, some rows at a time.
// out[row] = the rows of every rank's x one behind the other, in the ranks' order: row_units[r] units of rank r.
struct GatherArgs {
  Peers peers;
  int rows = 0;
  int row_units[kMaxRanks] = {};
  const void* x = nullptr;  // contiguous
  void* out = nullptr;      // contiguous
};

void gather(const GatherArgs& args, int device, Stream stream);
// Whether each rank's rows are whole bulk units at multiples of their size, and one fits; for parts above `capacity`.
bool gathers_bulk(const GatherArgs& args);

// row_pass() over whole rows of which every rank has a part: with the bits of the two kernels. `rows` is the pass over
// whole rows, copied or normalised, in fp16 or bf16, but that x is this rank's part; gated, of gates and values whose
// products are gathered. No residual, order, COL32 or scales of blocks; its constants are such as `constants` says.
struct GatherRowsArgs {
  Peers peers;
  int cols[kMaxRanks] = {};  // of each rank, multiples of 8
  bool adds = false;         // every rank has whole rows, which are added in the ranks' order, in fp32
  bool clusters = true;      // may share a row where the device has them
  RowPassArgs rows;
};

// Rows and columns that gather_rows() takes.
constexpr int64_t kMostGatheredRows = kCallCounters;
// clusters: as GatherRowsArgs has it.
int64_t most_gathered_columns(bool norm, bool clusters, int device);

void gather_rows(const GatherRowsArgs& args, int device, Stream stream);

}  // namespace octofuse
