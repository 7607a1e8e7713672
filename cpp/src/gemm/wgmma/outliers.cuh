// LLM.int8() of many tokens (fewer: digits.cuh): columns with an outlier follow as further blocks of K, in fp16 or
// bf16. Sums of int8 become float and are multiplied by x's scales first, for which the epilogue then takes 1:
//
//   t = (float(acc) * x_scale + sum of the outliers' products) * w_scale + bias
//
// Without an outlier all this is left out, and the epilogue's formula stands as it is.
#pragma once

#include "epilogue/outliers.cuh"
#include "gemm/wgmma/tile.cuh"

namespace octofuse::wgmma {

// Columns that come through the ring, and in how many blocks; others are read where they lie.
__device__ inline int columns_in_blocks(const OutlierKernelArgs& args) {
  return min(*args.outliers.count, kMostGathered);
}

__device__ inline int column_blocks(const OutlierKernelArgs& args) {
  return (columns_in_blocks(args) + kOutlierBlock - 1) / kOutlierBlock;
}

// The scales of x that a thread's accumulators take, from row `first` of the warpgroup in the tile on.
template <bool kSwap, int kCols, int kRowBlocks>
struct TokenScales {
  static constexpr int kSize = kSwap ? kCols / 4 : 2 * kRowBlocks;
  float values[kSize];

  TokenScales() = default;
  __device__ TokenScales(const OutlierKernelArgs& args, int m0, int first, int thread) {
    const int row = first + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int token = kSwap ? i / 2 * 8 + thread % 4 * 2 + i % 2 : row + i / 2 * 64 + i % 2 * 8;
      values[i] = scale_at(args.epilogue.x_scale, min(m0 + token, args.output.m - 1));
    }
  }

  // Sums as float times these, in the same registers.
  __device__ void scale(uint32_t (&sums)[kRowBlocks * kCols / 2]) const {
#pragma unroll
    for (int i = 0; i < kRowBlocks * kCols / 2; ++i) {
      const float value = values[kSwap ? i / 4 * 2 + i % 2 : i / (kCols / 2) * 2 + i / 2 % 2];
      sums[i] = __float_as_uint(__fmul_rn(__int2float_rn(static_cast<int32_t>(sums[i])), value));
    }
  }
};

// finish_tile() for outputs in x's type.
template <int kPitch, class Share, class Vectors>
__device__ inline void finish_half(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                                   const Share& share, const float* sums) {
  if (output.type == DType::kFloat16) return finish_as<__half, kPitch>(e, output, vectors, share, sums);
  finish_as<__nv_bfloat16, kPitch>(e, output, vectors, share, sums);
}

// A sum as float: without an outlier it is int32.
__device__ inline float float_of(uint32_t sum, int count) {
  return count > 0 ? __uint_as_float(sum) : __int2float_rn(static_cast<int32_t>(sum));
}

// The epilogue's scales of tokens, where they are in the sums already. By one warp.
template <class Vectors>
__device__ inline void take_scales(const OutlierKernelArgs& args, Vectors& vectors, int lane) {
  if (*args.outliers.count == 0) return;
  __syncwarp();
  for (int i = lane; i < static_cast<int>(sizeof(vectors.x_scale) / sizeof(float)); i += 32) vectors.x_scale[i] = 1.0F;
}

// Four matrices of 8 rows by 16 bytes from shared memory, as mma's operands have them; lane i gives the address of row
// i % 8 of matrix i / 8.
__device__ inline uint4 load_matrices(uint32_t row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(row)
               : "memory");
  return v;
}

// 16 bytes, eight columns, of a row of a tile in TMA's 128-byte swizzle.
__device__ inline uint32_t swizzled(const uint8_t* tile, int row, int octet) {
  return shared_address(tile) + static_cast<uint32_t>(row * 128 + (octet ^ row % 8) * 16);
}

// The first `left` of a block's 64 columns: by mma.sync, since sums that were no accumulators before would have
// wgmma's instructions wait for each other. rows: 64 a row block; this is the warpgroup's thread.
template <class T, int kCols, int kRowBlocks>
__device__ inline void multiply_block(const uint8_t* rows, const uint8_t* cols, int left, int thread,
                                      uint32_t (&sums)[kRowBlocks * kCols / 2]) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int step = 0; step < 4 && step * 16 < left; ++step) {
    uint4 a[kRowBlocks];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      a[r] = load_matrices(swizzled(rows, r * 64 + thread / 32 * 16 + lane % 16, step * 2 + lane / 16));
    }
