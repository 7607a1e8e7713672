// Attention of one new token a sequence. A block takes one head's chunk of positions: all keys and values that earlier
// steps have left there are on their way before the kernel that makes the new ones has to be finished. A position is
// shared by kLanes lanes, 8 elements each; the last block of a head to arrive combines the chunks, in order.
#include <cuda_runtime.h>

#include "kernels/launch.h"
#include "kernels/rows.cuh"
#include "octofuse/decode.h"

namespace octofuse {
namespace {

using rows::kPack;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr float kLog2e = 1.44269504088896341F;

// A softmax over some positions, in powers of two: the highest score, the sum of all 2^(score - highest), and the sum
// of the values, each times that.
struct Part {
  float highest, weight, value;
};

// What a part counts for beside a higher score; nothing where it had no position.
__device__ inline float share_of(float highest, float common) {
  return highest == -INFINITY ? 0.0F : exp2f(highest - common);
}

// At most kMost parts, `count` of them, in order; of(i) is the i-th.
template <int kMost, class Of>
__device__ Part combine(int count, Of of) {
  Part parts[kMost];
  Part all{-INFINITY, 0.0F, 0.0F};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    parts[i] = i < count ? of(i) : Part{-INFINITY, 0.0F, 0.0F};
    all.highest = fmaxf(all.highest, parts[i].highest);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float share = share_of(parts[i].highest, all.highest);
    all.value = fmaf(share, parts[i].value, all.value);
    all.weight = fmaf(share, parts[i].weight, all.weight);
  }
  return all;
}

template <class T>
__device__ inline void unpack(const uint4& words, float (&values)[kPack]) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair pair = *reinterpret_cast<const Pair*>(&all[i]);
    values[2 * i] = to_float(pair.x);
    values[2 * i + 1] = to_float(pair.y);
  }
}

__device__ inline uint4& at(void* data, int64_t offset) {
  return *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + offset);
}

// A warp's positions of a chunk: kAtOnce in each of kPasses, 8 elements a lane.
template <class T, int kLanes>
struct Positions {
  static constexpr int kAtOnce = 32 / kLanes;
  static constexpr int kPass = kWarps * kAtOnce;
  static constexpr int kPasses = kAttendChunk / kPass;
  uint4 key[kPasses] = {};
  uint4 value[kPasses] = {};
  int first, place;  // of this lane; the new token's
  int64_t cache;     // offset of position 0
  bool inside;       // the lane's elements lie in the head

  // What earlier steps have left.
  __device__ void load(const AttendArgs& args) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int p = first + i * kPass;
      if (p >= place || !inside) continue;
      key[i] = at(args.keys, cache + static_cast<int64_t>(p) * args.head_size);
      value[i] = at(args.values, cache + static_cast<int64_t>(p) * args.head_size);
    }
  }

  // The new token's key and value, where this lane has its position, and into the cache.
  __device__ void append(const AttendArgs& args, int64_t of_query, int width) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int p = first + i * kPass;
      if (p != place || !inside) continue;
      void* const qkv = const_cast<void*>(args.qkv);
      key[i] = at(qkv, of_query + width);
      value[i] = at(qkv, of_query + 2 * width);
      at(args.keys, cache + static_cast<int64_t>(p) * args.head_size) = key[i];
      at(args.values, cache + static_cast<int64_t>(p) * args.head_size) = value[i];
    }
  }

  // This lane's scores, and the highest of the warp's.
  __device__ float score(const uint4& query, float factor, float (&scores)[kPasses]) const {
    float q[kPack];
    float k[kPack];
    unpack<T>(query, q);
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      unpack<T>(key[i], k);
      float sum = 0.0F;
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum = fmaf(q[j], k[j], sum);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(rows::kWarp, sum, offset);
      scores[i] = first + i * kPass <= place ? sum * factor : -INFINITY;
      highest = fmaxf(highest, scores[i]);
    }
#pragma unroll
    for (int offset = 16; offset >= kLanes; offset /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(rows::kWarp, highest, offset));
    }
    return highest;
  }

  // The lane's 8 columns over the warp's positions, weighted by 2^(score - highest); returns the sum of these weights.
  __device__ float weigh(const float (&scores)[kPasses], float highest, float (&sums)[kPack]) const {
    float v[kPack];
    float weight = 0.0F;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const float share = exp2f(scores[i] - highest);
      weight += share;
      unpack<T>(value[i], v);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sums[j] = fmaf(share, v[j], sums[j]);
    }
#pragma unroll
    for (int offset = 16; offset >= kLanes; offset /= 2) {
      weight += __shfl_xor_sync(rows::kWarp, weight, offset);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sums[j] += __shfl_xor_sync(rows::kWarp, sums[j], offset);
    }
    return weight;
  }
};

template <class T>
__device__ void store(const AttendArgs& args, int64_t at, const Part& part, bool stores) {
  const T rounded = rows::from_float<T>(__fdividef(part.value, part.weight));
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
  __shared__ alignas(16) float highest[kWarps];  // of each warp, and so on
  __shared__ alignas(16) float weights[kWarps];
  __shared__ float values[kWarps][kLanes * kPack];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
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
  positions.first = chunk * kAttendChunk + warp * positions.kAtOnce + lane / kLanes;
  positions.cache = of_head * args.capacity * args.head_size + column;
  positions.inside = column < args.head_size;
  let_later_kernels_start();  // they wait for this one's end, and have time to rehearse until then
  positions.load(args);
  const int64_t of_query = sequence * args.ldqkv + head * args.head_size + column;
  const float factor = kLog2e * rsqrtf(static_cast<float>(args.head_size));
  const bool finishes = thread < args.head_size;
  const int chunks = positions.place / kAttendChunk + 1;
  uint4 query = make_uint4(0, 0, 0, 0);
  // What happens once a block costs more in fetching instructions than in executing them: it is rehearsed while earlier
  // kernels run, and nothing is stored.
#pragma unroll 1
  for (bool rehearses = args.rehearses;; rehearses = false) {
    if (!rehearses) {
      wait_for_earlier_kernels();
      if (positions.inside) query = at(const_cast<void*>(args.qkv), of_query);
      positions.append(args, of_query, width);
    }
    float scores[Positions<T, kLanes>::kPasses];
    const float of_warp = positions.score(query, factor, scores);
    if (lane == 0) highest[warp] = of_warp;
    __syncthreads();
    Part part{-INFINITY, 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) part.highest = fmaxf(part.highest, highest[i]);
    float sums[kPack] = {};
    const float weight = positions.weigh(scores, part.highest, sums);
    if (lane == 0) weights[warp] = weight;
    if (lane < kLanes) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) values[warp][column + j] = sums[j];
    }
    __syncthreads();
    if (finishes) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        part.weight += weights[i];
        part.value += values[i][thread];
      }
    }
    if (chunks > 1 && !rehearses) {
      const int most = (args.capacity + kAttendChunk - 1) / kAttendChunk;
      const int pitch = args.head_size + 2;
      float* const parts = args.parts + of_head * most * pitch;
      if (!arrive(args, of_head, chunk, chunks, part, parts) || !finishes) return;
      const volatile float* const all = parts;
      part = {-INFINITY, 0.0F, 0.0F};
#pragma unroll 1
      for (int i = 0; i < chunks; i += kWarps) {  // 8 at a time, behind what the ones before have given
        const Part more = combine<kWarps>(chunks - i, [&](int j) {
          const volatile float* const one = all + (i + j) * pitch;
          return Part{one[args.head_size], one[args.head_size + 1], one[thread]};
        });
        part = combine<2>(2, [&](int j) { return j == 0 ? part : more; });
      }
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
