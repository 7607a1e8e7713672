// A gather over peer memory in one kernel: of few bytes, which wait for nothing but themselves, or in bulk.
#include <algorithm>

#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/device.h"
#include "parallel/peers.cuh"

namespace octofuse {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 128;  // what more would fetch waits for the link
static_assert(kMostBlocks <= kCallCounters);

// Where a unit of a rank goes, whose rows have `row_units` of the output's `out_units` and begin at `first` there.
__device__ inline int64_t place_of(int unit, int row_units, int first, int out_units) {
  const int row = unit / row_units;
  return static_cast<int64_t>(row) * out_units + first + unit - row * row_units;
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherArgs args) {
  wait_for_predecessors();
  launch_dependents();
  const peers::Call call(args.peers);
  const int stride = kThreads * static_cast<int>(gridDim.x);
  const int first_unit = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int rank = args.peers.rank;
  int out_units = 0;
  int first = 0;
  for (int r = 0; r < args.peers.ranks; ++r) {
    if (r == rank) first = out_units;
    out_units += args.row_units[r];
  }
  const auto* x = static_cast<const uint2*>(args.x);
  auto* out = static_cast<uint2*>(args.out);
  const int own = args.row_units[rank];
  for (int unit = first_unit; unit < own * args.rows; unit += stride) {
    const uint2 data = x[unit];
    call.send_to_all(unit, data);
    out[place_of(unit, own, first, out_units)] = data;
  }
  first = 0;
  for (int r = 0; r < args.peers.ranks; ++r) {
    const int units = args.row_units[r];
    for (int unit = first_unit; r != rank && unit < units * args.rows; unit += stride) {
      const peers::Line* const from[] = {call.inbox(rank, r) + unit};
      uint2 data[1];
      call.await_all(from, data);
      out[place_of(unit, units, first, out_units)] = data[0];
    }
    first += units;
  }
  peers::count(args.peers, call.number);
}

constexpr int kBulkThreads = 512;
constexpr int kBulkUnits = kBulkSpan / kBulkUnit;     // of a span
constexpr int kOfThread = kBulkUnits / kBulkThreads;  // of a span
constexpr int kBulkBlocks = kCallCounters;            // some two for each SM of an H100: enough to fill the link

// Units [first, first + kBulkUnits) of a part that has `count`: all loads of a thread, then all stores.
template <class Load, class Store>
__device__ void copy_span(int first, int count, Load load, Store store) {
  uint4 units[kOfThread];
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int unit = first + i * kBulkThreads + static_cast<int>(threadIdx.x);
    if (unit < count) units[i] = load(unit);
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int unit = first + i * kBulkThreads + static_cast<int>(threadIdx.x);
    if (unit < count) store(unit, units[i]);
  }
}

// Every block sends its spans of this rank's part, with a flag behind each, and takes the same spans of the others'.
__global__ void __launch_bounds__(kBulkThreads) gather_bulk_kernel(const __grid_constant__ GatherArgs args) {
  wait_for_predecessors();
  launch_dependents();
  const peers::Call call(args.peers);
  const int rank = args.peers.rank;
  constexpr int kHalf = kBulkUnit / kGatherUnit;
  int out_units = 0;
  int first = 0;
  for (int r = 0; r < args.peers.ranks; ++r) {
    if (r == rank) first = out_units;
    out_units += args.row_units[r] / kHalf;
  }
  const auto* x = static_cast<const uint4*>(args.x);
  auto* out = static_cast<uint4*>(args.out);
  const int own = args.row_units[rank] / kHalf;
  const int count = own * args.rows;
  const int blocks = static_cast<int>(gridDim.x);
  for (int span = static_cast<int>(blockIdx.x); span * kBulkUnits < count; span += blocks) {
    const auto send = [&](int unit, const uint4& data) {
      for (int r = 0; r < args.peers.ranks; ++r) {
        if (r != rank) call.bulk(r, rank)[unit] = data;
      }
      out[place_of(unit, own, first, out_units)] = data;
    };
    copy_span(span * kBulkUnits, count, [&](int unit) { return x[unit]; }, send);
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < args.peers.ranks && thread != rank) {
      __threadfence_system();  // for the block's other threads as well
      peers::raise(call.flags(thread, rank) + span, call.number);
    }
  }
  first = 0;
  for (int r = 0; r < args.peers.ranks; ++r) {
    const int units = args.row_units[r] / kHalf;
    const int of_rank = r == rank ? 0 : units * args.rows;
    for (int span = static_cast<int>(blockIdx.x); span * kBulkUnits < of_rank; span += blocks) {
      if (threadIdx.x == 0) peers::await_flag(call.flags(rank, r) + span, call.number, args.peers.limit);
      __syncthreads();
      // Past L1: another GPU has written it.
      copy_span(
          span * kBulkUnits, of_rank, [&](int unit) { return __ldcg(call.bulk(rank, r) + unit); },
          [&](int unit, const uint4& data) { out[place_of(unit, units, first, out_units)] = data; });
    }
    first += units;
  }
  peers::count(args.peers, call.number);
}

int most_units(const GatherArgs& args) { return *std::max_element(args.row_units, args.row_units + args.peers.ranks); }

int64_t most_bytes(const GatherArgs& args) { return int64_t{most_units(args)} * kGatherUnit; }

// As many rows at a time as fit.
void gather_bulk(GatherArgs args, bool chained, cudaStream_t stream) {
  int64_t out_bytes = 0;
  for (int r = 0; r < args.peers.ranks; ++r) out_bytes += int64_t{args.row_units[r]} * kGatherUnit;
  const int rows = args.rows;
  const int at_once = static_cast<int>(std::min<int64_t>(rows, args.peers.bulk / most_bytes(args)));
  for (int row = 0; row < rows; row += at_once) {
    args.rows = std::min(at_once, rows - row);
    const int64_t spans = (most_bytes(args) * args.rows + kBulkSpan - 1) / kBulkSpan;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(kBulkBlocks, spans));
    launch_kernel("gather_bulk", reinterpret_cast<const void*>(gather_bulk_kernel), dim3(blocks), dim3(kBulkThreads), 0,
                  dim3(1), chained, &args, stream);
    args.x = static_cast<const char*>(args.x) + int64_t{args.row_units[args.peers.rank]} * kGatherUnit * args.rows;
    args.out = static_cast<char*>(args.out) + out_bytes * args.rows;
  }
}

}  // namespace

bool gathers_bulk(const GatherArgs& args) {
  for (int r = 0; r < args.peers.ranks; ++r) {
    if (int64_t{args.row_units[r]} * kGatherUnit % kBulkUnit != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(args.x) % kBulkUnit == 0 && most_bytes(args) <= args.peers.bulk;
}

void gather(const GatherArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool chained = is_chained(cuda_stream, device);
  if (most_bytes(args) * args.rows > args.peers.capacity) return gather_bulk(args, chained, cuda_stream);
  const int blocks = std::min(kMostBlocks, (most_units(args) * args.rows + kThreads - 1) / kThreads);
  GatherArgs kernel_args = args;
  launch_kernel("gather", reinterpret_cast<const void*>(gather_kernel), dim3(static_cast<unsigned>(blocks)),
                dim3(kThreads), 0, dim3(1), chained, &kernel_args, cuda_stream);
}

}  // namespace octofuse
