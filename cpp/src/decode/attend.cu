// Attention of one new token for each sequence, in one kernel: it appends the token's key and value to the cache, takes
// the softmax over all positions up to the token's own, and weighs the values by it.
//
// The grid is [splits of positions, heads, sequences]. A block reads up to kAttendSplit positions of one head and
// leaves the softmax of these: the highest score, the sum of the weights, and the weighted sum of the values. The block
// of a head that finishes last combines the splits in their order, so that the result does not depend on which one that
// is.
//
// Inside a block each of the 8 warps takes some positions, and kLanes lanes share a position: every lane reads 8 of the
// head's elements, 16 bytes, of keys and of values. All keys and values that earlier steps have left in the cache are
// requested before the kernel that computes the new ones has finished (chain.cuh); only the query and the new token's
// own key and value have to be waited for.
#include <cuda_runtime.h>

#include "device/align.h"
#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/decode.h"
#include "octofuse/device.h"
#include "rows/reduce.cuh"

namespace octofuse {
namespace {

using rows::kPack;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr float kLog2e = 1.44269504088896341F;

// The softmax over some of the positions, in powers of two: the highest score, the sum of all weights
// 2^(score - highest), and the sum of the values of one column, each times its weight.
struct Partial {
  float highest, weight, value;
};

// The factor that rescales a partial softmax to a common highest score. It is 0 for one over no positions, whose
// highest score is -inf: exp2f(-inf - -inf) would be NaN.
__device__ inline float rescale(float highest, float common) {
  return highest == -INFINITY ? 0.0F : exp2f(highest - common);
}

// The softmax over the positions of `count` partial ones, at most kMost, of which of(i) is the i-th. They are added up
// in this order whatever the thread that asks.
template <int kMost, class Of>
__device__ Partial combine(int count, Of of) {
  Partial partials[kMost];
  Partial all{-INFINITY, 0.0F, 0.0F};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    partials[i] = i < count ? of(i) : Partial{-INFINITY, 0.0F, 0.0F};
    all.highest = fmaxf(all.highest, partials[i].highest);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float factor = rescale(partials[i].highest, all.highest);
    all.value = fmaf(factor, partials[i].value, all.value);
    all.weight = fmaf(factor, partials[i].weight, all.weight);
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

// The positions of a split that a warp takes: kAtOnce in each of kPasses passes, with 8 elements of each in a lane.
template <class T, int kLanes>
struct Positions {
  static constexpr int kAtOnce = 32 / kLanes;
  static constexpr int kPass = kWarps * kAtOnce;
  static constexpr int kPasses = kAttendSplit / kPass;
  uint4 key[kPasses] = {};
  uint4 value[kPasses] = {};
  int first;      // this lane's position in the first pass
  int newest;     // the new token's position
  int64_t cache;  // offset of this lane's elements of position 0 in the cache
  bool inside;    // the lane's elements lie in the head, whose size may be no power of two

  // Requests what earlier steps have left in the cache.
  __device__ void load(const AttendArgs& args) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int p = first + i * kPass;
      if (p >= newest || !inside) continue;
      key[i] = at(args.keys, cache + static_cast<int64_t>(p) * args.head_size);
      value[i] = at(args.values, cache + static_cast<int64_t>(p) * args.head_size);
    }
  }

  // Reads the new token's key and value if this lane has its position, and writes them to the cache.
  __device__ void append(const AttendArgs& args, int64_t of_query, int width) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int p = first + i * kPass;
      if (p != newest || !inside) continue;
      void* const qkv = const_cast<void*>(args.qkv);
      key[i] = at(qkv, of_query + width);
      value[i] = at(qkv, of_query + 2 * width);
      at(args.keys, cache + static_cast<int64_t>(p) * args.head_size) = key[i];
      at(args.values, cache + static_cast<int64_t>(p) * args.head_size) = value[i];
    }
  }

  // The scores of this lane's positions, and the highest of all scores of the warp.
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
      for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
      scores[i] = first + i * kPass <= newest ? sum * factor : -INFINITY;
      highest = fmaxf(highest, scores[i]);
    }
#pragma unroll
    for (int offset = 16; offset >= kLanes; offset /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, offset));
    }
    return highest;
  }

  // The sum over the warp's positions of 2^(score - highest) times the lane's 8 columns of the values; returns the sum
  // of the weights alone.
  __device__ float weigh(const float (&scores)[kPasses], float highest, float (&sums)[kPack]) const {
    float v[kPack];
    float weight = 0.0F;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const float of_position = exp2f(scores[i] - highest);
      weight += of_position;
      unpack<T>(value[i], v);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sums[j] = fmaf(of_position, v[j], sums[j]);
    }
#pragma unroll
    for (int offset = 16; offset >= kLanes; offset /= 2) {
      weight += __shfl_xor_sync(kFullWarp, weight, offset);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sums[j] += __shfl_xor_sync(kFullWarp, sums[j], offset);
    }
    return weight;
  }
};

template <class T>
__device__ void store(const AttendArgs& args, int64_t at, const Partial& softmax, bool stores) {
  const T rounded = rows::from_float<T>(__fdividef(softmax.value, softmax.weight));
  if (args.out_type != DType::kInt8) {
    if (stores) static_cast<T*>(args.out)[at] = rounded;
  } else {
    const int8_t q = requantize(to_float(rounded), reciprocal(scale_at(args.scale, 0)), -127);
    if (stores) static_cast<int8_t*>(args.out)[at] = q;
  }
}

