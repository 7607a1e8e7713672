// How threads share a row of 8-element packs, and the sums and maxima over it.
//
// The order of every sum depends on the row's length alone, never on how threads share the row: 8 consecutive elements
// (a pack) are added as a tree, 32 packs (a group) as a tree, lane l of 32 adds groups l, l + 32, ... in order, and the
// lanes are added as a tree. So all kernels, and the CPU (octofuse/reference.py), give the same bits.
#pragma once

#include <cuda_runtime.h>

#include "device/ptx.cuh"
#include "epilogue/formula.cuh"

namespace octofuse::rows {

constexpr int kPack = 8;

template <class T>
struct alignas(sizeof(T) * kPack) Pack {
  T values[kPack];
};

template <class T>
__device__ inline T from_float(float t) {
  T out[1];
  const float in[1] = {t};
  round_to<T>(in, 0, 0.0F, out);
  return out[0];
}

template <class T>
__device__ inline Pack<float> widen(const Pack<T>& pack) {
  Pack<float> wide;
#pragma unroll
  for (int j = 0; j < kPack; ++j) wide.values[j] = to_float(pack.values[j]);
  return wide;
}

template <class T>
__device__ inline Pack<T> narrow(const Pack<float>& wide) {
  Pack<T> pack;
  round_to<T>(wide.values, 0, 0.0F, pack.values);
  return pack;
}

__device__ inline float tree_sum(const float (&v)[kPack]) {
  const auto plus = [](float a, float b) { return __fadd_rn(a, b); };
  return plus(plus(plus(v[0], v[1]), plus(v[2], v[3])), plus(plus(v[4], v[5]), plus(v[6], v[7])));
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = __fadd_rn(value, __shfl_xor_sync(kFullWarp, value, offset));
  return value;
}

// warp_sum() of up to 8 lanes' groups, by every thread for itself: a shuffle takes as long as six additions.
__device__ inline float few_groups_sum(const float* of_group, int groups) {
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __fadd_rn(i < groups ? of_group[i] : 0.0F, 0.0F);
  const auto plus = [](float a, float b) { return __fadd_rn(a, b); };
  return plus(plus(plus(v[0], v[4]), plus(v[2], v[6])), plus(plus(v[1], v[5]), plus(v[3], v[7])));
}

// Waits for the threads that share this thread's row: a block, of kBlock threads at most, may hold several rows, and
// warps that hold none. Its number is an immediate: for one that is computed, the compiler would reserve all 16.
template <int kThreads, int kBlock = 256, int kRow = 0>
__device__ inline void row_barrier() {
  if constexpr ((kRow + 1) * kThreads < kBlock) {
    if (threadIdx.x / kThreads > kRow) return row_barrier<kThreads, kBlock, kRow + 1>();
  }
  barrier_sync<kRowBarrier + kRow, kThreads>();
}

// Groups of the longest row that kThreads threads take with kPacks packs each; 0: any length.
template <int kThreads, int kPacks>
constexpr int kMaxGroups = kPacks > 0 ? kThreads * kPacks / 32 : (static_cast<int>(kMaxK) / kPack + 31) / 32 + 1;

// Shared memory of a row, where the warps that share it meet.
template <int kThreads, int kGroups>
struct Meeting {
  float of_group[2][kGroups];
  uint32_t of_warp[kThreads / 32];
};

// kThreads threads hold a row: pack `thread + i * kThreads` in packs[i]. kPacks 0: nothing is kept, `load` is asked
// again. load(index, i) gives pack `index`, the thread's i-th.
template <class T, int kThreads, int kPacks>
struct Row {
  static constexpr int kUnroll = kPacks > 0 ? kPacks : 1;
  Pack<T> packs[kPacks == 0 ? 1 : kPacks];
  int thread, count;  // count: packs of the row

  __device__ Row(int thread, int count) : thread(thread), count(count) {}

