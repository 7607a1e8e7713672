// A gather over peer memory in one kernel: a rank writes its part into every other rank's inbox, where each four bytes
// of it lie beside the number of the call in one write of eight, and waits until the others' parts bear that number. So
// nothing but the data travels, once, and no flag has to be seen behind it.
//
// Two calls in a row use two halves of an inbox. A rank that is at its call n + 2 has the others' parts of call n + 1,
// which they sent after they had read all of call n: so the half of call n is free.
#include <cuda_runtime.h>

#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/device.h"
#include "octofuse/parallel.h"

namespace octofuse {
namespace {

constexpr int kThreads = 256;
constexpr int kStride = kThreads * kGatherBlocks;  // a unit has the same block in every call, which counts for it

struct Line {  // a unit and its call, twice
  uint64_t low, high;
};

__device__ inline void send(Line* to, Line line) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(line.low), "l"(line.high) : "memory");
}

__device__ inline Line receive(const Line* from) {
  Line line;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(line.low), "=l"(line.high) : "l"(from) : "memory");
  return line;
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The unit that bears the number of this call; a rank that never sends it must not keep the others for ever.
__device__ inline uint2 awaited(const Line* from, uint32_t call, uint64_t limit) {
  uint64_t start = 0;
  for (uint32_t tries = 0;; ++tries) {
    const Line line = receive(from);
    if (static_cast<uint32_t>(line.low >> 32) == call && static_cast<uint32_t>(line.high >> 32) == call) {
      return {static_cast<uint32_t>(line.low), static_cast<uint32_t>(line.high)};
    }
    if (tries % 1024 == 1023) {
      const uint64_t now = nanoseconds();
      if (start == 0) start = now;
      if (now - start > limit) __trap();
    }
  }
}

// Where a unit of a rank goes, whose rows have `row_units` of the output's `out_units` and begin at `first` there.
__device__ inline int place_of(int unit, int row_units, int first, int out_units) {
  const int row = unit / row_units;
  return row * out_units + first + unit - row * row_units;
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherArgs args) {
  wait_for_predecessors();
  launch_dependents();
  const uint32_t call = args.calls[blockIdx.x] + 1;
  const int of_rank = static_cast<int>(args.capacity) / kGatherUnit;  // lines
  const int half = static_cast<int>(call % 2) * args.ranks * of_rank;
  const int first_unit = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  int out_units = 0;
  int first = 0;
  for (int r = 0; r < args.ranks; ++r) {
    if (r == args.rank) first = out_units;
    out_units += args.row_units[r];
  }
  const auto* x = static_cast<const uint2*>(args.x);
  auto* out = static_cast<uint2*>(args.out);
  const int own = args.row_units[args.rank];
  for (int unit = first_unit; unit < own * args.rows; unit += kStride) {
    const uint2 data = x[unit];
    const uint64_t number = static_cast<uint64_t>(call) << 32;
    const Line line = {number | data.x, number | data.y};
    for (int r = 0; r < args.ranks; ++r) {
      if (r != args.rank) send(static_cast<Line*>(args.inboxes[r]) + half + args.rank * of_rank + unit, line);
    }
    out[place_of(unit, own, first, out_units)] = data;
  }
  first = 0;
  for (int r = 0; r < args.ranks; ++r) {
    const int units = args.row_units[r];
    const Line* inbox = static_cast<const Line*>(args.inboxes[args.rank]) + half + r * of_rank;
    for (int unit = first_unit; r != args.rank && unit < units * args.rows; unit += kStride) {
      out[place_of(unit, units, first, out_units)] = awaited(inbox + unit, call, args.limit);
    }
    first += units;
  }
  __syncthreads();  // all threads have read the counter
  if (threadIdx.x == 0) args.calls[blockIdx.x] = call;
}

}  // namespace

void gather(const GatherArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  GatherArgs kernel_args = args;
  launch_kernel("gather", reinterpret_cast<const void*>(gather_kernel), dim3(kGatherBlocks), dim3(kThreads), 0, dim3(1),
                is_chained(cuda_stream, device), &kernel_args, cuda_stream);
}

}  // namespace octofuse
