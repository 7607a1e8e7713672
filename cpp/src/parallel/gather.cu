// A gather over peer memory in one kernel.
#include <algorithm>

#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/device.h"
#include "parallel/peers.cuh"

namespace octofuse {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 128;  // what more would fetch waits for the link

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
      out[place_of(unit, units, first, out_units)] = call.from(r, unit);
    }
    first += units;
  }
  peers::count(args.peers, call.number);
}

}  // namespace

void gather(const GatherArgs& args, int device, Stream stream) {
  if (args.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int units = *std::max_element(args.row_units, args.row_units + args.peers.ranks) * args.rows;
  const int blocks = std::min(kMostBlocks, (units + kThreads - 1) / kThreads);
  GatherArgs kernel_args = args;
  launch_kernel("gather", reinterpret_cast<const void*>(gather_kernel), dim3(static_cast<unsigned>(blocks)),
                dim3(kThreads), 0, dim3(1), is_chained(cuda_stream, device), &kernel_args, cuda_stream);
}

}  // namespace octofuse
