// One pass over rows: read a row, add a residual, normalise or activate it, find its scale, write it quantised. The row
// stays in the registers of a warp or a block from its one read to its one write; rows that do not fit, or cannot be
// read in vectors, take the same steps and read their operands again.
#pragma once

#include "device/chain.cuh"
#include "octofuse/row_pass.h"
#include "rows/reduce.cuh"

namespace octofuse::rows {

enum class RowOp { kCopy, kNorm, kActivate };

// Out of line: four activations of 8 elements, in every pack of every variant, would be most of this file's machine
// code.
template <class T>
__device__ __noinline__ Pack<T> activated(Pack<T> pack, Activation activation) {
  Pack<float> wide = widen(pack);
  activate_by<T, std::is_same_v<T, float>>(activation, wide.values);
  return narrow<T>(wide);
}

// activated(gates) * values.
template <class T>
__device__ inline Pack<T> gated_by(Pack<T> gates, const Pack<T>& values, Activation activation) {
  gates = activated(gates, activation);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    gates.values[j] = from_float<T>(__fmul_rn(to_float(gates.values[j]), to_float(values.values[j])));
  }
  return gates;
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
      pack = args.gated ? gated_by(pack, read(x + cols, index), args.activation) : activated(pack, args.activation);
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

// Every 128 columns by a scale of their own: 16 packs of neighbouring lanes, which all come here together.
template <class T, bool kWide, class Each>
__device__ void write_blocks(const RowPassArgs& args, int64_t row, Each each) {
  constexpr int kPacksOfBlock = static_cast<int>(kScaleBlock) / kPack;
  const int cols = static_cast<int>(args.cols);
  const int count = (cols + kPack - 1) / kPack;
  each([&](const Pack<T>& pack, int index) {
    const int block = index / kPacksOfBlock;
    const int lanes = min(kPacksOfBlock, count - block * kPacksOfBlock);
    const uint32_t mask = ((1U << lanes) - 1) << (threadIdx.x % 32 / kPacksOfBlock * kPacksOfBlock);
    Largest<T> largest;
    largest.take(pack);
    const float amax = __uint_as_float(__reduce_max_sync(mask, __float_as_uint(largest.value())));
    const float scale = scale_of(amax, args.q_type);
    if (index % kPacksOfBlock == 0) args.scales[block * args.rows + row] = scale;
    store<kWide>(args.q + row * args.cols, index, cols, quantised(widen(pack), args.q_type, reciprocal(scale)));
  });
}

// each(f) hands every finished pack of this thread to f; `given` is 1 / args.scale, the row's, where none is found.
template <class T, int kThreads, bool kWide, class Given, class Each>
__device__ void write(const RowPassArgs& args, Given given, int64_t row, int thread, uint32_t* of_warp, Each each) {
  const int cols = static_cast<int>(args.cols);
  if (args.y != nullptr) {
    T* y = static_cast<T*>(args.y) + row * args.cols;
    return each([&](const Pack<T>& pack, int index) { store<kWide>(y, index, cols, pack); });
  }
  float r;
  if (args.block_scales) return write_blocks<T, kWide>(args, row, each);
  if (args.scales != nullptr) {
    Largest<T> largest;
    each([&](const Pack<T>& pack, int) { largest.take(pack); });
    const float amax = row_max<kThreads>(largest.value(), thread, of_warp);
    const float scale = scale_of(amax, args.q_type);
    if (thread == 0) args.scales[row] = args.bare_scales && amax == 0.0F ? 0.0F : scale;
    r = reciprocal(scale);
  } else {
    r = given();
  }
  const bool col32 = args.q_group != 0;
  int8_t* q = args.q + row * (col32 ? 32 : args.cols);
  each([&](const Pack<T>& pack, int index) {
    const Pack<int8_t> out = quantised(widen(pack), args.q_type, r);
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

// Layer or RMS norm of a row: `row` holds it in fp32 (kPacks 0: nothing does), `source` reads it in T.
template <class T, int kThreads, int kPacks, bool kWide, class Given, int kGroups>
__device__ void normalise_row(const RowPassArgs& args, Given given, const Source<T, RowOp::kNorm, kWide>& source,
                              int64_t row_index, int thread, int count, Meeting<kThreads, kGroups>& meeting) {
  constexpr bool kInRegisters = kPacks > 0;
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
    mean = __fdiv_rn(row.sum(centred, [](float v, int) { return v; }, meeting.of_group[0]), static_cast<float>(cols));
    if constexpr (kInRegisters) {
      row.for_each(centred, [&](Pack<float>& pack, int) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) pack.values[j] = __fsub_rn(pack.values[j], mean);
      });
    }
  }
  const auto square = [&](float v, int col) { return kWide || col < cols ? __fmul_rn(v, v) : 0.0F; };
  const Normalise<T, kWide> normalise{args,
                                      inverse_root(row.sum(centred, square, meeting.of_group[1]), cols, args.eps)};
  const auto finished = [&](int index, int i) {
    return normalise(kInRegisters ? row.packs[i] : centred(index, i), index);
  };
  Row<T, kThreads, kPacks> result(thread, count);
  result.fill(finished);
  write<T, kThreads, kWide>(args, given, row_index, thread, meeting.of_warp,
                            [&](auto f) { result.for_each(finished, f); });
}

// One row: `thread` of kThreads holds its share of it in registers, unless kPacks is 0.
template <class T, RowOp kOp, int kThreads, int kPacks, class Given, int kGroups>
__device__ void pass_row(const RowPassArgs& args, Given given, int64_t row_index, int thread,
                         Meeting<kThreads, kGroups>& meeting) {
  constexpr bool kWide = kPacks > 0;
  const Source<T, kOp, kWide> source(args, row_index);
  const int count = static_cast<int>((args.cols + kPack - 1) / kPack);
  if constexpr (kOp == RowOp::kNorm) {
    normalise_row<T, kThreads, kPacks, kWide>(args, given, source, row_index, thread, count, meeting);
  } else {
    Row<T, kThreads, kPacks> row(thread, count);
    row.fill(source);
    write<T, kThreads, kWide>(args, given, row_index, thread, meeting.of_warp,
                              [&](auto f) { row.for_each(source, f); });
  }
}

__device__ inline float given_inverse(const RowPassArgs& args, int64_t row) {
  if (args.q == nullptr || args.scales != nullptr) return 0.0F;
  const float scale = scale_at(args.scale, row);
  return reciprocal(scale == 0.0F ? 1.0F : scale);  // of parts that are all zero
}

// Bytes of shared memory for a norm's weight and bias; behind them lies what a kernel keeps of a row.
__host__ __device__ inline int affine_bytes(const RowPassArgs& args) {
  if (args.norm == Norm::kNone) return 0;
  return 2 * static_cast<int>(args.cols) * (args.affine_type == DType::kFloat32 ? 4 : 2);
}

// A norm's weight and bias to shared memory: every thread copies the packs that it will read.
template <int kThreads>
__device__ void stage_affine(RowPassArgs& args, char* memory, int thread) {
  const int size = args.affine_type == DType::kFloat32 ? 4 : 2;
  const auto stage = [&](const void*& data, char* to) {
    if (data == nullptr) return;
    for (int index = thread; index < args.cols / kPack; index += kThreads) {
      for (int at = index * kPack * size; at < (index + 1) * kPack * size; at += 16) {
        copy_async(shared_address(to + at), static_cast<const char*>(data) + at);
      }
    }
    data = to;
  };
  stage(args.weight, memory);
  stage(args.bias, memory + args.cols * size);
}

// kPacks 0 takes rows of any length and alignment.
template <class T, RowOp kOp, int kThreads, int kPacks>
__global__ void __launch_bounds__(kBlockOf<kThreads>) row_pass_kernel(const RowPassArgs args) {
  __shared__ Meeting<kThreads, kMaxGroups<kThreads, kPacks>> meeting;  // unused where a warp has a row for itself
  const int64_t row_index = static_cast<int64_t>(blockIdx.x) * (kBlockOf<kThreads> / kThreads) + threadIdx.x / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  launch_dependents();
  wait_for_predecessors();
  if (row_index >= args.rows) return;  // whole warps: where more of them share a row, a block is one row
  pass_row<T, kOp, kThreads, kPacks>(args, [&] { return given_inverse(args, row_index); }, row_index, thread, meeting);
}

}  // namespace octofuse::rows