// Leaves the softmax of this split in memory. True in the block of the head that does so last: all the others' are
// there for it to read. The fence before the count makes them visible first.
__device__ bool arrive(const AttendArgs& args, int64_t of_head, int split, int splits, const Partial& softmax,
                       float* partials) {
  __shared__ bool last;
  const int thread = static_cast<int>(threadIdx.x);
  float* const mine = partials + split * (args.head_size + 2);
  if (thread < args.head_size) mine[thread] = softmax.value;
  if (thread == 0) {
    mine[args.head_size] = softmax.highest;
    mine[args.head_size + 1] = softmax.weight;
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    last = atomicAdd(args.arrivals + of_head, 1U) == static_cast<uint32_t>(splits) - 1;
    if (last) args.arrivals[of_head] = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads, kLanes == 8 ? 3 : 2)
    attend_kernel(const __grid_constant__ AttendArgs args) {
  __shared__ alignas(16) float highest[kWarps];  // in all three: an entry for each warp
  __shared__ alignas(16) float weights[kWarps];
  __shared__ float values[kWarps][kLanes * kPack];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int split = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int sequence = static_cast<int>(blockIdx.z);
  const int width = args.heads * args.head_size;
  const int column = lane % kLanes * kPack;
  const int64_t of_head = static_cast<int64_t>(sequence) * args.heads + head;
  // Two things are read before earlier kernels have finished: the cache, which earlier steps have written, and
  // `positions`. The kernel that writes these (argmax) is followed by embed, which lets its successors start only after
  // its own wait; so they are complete here.
  Positions<T, kLanes> positions;
  const int64_t newest = args.positions[sequence];
  // Outside of the cache: the caller's mistake, which must neither write another head's keys nor leave `arrivals` half
  // counted. A kernel of a chain ends only after its own wait.
  if (newest < 0 || newest >= args.capacity) return wait_for_predecessors();
  positions.newest = static_cast<int>(newest);
  if (split * kAttendSplit > positions.newest) return;  // behind the sequence's end
  positions.first = split * kAttendSplit + warp * positions.kAtOnce + lane / kLanes;
  positions.cache = of_head * args.capacity * args.head_size + column;
  positions.inside = column < args.head_size;
  launch_dependents();  // they wait for this kernel's end, and have time to load what they can until then
  positions.load(args);
  const int64_t of_query = sequence * args.ldqkv + head * args.head_size + column;
  const float factor = kLog2e * rsqrtf(static_cast<float>(args.head_size));
  const bool finishes = thread < args.head_size;
  const int splits = positions.newest / kAttendSplit + 1;
  uint4 query = make_uint4(0, 0, 0, 0);
  // Code that runs once in a block costs more in fetching instructions than in executing them. So while earlier kernels
  // run the loop goes through it once with a query of zeros and stores nothing: the code is in the cache afterwards.
#pragma unroll 1
  for (bool rehearses = args.rehearses;; rehearses = false) {
    if (!rehearses) {
      wait_for_predecessors();
      if (positions.inside) query = at(const_cast<void*>(args.qkv), of_query);
      positions.append(args, of_query, width);
    }
    float scores[Positions<T, kLanes>::kPasses];
    const float of_warp = positions.score(query, factor, scores);
    if (lane == 0) highest[warp] = of_warp;
    __syncthreads();
    Partial softmax{-INFINITY, 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) softmax.highest = fmaxf(softmax.highest, highest[i]);
    float sums[kPack] = {};
    const float weight = positions.weigh(scores, softmax.highest, sums);
    if (lane == 0) weights[warp] = weight;
    if (lane < kLanes) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) values[warp][column + j] = sums[j];
    }
    __syncthreads();
    if (finishes) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        softmax.weight += weights[i];
        softmax.value += values[i][thread];
      }
    }
    if (splits > 1 && !rehearses) {
      const int most = (args.capacity + kAttendSplit - 1) / kAttendSplit;
      const int pitch = args.head_size + 2;
      float* const partials = args.partials + of_head * most * pitch;
      if (!arrive(args, of_head, split, splits, softmax, partials) || !finishes) return;
      const volatile float* const all = partials;  // other blocks have written them: never from a register
      softmax = {-INFINITY, 0.0F, 0.0F};
#pragma unroll 1
      for (int i = 0; i < splits; i += kWarps) {  // 8 splits at a time, whose loads are in flight together
        const Partial more = combine<kWarps>(splits - i, [&](int j) {
          const volatile float* const one = all + (i + j) * pitch;
          return Partial{one[args.head_size], one[args.head_size + 1], one[thread]};
        });
        softmax = combine<2>(2, [&](int j) { return j == 0 ? softmax : more; });
      }
    }
    const int64_t out = static_cast<int64_t>(sequence) * width + head * args.head_size + thread;
    if (finishes) store<T>(args, out, softmax, !rehearses);
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

int64_t attend_partials(int64_t batch, int64_t heads, int64_t head_size, int64_t capacity) {
  return batch * heads * ((capacity + kAttendSplit - 1) / kAttendSplit) * (head_size + 2);
}

void attend(const AttendArgs& args, int device, Stream stream) {
  if (args.batch == 0 || args.heads == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const dim3 grid(static_cast<unsigned>((args.capacity + kAttendSplit - 1) / kAttendSplit),
                  static_cast<unsigned>(args.heads), static_cast<unsigned>(args.batch));
  const bool chained = is_chained(cuda_stream, device);
  AttendArgs kernel_args = args;
  // Where more blocks share an SM, the first ones fetch the code for the others.
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  kernel_args.rehearses = chained && blocks <= 2 * device_capability(device).sm_count;
  const void* kernel =
      args.type == DType::kFloat16 ? kernel_for<__half>(args.head_size) : kernel_for<__nv_bfloat16>(args.head_size);
  launch_kernel("attend", kernel, grid, dim3(kThreads), 0, dim3(1), chained, &kernel_args, cuda_stream);
}

}  // namespace octofuse
