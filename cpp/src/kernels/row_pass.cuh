// One pass over rows: read a row, add a residual, normalise or activate it, find its scale, write it quantised. The row
// stays in the registers of a warp or a block from its one read to its one write; rows that do not fit, or cannot be
// read in vectors, take the same steps and read their operands again.
//
// The order of every sum depends on the row's length alone, never on how threads share the row: 8 consecutive elements
// (a pack) are added as a tree, 32 packs (a group) as a tree, lane l of 32 adds groups l, l + 32, ... in order, and the
// lanes are added as a tree. So all variants, and the CPU (testing/reference.py), give the same bits.
#pragma once

#include <cuda_runtime.h>

#include "kernels/tile_epilogue.cuh"
#include "octofuse/row_pass.h"

namespace octofuse::rows {

constexpr int kPack = 8;
constexpr uint32_t kWarp = 0xFFFFFFFFU;

enum class RowOp { kCopy, kNorm, kActivate };

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
  for (int offset = 16; offset > 0; offset /= 2) value = __fadd_rn(value, __shfl_xor_sync(kWarp, value, offset));
  return value;
}

// kThreads threads hold a row: pack `thread + i * kThreads` in packs[i]. kPacks 0: nothing is held, `load` is asked
// again. load(index, i) gives pack `index`, the thread's i-th.
template <class T, int kThreads, int kPacks>
struct Row {
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
  // block's own, another one for every sum of a row.
  template <class Load, class Term>
  __device__ float sum(Load load, Term term, float* of_group) {
    const int lane = thread % 32;
    const int groups = (count + 31) / 32;
    const int rounds = kPacks == 0 ? (count + kThreads - 1) / kThreads : kPacks;
    float mine = 0.0F;
#pragma unroll
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
      __syncthreads();
      constexpr int kRounds = (kPacks * kThreads + 1023) / 1024;  // known: a loop would cost as much as a pack
#pragma unroll
      for (int i = 0; i < kRounds || (kPacks == 0 && lane + 32 * i < groups); ++i) {
        if (lane + 32 * i < groups) mine = __fadd_rn(mine, of_group[lane + 32 * i]);
      }
    }
    return warp_sum(mine);
  }
};

// Groups of the longest row that a variant takes.
template <int kThreads, int kPacks>
constexpr int kMaxGroups = kPacks > 0 ? kThreads * kPacks / 32 : (static_cast<int>(kMaxK) / kPack + 31) / 32 + 1;

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
template <int kThreads>
__device__ inline float row_max(float value) {
  uint32_t bits = __reduce_max_sync(kWarp, __float_as_uint(value));
  if constexpr (kThreads > 32) {
    __shared__ uint32_t of_warp[kThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = __reduce_max_sync(kWarp, of_warp[threadIdx.x % (kThreads / 32)]);
  }
  return __uint_as_float(bits);
}

// A zero row gets scale 1, so that nobody divides by zero later.
__device__ inline float scale_of(float amax) { return amax == 0.0F ? 1.0F : __fdiv_rn(amax, 127.0F); }

// Out of line: four activations of 8 elements, in every pack of every variant, would be most of this file's machine
// code.
template <class T>
__device__ __noinline__ Pack<T> activated(Pack<T> pack, Activation activation) {
  Pack<float> wide = widen(pack);
  activate_by<T, std::is_same_v<T, float>>(activation, wide.values);
  return narrow<T>(wide);
}

// What a row is read from: x, and with it the residual or, gated, the other half of the row.
template <class T, RowOp kOp, bool kWide>
struct Source {
  const RowPassArgs& args;
  const T* x;
  const T* residual;  // or nullptr
  int cols;

  __device__ Source(const RowPassArgs& args, int64_t row)
      : args(args),
        x(static_cast<const T*>(args.x) + row * args.ldx),
        residual(args.residual == nullptr ? nullptr : static_cast<const T*>(args.residual) + row * args.residual_ld),
        cols(static_cast<int>(args.cols)) {}

  __device__ Pack<T> read(const T* from, int index) const {
    if constexpr (kWide) {
      return *reinterpret_cast<const Pack<T>*>(from + index * kPack);
    } else {
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const int col = index * kPack + j;
        pack.values[j] = col < cols ? from[col] : from_float<T>(0.0F);
      }
      return pack;
    }
  }

  __device__ Pack<T> operator()(int index, int = 0) const {
    Pack<T> pack = read(x, index);
    if constexpr (kOp == RowOp::kNorm) {
      if (residual != nullptr) {
        const Pack<T> other = read(residual, index);
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          pack.values[j] = from_float<T>(__fadd_rn(to_float(pack.values[j]), to_float(other.values[j])));
        }
      }
    } else if constexpr (kOp == RowOp::kActivate) {
      pack = activated(pack, args.activation);
      if (args.gated) {
        const Pack<T> up = read(x + cols, index);
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          pack.values[j] = from_float<T>(__fmul_rn(to_float(pack.values[j]), to_float(up.values[j])));
        }
      }
    }
    return pack;
  }
};