#pragma unroll
    for (int col = 0; col < kCols; col += 16) {
      const uint4 b = load_matrices(swizzled(cols, col + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        const uint32_t of_rows[4] = {a[r].x, a[r].y, a[r].z, a[r].w};
        auto* const first = reinterpret_cast<float*>(&sums[r * (kCols / 2) + col / 2]);
        mma_half<T>(of_rows, b.x, b.y, reinterpret_cast<float (&)[4]>(first[0]));
        mma_half<T>(of_rows, b.z, b.w, reinterpret_cast<float (&)[4]>(first[4]));
      }
    }
  }
}

template <int kCols, int kRowBlocks>
__device__ inline void multiply_block(DType type, const uint8_t* rows, const uint8_t* cols, int left, int thread,
                                      uint32_t (&sums)[kRowBlocks * kCols / 2]) {
  if (type == DType::kFloat16) {
    multiply_block<__half, kCols, kRowBlocks>(rows, cols, left, thread, sums);
  } else {
    multiply_block<__nv_bfloat16, kCols, kRowBlocks>(rows, cols, left, thread, sums);
  }
}

// The columns from `first` on, read where they lie. row, col: of the output, the first of this thread's warpgroup.
template <bool kSwap, int kCols, int kRowBlocks>
__device__ inline void multiply_rest(const OutlierKernelArgs& args, int first, int count, int row, int col, int thread,
                                     uint32_t (&sums)[kRowBlocks * kCols / 2]) {
  if (first >= count) return;
  const auto multiply = [&](auto type) {
    using T = decltype(type);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      multiply_columns<T, kSwap, 1>(args.outliers, first, count, args.output.m, args.output.n,
                                    row + r * 64 + thread / 32 * 16, col, thread % 32,
                                    reinterpret_cast<float (&)[kCols / 2]>(sums[r * (kCols / 2)]));
    }
  };
  if (args.outliers.type == DType::kFloat16) {
    multiply(__half());
  } else {
    multiply(__nv_bfloat16());
  }
}

// The columns with outliers of a tile from (m0, n0) on. What is read of them first is asked for before the product of
// int8, unless it took too many registers.
template <class Tile>
class TileOutliers {
  using Scales = TokenScales<Tile::kSwap, Tile::kCols, 1>;
  static constexpr bool kEarly = Scales::kSize <= 8;
  const OutlierKernelArgs& args_;
  int m0_, n0_, warpgroup_, thread_;
  Scales scales_;

 public:
  int count;

  // Behind the wait for earlier kernels.
  __device__ TileOutliers(const OutlierKernelArgs& args, int m0, int n0, int thread)
      : args_(args),
        m0_(m0),
        n0_(n0),
        warpgroup_(warpgroup_of(thread)),
        thread_(thread % 128),
        count(*args.outliers.count) {
    if constexpr (kEarly) scales_ = Scales(args, m0, 64 * warpgroup_, thread_);
  }

  // Behind multiply(). d: float afterwards if there are some.
  __device__ void multiply(const Place& place, typename Tile::Shared& shared, const uint8_t* ring,
                           uint32_t (&d)[Tile::kCols / 2]) {
    if (count == 0) return;
    if constexpr (!kEarly) scales_ = Scales(args_, m0_, 64 * warpgroup_, thread_);
    scales_.scale(d);
    int stage = place.k_count % args_.stages;
    uint32_t phase = static_cast<uint32_t>(place.k_count / args_.stages) & 1;
    int last = stage == 0 ? args_.stages - 1 : stage - 1;
    const int in_blocks = min(count, kMostGathered);
    for (int left = in_blocks; left > 0; left -= kOutlierBlock) {
      __syncwarp();
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(1 + warpgroup_));  // all have read the last stage
      if (thread_ == 0) shared.empty[last].arrive();
      shared.full[stage].wait(phase);
      const uint8_t* const block = ring + stage * Tile::kStageBytes;
      multiply_block<Tile::kCols, 1>(args_.outliers.type, block + warpgroup_ * 64 * kBlockK, block + Tile::kBytesA,
                                     left, thread_, d);
      last = stage;
      if (++stage == args_.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    const int row = (Tile::kSwap ? n0_ : m0_) + 64 * warpgroup_;
    multiply_rest<Tile::kSwap, Tile::kCols, 1>(args_, in_blocks, count, row, Tile::kSwap ? m0_ : n0_, thread_, d);
  }
};

}  // namespace octofuse::wgmma
