// Attention of one new token over a chunk of positions, by 256 threads: a position is shared by kLanes lanes, 8
// elements each. The order of every sum depends on the positions alone.
#pragma once

#include "kernels/rows.cuh"
#include "octofuse/decode.h"

namespace octofuse::attention {

using rows::kPack;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;  // that share a chunk

// From a product of query and key to a power of two.
__device__ inline float score_factor(int head_size) {
  constexpr float kLog2e = 1.44269504088896341F;
  return kLog2e * rsqrtf(static_cast<float>(head_size));
}

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
  int first, place;      // of this lane; the new token's
  int64_t cache;         // offset of position 0
  bool inside;           // the lane's elements lie in the head
  int passes = kPasses;  // of the warp, that hold positions up to `place`, if the caller knows

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

  // Whether the new token's position is one of this lane's.
  __device__ bool has_new() const {
    return place >= first && (place - first) % kPass == 0 && place - first < kPasses * kPass;
  }

  // The new token's key and value, where this lane has its position, and into the cache. of(part) is part 1 or 2 of the
  // token's qkv, at this lane's column.
  template <class Of>
  __device__ void append(const AttendArgs& args, Of of) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int p = first + i * kPass;
      if (p != place || !inside) continue;
      key[i] = of(1);
      value[i] = of(2);
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
      scores[i] = -INFINITY;
      if (i >= passes) continue;
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
      if (i >= passes) continue;  // its share is 0
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

// Behind what the chunks before have given, 8 at a time; of(i) is chunk i's part.
template <class Of>
__device__ Part combine_chunks(int chunks, Of of) {
  Part part{-INFINITY, 0.0F, 0.0F};
#pragma unroll 1
  for (int i = 0; i < chunks; i += kWarps) {
    const Part more = combine<kWarps>(chunks - i, [&](int j) { return of(i + j); });
    part = combine<2>(2, [&](int j) { return j == 0 ? part : more; });
  }
  return part;
}

// Where the warps of a chunk meet.
template <int kLanes>
struct Scratch {
  alignas(16) float highest[kWarps];  // of each warp, and so on
  alignas(16) float weights[kWarps];
  float values[kWarps][kLanes * kPack];
};

// The chunk's part, its value in the first head_size threads. meet() waits for all threads of the chunk.
template <class T, int kLanes, class Meet>
__device__ Part attend_chunk(const Positions<T, kLanes>& positions, const uint4& query, int head_size, int thread,
                             Scratch<kLanes>& scratch, Meet meet) {
  const int lane = thread % 32;
  const int warp = thread / 32;
  float scores[Positions<T, kLanes>::kPasses];
  const float of_warp = positions.score(query, score_factor(head_size), scores);
  if (lane == 0) scratch.highest[warp] = of_warp;
  meet();
  Part part{-INFINITY, 0.0F, 0.0F};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) part.highest = fmaxf(part.highest, scratch.highest[i]);
  float sums[kPack] = {};
  const float weight = positions.weigh(scores, part.highest, sums);
  if (lane == 0) scratch.weights[warp] = weight;
  if (lane < kLanes) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) scratch.values[warp][lane * kPack + j] = sums[j];
  }
  meet();
  if (thread < head_size) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      part.weight += scratch.weights[i];
      part.value += scratch.values[i][thread];
    }
  }
  return part;
}

template <class T>
__device__ inline T finished(const Part& part) {
  return rows::from_float<T>(__fdividef(part.value, part.weight));
}

}  // namespace octofuse::attention