// weight[col] or bias[col] for a pack, in fp32.
template <class T, bool kWide>
__device__ inline void load_affine(const void* data, DType type, int index, int cols, float (&values)[kPack]) {
  const auto load = [&](auto* typed) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    if constexpr (kWide) {
      const Pack<E> pack = *reinterpret_cast<const Pack<E>*>(typed + index * kPack);
#pragma unroll
      for (int j = 0; j < kPack; ++j) values[j] = to_float(pack.values[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kPack; ++j) values[j] = to_float(typed[min(index * kPack + j, cols - 1)]);
    }
  };
  if (!std::is_same_v<T, float> && type == DType::kFloat32) {
    load(static_cast<const float*>(data));
  } else {
    load(static_cast<const T*>(data));
  }
}

// The last steps of a norm, one fp32 operation each: (h - mean) * inverse, * weight, + bias, and the result to T. It is
// given packs of h - mean.
template <class T, bool kWide>
struct Normalise {
  const RowPassArgs& args;
  float inverse;

  __device__ Pack<T> operator()(Pack<float> pack, int index) const {
    const int cols = static_cast<int>(args.cols);
    float factor[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) pack.values[j] = __fmul_rn(pack.values[j], inverse);
    if (args.weight != nullptr) {
      load_affine<T, kWide>(args.weight, args.affine_type, index, cols, factor);
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.values[j] = __fmul_rn(pack.values[j], factor[j]);
    }
    if (args.bias != nullptr) {
      load_affine<T, kWide>(args.bias, args.affine_type, index, cols, factor);
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.values[j] = __fadd_rn(pack.values[j], factor[j]);
    }
    if constexpr (!kWide) {  // what lies behind the row's end must not count for its scale
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.values[j] = index * kPack + j < cols ? pack.values[j] : 0.0F;
    }
    return narrow<T>(pack);
  }
};

// 1 / sqrt(mean of squares + eps), each of the four steps rounded once.
__device__ inline float inverse_root(float sum, int cols, float eps) {
  const float mean = __fadd_rn(__fdiv_rn(sum, static_cast<float>(cols)), eps);
  return __fdiv_rn(1.0F, __fsqrt_rn(mean));
}

template <bool kWide, class T>
__device__ inline void store(T* row, int index, int cols, const Pack<T>& pack) {
  if constexpr (kWide) {
    *reinterpret_cast<Pack<T>*>(row + index * kPack) = pack;
  } else {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (index * kPack + j < cols) row[index * kPack + j] = pack.values[j];
    }
  }
}

__device__ inline int64_t col32_offset(const RowPassArgs& args, int pack) {
  return pack / 4 * args.q_group + pack % 4 * kPack;
}

