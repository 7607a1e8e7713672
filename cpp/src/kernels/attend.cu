// Attention of one new token a sequence. A block takes one head's chunk of positions: all keys and values that earlier
// steps have left there are on their way before the kernel that makes the new ones has to be finished. The last block
// of a head to arrive combines the chunks, in order.
#include "kernels/attend.cuh"

#include <cuda_runtime.h>

#include "kernels/launch.h"

namespace octofuse {
namespace {

using namespace attention;

template <class T>
__device__ void store(const AttendArgs& args, int64_t at, const Part& part, bool stores) {
  const T rounded = finished<T>(part);
  if (args.out_type != DType::kInt8) {
    if (stores) static_cast<T*>(args.out)[at] = rounded;
  } else {
    const int8_t q = requantize(to_float(rounded), reciprocal(scale_at(args.scale, 0)), -127);
    if (stores) static_cast<int8_t*>(args.out)[at] = q;
  }
}

// Leaves this chunk's part in memory. True in the last block of the head to do so: it can read all of them.
__device__ bool arrive(const AttendArgs& args, int64_t of_head, int chunk, int chunks, const Part& part, float* parts) {
  __shared__ bool last;
  const int thread = static_cast<int>(threadIdx.x);
  float* const mine = parts + chunk * (args.head_size + 2);
  if (thread < args.head_size) mine[thread] = part.value;
  if (thread == 0) {
    mine[args.head_size] = part.highest;
    mine[args.head_size + 1] = part.weight;
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    last = atomicAdd(args.arrivals + of_head, 1U) == static_cast<uint32_t>(chunks) - 1;
    if (last) args.arrivals[of_head] = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads, kLanes == 8 ? 3 : 2)
    attend_kernel(const __grid_constant__ AttendArgs args) {
  __shared__ Scratch<kLanes> scratch;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int chunk = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int sequence = static_cast<int>(blockIdx.z);
  const int width = args.heads * args.head_size;
  const int column = lane % kLanes * kPack;
  const int64_t of_head = static_cast<int64_t>(sequence) * args.heads + head;
  // Read before earlier kernels have finished: the cache, which earlier steps have written, and `places`, behind whose
  // writer stands a kernel that nothing overtakes (embed).
  Positions<T, kLanes> positions;
  positions.place = static_cast<int>(args.places[sequence]);
  if (chunk * kAttendChunk > positions.place) return;
  positions.first = chunk * kAttendChunk + thread / 32 * positions.kAtOnce + lane / kLanes;
  positions.cache = of_head * args.capacity * args.head_size + column;
  positions.inside = column < args.head_size;
  let_later_kernels_start();  // they wait for this one's end, and have time to rehearse until then
  positions.load(args);
  const int64_t of_query = sequence * args.ldqkv + head * args.head_size + column;
  const bool finishes = thread < args.head_size;
  const int chunks = positions.place / kAttendChunk + 1;
  uint4 query = make_uint4(0, 0, 0, 0);
  // What happens once a block costs more in fetching instructions than in executing them: it is rehearsed while earlier
  // kernels run, and nothing is stored.
#pragma unroll 1
  for (bool rehearses = args.rehearses;; rehearses = false) {
    if (!rehearses) {
      wait_for_earlier_kernels();
      const auto of = [&](int part) { return at(const_cast<void*>(args.qkv), of_query + part * width); };
      if (positions.inside) query = of(0);
      positions.append(args, of);
    }
    Part part = attend_chunk(positions, query, args.head_size, thread, scratch, [] { __syncthreads(); });
    if (chunks > 1 && !rehearses) {
      const int most = (args.capacity + kAttendChunk - 1) / kAttendChunk;
      const int pitch = args.head_size + 2;
      float* const parts = args.parts + of_head * most * pitch;
      if (!arrive(args, of_head, chunk, chunks, part, parts) || !finishes) return;
      const volatile float* const all = parts;
      part = combine_chunks(chunks, [&](int i) {
        const volatile float* const one = all + i * pitch;
        return Part{one[args.head_size], one[args.head_size + 1], one[thread]};
      });
    }
    const int64_t out = static_cast<int64_t>(sequence) * width + head * args.head_size + thread;
    if (finishes) store<T>(args, out, part, !rehearses);
    if (!rehearses) return;
    __syncthreads();
  }
}

template <class T>
const void* kernel_for(int head_size) {
  return head_size <= 64 ? reinterpret_cast<const void*>(attend_kernel<T, 8>)
                         : reinterpret_cast<const void*>(attend_kernel<T, 16>);
}

}  // namespace

int64_t attend_parts(int64_t batch, int64_t heads, int64_t head_size, int64_t capacity) {
  return batch * heads * ((capacity + kAttendChunk - 1) / kAttendChunk) * (head_size + 2);
}

void attend(const AttendArgs& args, int device, Stream stream) {
  if (args.batch == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const dim3 grid(static_cast<unsigned>((args.capacity + kAttendChunk - 1) / kAttendChunk),
                  static_cast<unsigned>(args.heads), static_cast<unsigned>(args.batch));
  const bool chained = is_chained(cuda_stream, device);
  AttendArgs kernel_args = args;
  // Blocks that share an SM bring the code for each other.
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  kernel_args.rehearses = chained && blocks <= 2 * device_capability(device).sm_count;
  const void* kernel =
      args.type == DType::kFloat16 ? kernel_for<__half>(args.head_size) : kernel_for<__nv_bfloat16>(args.head_size);
  launch_kernel("attend", kernel, grid, dim3(kThreads), 0, dim3(1), chained, &kernel_args, cuda_stream);
}

}  // namespace octofuse
