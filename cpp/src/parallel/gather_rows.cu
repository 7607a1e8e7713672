// Rows that ranks have parts of: gathered or added up, and normalised or quantised by the pass that one device runs, so
// that the bits are the same.
#include <algorithm>
#include <array>

#include "device/launch.h"
#include "octofuse/device.h"
#include "parallel/clustered.h"
#include "parallel/row_parts.cuh"
#include "rows/ordered.h"

namespace octofuse {
namespace {

using rows::kPack;
using rows::Pack;
using rows::RowOp;

constexpr int kThreads = 512;

// A row of any length in one block; where there are clusters, those take it.
template <class T, RowOp kOp>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const __grid_constant__ GatherRowsArgs args) {
  extern __shared__ int4 shared_memory[];
  __shared__ rows::Meeting<kThreads, rows::kMaxGroups<kThreads, 0>> meeting;
  const int thread = static_cast<int>(threadIdx.x);
  auto* const whole = reinterpret_cast<Pack<T>*>(shared_memory);
  launch_dependents();
  wait_for_predecessors();
  const peers::Call call(args.peers);
  const peers::OwnPart<T, kOp == RowOp::kCopy> own(args, blockIdx.x);
  for (int index = thread; index * kPack < args.rows.cols; index += kThreads) {
    Pack<T> pack[1];
    peers::RowParts<T, 1>(args, static_cast<int>(blockIdx.x), index, 0).exchange(call, own, pack);
    whole[index] = pack[0];  // this thread will read it
  }
  RowPassArgs row = args.rows;
  row.x = whole;
  row.ldx = 0;  // of every block its own row
  const auto given = [&] { return rows::given_inverse(args.rows, blockIdx.x); };
  rows::pass_row<T, kOp, kThreads, 0>(row, given, blockIdx.x, thread, meeting);
  peers::count(args.peers, call.number);
}

template <class T>
const void* kernel_for(bool norm) {
  return norm ? reinterpret_cast<const void*>(gather_rows_kernel<T, RowOp::kNorm>)
              : reinterpret_cast<const void*>(gather_rows_kernel<T, RowOp::kCopy>);
}

constexpr int kOwn = 6 << 10;  // bytes of shared memory that a kernel has beside its row, at most

int most_in_block(int device) { return (device_capability(device).whole_shared_memory - kOwn) / 2 / kPack * kPack; }

}  // namespace

int64_t most_gathered_columns(bool norm, bool clusters, int device) {
  const bool shared = clusters && device_capability(device).kernels_sm90a;
  return std::min(peers::most_clustered_columns(norm), shared ? kMaxK : most_in_block(device));
}

void gather_rows(const GatherRowsArgs& args, int device, Stream stream) {
  if (args.rows.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (peers::run_clustered(args, device, cuda_stream)) return;
  const bool norm = args.rows.norm != Norm::kNone;
  const bool is_half = args.rows.type == DType::kFloat16;
  const void* kernel = is_half ? kernel_for<__half>(norm) : kernel_for<__nv_bfloat16>(norm);
  const int shared = 2 * static_cast<int>(args.rows.cols);
  if (shared > rows::kMostShared) {
    static std::array<DeviceFlags, 4> raised{};
    allow_shared_memory(kernel, 2 * most_in_block(device), device, raised[(is_half ? 2 : 0) + (norm ? 1 : 0)]);
  }
  GatherRowsArgs kernel_args = args;
  launch_kernel("gather_rows", kernel, dim3(static_cast<unsigned>(args.rows.rows)), dim3(kThreads), shared, dim3(1),
                is_chained(cuda_stream, device), &kernel_args, cuda_stream);
}

}  // namespace octofuse