// each(f) hands every finished pack of this thread to f.
template <class T, int kThreads, bool kWide, class Each>
__device__ void write(const RowPassArgs& args, int64_t row, int thread, Each each) {
  const int cols = static_cast<int>(args.cols);
  if (args.y != nullptr) {
    T* y = static_cast<T*>(args.y) + row * args.cols;
    return each([&](const Pack<T>& pack, int index) { store<kWide>(y, index, cols, pack); });
  }
  float r = 0.0F;
  if (args.scales != nullptr) {
    Largest<T> largest;
    each([&](const Pack<T>& pack, int) { largest.take(pack); });
    const float scale = scale_of(row_max<kThreads>(largest.value()));
    if (thread == 0) args.scales[row] = scale;
    r = reciprocal(scale);
  } else {
    r = reciprocal(scale_at(args.scale, 0));
  }
  const bool col32 = args.q_group != 0;
  int8_t* q = args.q + row * (col32 ? 32 : args.cols);
  each([&](const Pack<T>& pack, int index) {
    Pack<int8_t> out;
    round_to(widen(pack).values, -127, r, out.values);
    if (col32) return store<true>(q + col32_offset(args, index), 0, kPack, out);  // behind the row's end: zeros
    store<kWide>(q, index, cols, out);
  });
  if (col32) {
    const int count = (cols + kPack - 1) / kPack;
    const int last = (count + 3) / 4 * 4;
    for (int i = count + thread; i < last; i += kThreads)
      store<true>(q + col32_offset(args, i), 0, kPack, Pack<int8_t>{});
  }
}

template <int kThreads>
constexpr int kBlockOf = kThreads == 32 ? 128 : kThreads;

// Layer or RMS norm of a row: `row` holds it in fp32, `source` reads it in T.
template <class T, int kThreads, int kPacks>
__device__ void normalise_row(const RowPassArgs& args, const Source<T, RowOp::kNorm, (kPacks > 0)>& source,
                              int64_t row_index, int thread, int count) {
  constexpr bool kWide = kPacks > 0;
  __shared__ float of_group[2][kMaxGroups<kThreads, kPacks>];
  const int cols = static_cast<int>(args.cols);
  float mean = 0.0F;
  const auto centred = [&](int index, int i) {
    Pack<float> pack = widen(source(index, i));
#pragma unroll
    for (int j = 0; j < kPack; ++j) pack.values[j] = __fsub_rn(pack.values[j], mean);
    return pack;
  };
  Row<float, kThreads, kPacks> row(thread, count);
  row.fill([&](int index, int i) { return widen(source(index, i)); });
  if (args.sum != nullptr) {
    T* sum = static_cast<T*>(args.sum) + row_index * args.cols;
    const auto load = [&](int index, int i) { return widen(source(index, i)); };
    row.for_each(load, [&](const Pack<float>& pack, int i) { store<kWide>(sum, i, cols, narrow<T>(pack)); });
  }
  if (args.norm == Norm::kLayer) {
    mean = __fdiv_rn(row.sum(centred, [](float v, int) { return v; }, of_group[0]), static_cast<float>(cols));
    if constexpr (kWide) {
      row.for_each(centred, [&](Pack<float>& pack, int) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) pack.values[j] = __fsub_rn(pack.values[j], mean);
      });
    }
  }
  const auto square = [&](float v, int col) { return kWide || col < cols ? __fmul_rn(v, v) : 0.0F; };
  const Normalise<T, kWide> normalise{args, inverse_root(row.sum(centred, square, of_group[1]), cols, args.eps)};
  const auto finished = [&](int index, int i) { return normalise(kWide ? row.packs[i] : centred(index, i), index); };
  Row<T, kThreads, kPacks> result(thread, count);
  result.fill(finished);
  write<T, kThreads, kWide>(args, row_index, thread, [&](auto f) { result.for_each(finished, f); });
}

// kPacks 0 takes rows of any length and alignment.
template <class T, RowOp kOp, int kThreads, int kPacks>
__global__ void __launch_bounds__(kBlockOf<kThreads>) row_pass_kernel(const RowPassArgs args) {
  constexpr bool kWide = kPacks > 0;
  const int64_t row_index = static_cast<int64_t>(blockIdx.x) * (kBlockOf<kThreads> / kThreads) + threadIdx.x / kThreads;
  wait_for_earlier_kernels();
  let_later_kernels_start();
  if (row_index >= args.rows) return;  // whole warps: where more of them share a row, a block is one row
  const Source<T, kOp, kWide> source(args, row_index);
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int count = static_cast<int>((args.cols + kPack - 1) / kPack);
  if constexpr (kOp == RowOp::kNorm) {
    normalise_row<T, kThreads, kPacks>(args, source, row_index, thread, count);
  } else {
    Row<T, kThreads, kPacks> row(thread, count);
    row.fill(source);
    write<T, kThreads, kWide>(args, row_index, thread, [&](auto f) { row.for_each(source, f); });
  }
}

}  // namespace octofuse::rows
