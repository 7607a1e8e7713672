// Rows that ranks have parts of: gathered or added up, a block each, and normalised or quantised by the pass that one
// device runs, so that the bits are the same.
#include <algorithm>

#include "device/launch.h"
#include "octofuse/device.h"
#include "parallel/clustered.h"
#include "parallel/row_parts.cuh"

namespace octofuse {
namespace {

using rows::kPack;
using rows::Pack;
using rows::RowOp;

constexpr int kCopyThreads = 512;

// A norm. It goes through its row once while earlier kernels run, as rows/pass_chained.cu does: what a chain waits for
// is the fetching of instructions. And it takes few registers: a block that needs most of an SM's starts only when the
// kernel in front has left.
template <class T, int kThreads, int kPacks>
__global__ void __launch_bounds__(kThreads, 512 / kThreads)
    gather_norm_kernel(const __grid_constant__ GatherRowsArgs args) {
  extern __shared__ int4 shared_memory[];
  __shared__ rows::Meeting<kThreads, rows::kMaxGroups<kThreads, kPacks>> meeting;
  __shared__ float scale;
  const int thread = static_cast<int>(threadIdx.x);
  char* const memory = reinterpret_cast<char*>(shared_memory);
  launch_dependents();
  RowPassArgs row = args.rows;
  rows::stage_affine<kThreads>(row, memory, thread);
  auto* const whole = reinterpret_cast<Pack<T>*>(memory + rows::affine_bytes(args.rows));
  const auto given = [inverse = rows::given_inverse(args.rows, blockIdx.x)] { return inverse; };
  row.x = whole;
  row.ldx = 0;  // of every block its own row
  row.sum = nullptr;
  if (row.y != nullptr) row.y = whole;
  row.q = reinterpret_cast<int8_t*>(whole);
  if (row.scales != nullptr) row.scales = &scale;
  uint32_t number = 0;
  wait_for_all_copies();
#pragma unroll 1
  for (int64_t index = -1;; index = blockIdx.x) {
    rows::pass_row<T, RowOp::kNorm, kThreads, kPacks>(row, given, max(index, int64_t{0}), thread, meeting);
    if (index >= 0) break;
    const peers::RowParts<T, kPacks> parts(args, static_cast<int>(blockIdx.x), thread, kThreads);
    wait_for_predecessors();
    __syncthreads();
    const peers::Call call(args.peers);
    number = call.number;
    Pack<T> packs[kPacks];
    parts.exchange(call, peers::OwnPart<T, false>(args, blockIdx.x), packs);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {  // this thread will read them
      if ((thread + i * kThreads) * kPack < args.rows.cols) whole[thread + i * kThreads] = packs[i];
    }
    row.sum = args.rows.sum;
    row.y = args.rows.y;
    row.q = args.rows.q;
    row.scales = args.rows.scales;
  }
  peers::count(args.peers, number);
}

// Copies of rows of any length, in one block each; where there are clusters, those take them.
template <class T>
__global__ void __launch_bounds__(kCopyThreads) gather_copy_kernel(const __grid_constant__ GatherRowsArgs args) {
  extern __shared__ int4 shared_memory[];
  __shared__ rows::Meeting<kCopyThreads, rows::kMaxGroups<kCopyThreads, 0>> meeting;
  const int thread = static_cast<int>(threadIdx.x);
  auto* const whole = reinterpret_cast<Pack<T>*>(shared_memory);
  launch_dependents();
  wait_for_predecessors();
  const peers::Call call(args.peers);
  const peers::OwnPart<T, true> own(args, blockIdx.x);
  for (int index = thread; index * kPack < args.rows.cols; index += kCopyThreads) {
    Pack<T> pack[1];
    peers::RowParts<T, 1>(args, static_cast<int>(blockIdx.x), index, 0).exchange(call, own, pack);
    whole[index] = pack[0];
  }
  RowPassArgs row = args.rows;
  row.x = whole;
  row.ldx = 0;
  const auto given = [&] { return rows::given_inverse(args.rows, blockIdx.x); };
  rows::pass_row<T, RowOp::kCopy, kCopyThreads, 0>(row, given, blockIdx.x, thread, meeting);
  peers::count(args.peers, call.number);
}

struct RowsKernel {
  const void* function;
  int threads;
  DeviceFlags* raised;
};

template <class T, int kThreads, int kPacks>
RowsKernel norm_of() {
  static DeviceFlags raised{};
  return {reinterpret_cast<const void*>(gather_norm_kernel<T, kThreads, kPacks>), kThreads, &raised};
}

template <class T>
RowsKernel kernel_for(const RowPassArgs& rows) {
  if (rows.norm == Norm::kNone) {
    static DeviceFlags raised{};
    return {reinterpret_cast<const void*>(gather_copy_kernel<T>), kCopyThreads, &raised};
  }
  if (rows.cols <= 256 * 2 * kPack) return norm_of<T, 256, 2>();
  if (rows.cols <= 256 * 4 * kPack) return norm_of<T, 256, 4>();
  return norm_of<T, 512, 4>();
}

constexpr int kMostNorm = 512 * 4 * kPack;
constexpr int kMostCopy = 3 * 8 * 256 * kPack;  // what a cluster takes
constexpr int kNoOptIn = 40960;                 // bytes of dynamic shared memory, beside a kernel's own, without a word
constexpr int kOwn = 6 << 10;                   // bytes of a kernel's own, at most
constexpr int kNormBytes = 4 + 4 + 2;           // of a column: weight and bias in fp32, and the row
constexpr int kCopyBytes = 2;

}  // namespace

int64_t most_gathered_columns(bool norm, int device) {
  const int64_t room = device_capability(device).whole_shared_memory - kOwn;
  const int64_t columns = std::min<int64_t>(norm ? kMostNorm : kMostCopy, room / (norm ? kNormBytes : kCopyBytes));
  return columns / kPack * kPack;
}

void gather_rows(const GatherRowsArgs& args, int device, Stream stream) {
  if (args.rows.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (peers::run_clustered(args, device, cuda_stream)) return;
  const RowsKernel kernel =
      args.rows.type == DType::kFloat16 ? kernel_for<__half>(args.rows) : kernel_for<__nv_bfloat16>(args.rows);
  const int shared = rows::affine_bytes(args.rows) + 2 * static_cast<int>(args.rows.cols);
  if (shared > kNoOptIn) {
    const bool norm = args.rows.norm != Norm::kNone;
    const auto most = static_cast<int>(most_gathered_columns(norm, device)) * (norm ? kNormBytes : kCopyBytes);
    allow_shared_memory(kernel.function, most, device, *kernel.raised);
  }
  GatherRowsArgs kernel_args = args;
  launch_kernel("gather_rows", kernel.function, dim3(static_cast<unsigned>(args.rows.rows)),
                dim3(static_cast<unsigned>(kernel.threads)), shared, dim3(1), is_chained(cuda_stream, device),
                &kernel_args, cuda_stream);
}

}  // namespace octofuse
