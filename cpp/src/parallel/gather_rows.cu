// Rows that ranks have parts of: gathered or added up in shared memory, a block each, and normalised and quantised from
// there by the pass that one device runs, so that the bits are the same.
#include "device/launch.h"
#include "octofuse/device.h"
#include "parallel/peers.cuh"
#include "rows/pass.cuh"

namespace octofuse {
namespace {

using rows::kPack;
using rows::Pack;
using rows::RowOp;

struct Units {  // of a pack
  uint2 low, high;
};

template <class T>
__device__ inline Units units_of(const Pack<T>& pack) {
  const auto& bits = reinterpret_cast<const uint4&>(pack);
  return {{bits.x, bits.y}, {bits.z, bits.w}};
}

template <class T>
__device__ inline void send_pack(const peers::Call& call, int64_t at, const Pack<T>& pack) {
  const Units units = units_of(pack);
  call.send_to_all(2 * at, units.low);
  call.send_to_all(2 * at + 1, units.high);
}

template <class T>
__device__ inline Pack<T> awaited_pack(const peers::Call& call, int rank, int64_t at) {
  const uint2 low = call.from(rank, 2 * at);
  const uint2 high = call.from(rank, 2 * at + 1);
  Pack<T> pack;
  reinterpret_cast<uint4&>(pack) = {low.x, low.y, high.x, high.y};
  return pack;
}

// own(index): a pack of this rank's part of the block's row; `whole`: the row, in shared memory. The first threads
// send and the last ones receive, where a row has fewer packs than the block has threads.
template <class T, int kThreads, class Own>
__device__ void gather_row(const GatherRowsArgs& args, const peers::Call& call, Own own, Pack<T>* whole) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  int first = 0;
  for (int r = 0; r < args.peers.rank; ++r) first += args.cols[r] / kPack;
  const int own_packs = args.cols[args.peers.rank] / kPack;
  for (int i = thread; i < own_packs; i += kThreads) {
    const Pack<T> pack = own(i);
    send_pack(call, row * own_packs + i, pack);
    whole[first + i] = pack;
  }
  first = 0;
  for (int r = 0; r < args.peers.ranks; ++r) {
    const int packs = args.cols[r] / kPack;
    for (int i = kThreads - 1 - thread; r != args.peers.rank && i < packs; i += kThreads) {
      whole[first + i] = awaited_pack<T>(call, r, row * packs + i);
    }
    first += packs;
  }
}

// The same of whole rows, which are added up.
template <class T, int kThreads, class Own>
__device__ void add_row(const GatherRowsArgs& args, const peers::Call& call, Own own, Pack<T>* whole) {
  const int thread = static_cast<int>(threadIdx.x);
  const int packs = static_cast<int>(args.rows.cols) / kPack;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * packs;
  for (int i = thread; i < packs; i += kThreads) send_pack(call, first + i, own(i));
  for (int i = thread; i < packs; i += kThreads) {
    Pack<float> sum = {};
    for (int r = 0; r < args.peers.ranks; ++r) {
      const Pack<T> part = r == args.peers.rank ? own(i) : awaited_pack<T>(call, r, first + i);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum.values[j] = __fadd_rn(sum.values[j], to_float(part.values[j]));
    }
    whole[i] = rows::narrow<T>(sum);
  }
}

template <class T, int kThreads>
__device__ void exchange(const GatherRowsArgs& args, const peers::Call& call, Pack<T>* whole) {
  RowPassArgs part = args.rows;
  part.cols = args.cols[args.peers.rank];
  if (args.adds) {
    add_row<T, kThreads>(args, call, rows::Source<T, RowOp::kCopy, true>(part, blockIdx.x), whole);
  } else if (part.gated) {
    gather_row<T, kThreads>(args, call, rows::Source<T, RowOp::kActivate, true>(part, blockIdx.x), whole);
  } else {
    gather_row<T, kThreads>(args, call, rows::Source<T, RowOp::kCopy, true>(part, blockIdx.x), whole);
  }
}

// It goes through its row once while earlier kernels run, as rows/pass_chained.cu does: what a chain waits for is the
// fetching of instructions.
template <class T, RowOp kOp, int kThreads, int kPacks>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const __grid_constant__ GatherRowsArgs args) {
  extern __shared__ int4 shared_memory[];
  __shared__ rows::Meeting<kThreads, rows::kMaxGroups<kThreads, kPacks>> meeting;
  __shared__ float scale;
  const int thread = static_cast<int>(threadIdx.x);
  char* const memory = reinterpret_cast<char*>(shared_memory);
  launch_dependents();
  RowPassArgs row = args.rows;
  if (kOp == RowOp::kNorm) rows::stage_affine<kThreads>(row, memory, thread);
  auto* const whole = reinterpret_cast<Pack<T>*>(memory + rows::affine_bytes(args.rows));
  const auto given = [inverse = rows::given_inverse(args.rows)] { return inverse; };
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
    rows::pass_row<T, kOp, kThreads, kPacks>(row, given, max(index, int64_t{0}), thread, meeting);
    if (index >= 0) break;
    wait_for_predecessors();
    __syncthreads();
    const peers::Call call(args.peers);
    number = call.number;
    exchange<T, kThreads>(args, call, whole);
    row.sum = args.rows.sum;
    row.y = args.rows.y;
    row.q = args.rows.q;
    row.scales = args.rows.scales;
    __syncthreads();
  }
  peers::count(args.peers, number);
}