  template <class Load>
  __device__ void fill(Load load) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int index = thread + i * kThreads;
      if (index < count) packs[i] = load(index, i);
    }
  }

  // f(pack, index) for every pack of this thread.
  template <class Load, class F>
  __device__ void for_each(Load load, F f) {
    if constexpr (kPacks == 0) {
#pragma unroll kUnroll
      for (int index = thread; index < count; index += kThreads) {
        Pack<T> pack = load(index, 0);
        f(pack, index);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int index = thread + i * kThreads;
        if (index < count) f(packs[i], index);
      }
    }
  }

  // The sum over the row of term(value, column), in the order above; the same in every thread. `of_group` is the
  // row's own, another one for every sum.
  template <class Load, class Term>
  __device__ float sum(Load load, Term term, float* of_group) {
    const int lane = thread % 32;
    const int groups = (count + 31) / 32;
    const int rounds = kPacks == 0 ? (count + kThreads - 1) / kThreads : kPacks;
    float mine = 0.0F;
#pragma unroll kUnroll
    for (int i = 0; i < rounds; ++i) {
      const int index = thread + i * kThreads;
      float terms[kPack] = {};
      if (index < count) {
        const Pack<T> pack = kPacks == 0 ? load(index, 0) : packs[kPacks == 0 ? 0 : i];
#pragma unroll
        for (int j = 0; j < kPack; ++j) terms[j] = term(to_float(pack.values[j]), index * kPack + j);
      }
      const float group = warp_sum(tree_sum(terms));
      if constexpr (kThreads == 32) {
        if (lane == i) mine = __fadd_rn(mine, group);
      } else if (lane == 0 && index < count) {
        of_group[index / 32] = group;
      }
    }
    if constexpr (kThreads > 32) {
      row_barrier<kThreads>();
      if (groups <= 8) return few_groups_sum(of_group, groups);
      constexpr int kRounds = (kPacks * kThreads + 1023) / 1024;  // known: a loop would cost as much as a pack
#pragma unroll kUnroll
      for (int i = 0; i < kRounds || (kPacks == 0 && lane + 32 * i < groups); ++i) {
        if (lane + 32 * i < groups) mine = __fadd_rn(mine, of_group[lane + 32 * i]);
      }
    }
    return warp_sum(mine);
  }
};

// The largest magnitude so far, or NaN once there was one.
template <class T>
struct Largest {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair amax{from_float<T>(0.0F), from_float<T>(0.0F)};

  __device__ void take(const Pack<T>& pack) {
#pragma unroll
    for (int j = 0; j < kPack; j += 2) {
      amax = __hmax2_nan(amax, __habs2(Pair{pack.values[j], pack.values[j + 1]}));
    }
  }
  __device__ float value() const { return to_float(__hmax_nan(amax.x, amax.y)); }
};

template <>
struct Largest<float> {
  float amax = 0.0F;

  __device__ void take(const Pack<float>& pack) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) asm("max.NaN.f32 %0, %0, %1;" : "+f"(amax) : "f"(fabsf(pack.values[j])));
  }
  __device__ float value() const { return amax; }
};

// The largest of non-negative floats, or NaN if there is one: as integers they keep their order, and NaN is above all.
template <int kThreads, int kBlock = 256>
__device__ inline float row_max(float value, int thread, uint32_t* of_warp) {
  uint32_t bits = __reduce_max_sync(kFullWarp, __float_as_uint(value));
  if constexpr (kThreads > 32) {
    if (thread % 32 == 0) of_warp[thread / 32] = bits;
    row_barrier<kThreads, kBlock>();
    bits = __reduce_max_sync(kFullWarp, of_warp[thread % (kThreads / 32)]);
  }
  return __uint_as_float(bits);
}

// The largest number of a type that rows are quantised to.
__device__ inline float largest_of(DType type) {
  return type == DType::kInt8 ? 127.0F : type == DType::kE4M3 ? 448.0F : 57344.0F;
}

// A zero row gets scale 1, so that nobody divides by zero later.
__device__ inline float scale_of(float amax, DType type) {
  return amax == 0.0F ? 1.0F : __fdiv_rn(amax, largest_of(type));
}

// The bytes of a pack of t * r in this type.
__device__ inline Pack<int8_t> quantised(const Pack<float>& t, DType type, float r) {
  Pack<int8_t> out;
  if (type == DType::kInt8) {
    round_to(t.values, -127, r, out.values);
    return out;
  }
  const auto interpretation = type == DType::kE4M3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    out.values[j] =
        static_cast<int8_t>(__nv_cvt_float_to_fp8(__fmul_rn(t.values[j], r), __NV_SATFINITE, interpretation));
  }
  return out;
}

}  // namespace octofuse::rows