struct RowsKernel {
  const void* function;
  int threads;
  DeviceFlags* raised;
};

template <class T, RowOp kOp, int kThreads, int kPacks>
RowsKernel kernel_of() {
  static DeviceFlags raised{};
  return {reinterpret_cast<const void*>(gather_rows_kernel<T, kOp, kThreads, kPacks>), kThreads, &raised};
}

constexpr int kFewThreads = 512;  // one pack each
constexpr int kThreads = 1024;
constexpr int kNormPacks = 2, kCopyPacks = 4;
constexpr int kNoOptIn = 40960;  // bytes of dynamic shared memory, beside a kernel's own, that need none

template <class T>
RowsKernel kernel_for(const RowPassArgs& rows) {
  const bool few = rows.cols <= kFewThreads * kPack;
  if (rows.norm == Norm::kNone) {
    return few ? kernel_of<T, RowOp::kCopy, kFewThreads, 1>() : kernel_of<T, RowOp::kCopy, kThreads, kCopyPacks>();
  }
  return few ? kernel_of<T, RowOp::kNorm, kFewThreads, 1>() : kernel_of<T, RowOp::kNorm, kThreads, kNormPacks>();
}

// A norm's weight and bias in fp32, and the row.
constexpr int kMostShared = kThreads * kPack * (kNormPacks * (4 + 4 + 2));
static_assert(kMostShared >= kThreads * kPack * kCopyPacks * 2 && kMostShared <= 162 << 10);

}  // namespace

int64_t most_gathered_columns(bool norm) { return kThreads * kPack * (norm ? kNormPacks : kCopyPacks); }

void gather_rows(const GatherRowsArgs& args, int device, Stream stream) {
  if (args.rows.rows == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const RowsKernel kernel =
      args.rows.type == DType::kFloat16 ? kernel_for<__half>(args.rows) : kernel_for<__nv_bfloat16>(args.rows);
  const int shared = rows::affine_bytes(args.rows) + 2 * static_cast<int>(args.rows.cols);
  if (shared > kNoOptIn) allow_shared_memory(kernel.function, kMostShared, device, *kernel.raised);
  GatherRowsArgs kernel_args = args;
  launch_kernel("gather_rows", kernel.function, dim3(static_cast<unsigned>(args.rows.rows)),
                dim3(static_cast<unsigned>(kernel.threads)), shared, dim3(1), is_chained(cuda_stream, device),
                &kernel_args, cuda_stream);
}

}  // namespace octofuse
