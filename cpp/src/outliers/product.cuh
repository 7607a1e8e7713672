// Columns with an outlier times the weight's, on tensor cores: the columns are gathered side by side first. Sums are in
// fp32, 16 columns at a time in ascending order.
#pragma once

#include "device/mma.cuh"
#include "epilogue/formula.cuh"
#include "octofuse/outliers.h"
#include "outliers/list.cuh"
#include "rows/reduce.cuh"

namespace octofuse::outliers {

constexpr int kMostGathered = 256;  // columns; others are read where they lie
constexpr int kColumns = 32;        // columns in shared memory at once

struct ProductArgs {
  OutlierArgs of;
  void* x;       // [m, kMostGathered] of x's type, with zeros up to a multiple of kColumns
  void* w;       // [n, kMostGathered] of x's type, likewise
  int* columns;  // [k], ascending
  int* count;
};

// ---- gathering ----

constexpr int kGatherThreads = 256;
constexpr int kGatherLanes = 8;                             // threads that share a row's columns
constexpr int kGatherRows = kGatherThreads / kGatherLanes;  // of x and w, of a block

template <class T>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ ProductArgs args) {
  __shared__ ColumnList<kGatherThreads> list;
  const OutlierArgs& of = args.of;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kGatherRows + thread / kGatherLanes;
  const int64_t channel = row - of.m;
  const bool is_token = row < of.m;
  const bool is_channel = !is_token && channel < of.n;
  const T* const x = static_cast<const T*>(of.x) + (is_token ? row * of.ldx : 0);
  const int8_t* const w = of.w + (is_channel ? channel * of.k : 0);
  T* const to =
      is_token ? static_cast<T*>(args.x) + row * kMostGathered : static_cast<T*>(args.w) + channel * kMostGathered;
  int total = 0;
  for_each_list(list, of.mask, static_cast<int>((of.k + 31) / 32), [&](const int* columns, int count, int before) {
    total += count;
#pragma unroll 4
    for (int i = thread % kGatherLanes; i < count; i += kGatherLanes) {
      const bool kept = before + i < kMostGathered;
      if (is_token) {
        if (kept) to[before + i] = x[columns[i]];
        of.q[row * of.k + columns[i]] = 0;
      } else if (is_channel && kept) {
        to[before + i] = rows::from_float<T>(static_cast<float>(w[columns[i]]));
      }
    }
    for (int i = thread; blockIdx.x == 0 && i < count; i += kGatherThreads) args.columns[before + i] = columns[i];
  });
  const int end = min((total + kColumns - 1) / kColumns * kColumns, kMostGathered);
  for (int at = total + thread % kGatherLanes; at < end && (is_token || is_channel); at += kGatherLanes) {
    to[at] = rows::from_float<T>(0.0F);
  }
  if (row == 0 && thread == 0) *args.count = total;
}

// ---- products ----

constexpr int kTile = 128;            // tokens and channels of a block
constexpr int kTileThreads = 256;     // a warp has 32 tokens by 64 channels
constexpr int kPitch = kColumns + 8;  // no two rows' words in one bank
constexpr int kTokenTiles = 2, kChannelTiles = 8;

constexpr int kOutPitch = kTile + 8;

template <class T>
union TileMemory {
  struct {
    T x[kTile][kPitch], w[kTile][kPitch];
  };
  T out[kTile][kOutPitch];
};

template <class T>
class TileProduct {
  const ProductArgs& args_;
  TileMemory<T>& memory_;
  int64_t m0_, n0_;
  int count_, lane_, token_, channel_;  // of the tile: the warp's first ones
  float sums_[kTokenTiles][kChannelTiles][4] = {};

 public:
  __device__ TileProduct(const ProductArgs& args, TileMemory<T>& memory)
      : args_(args),
        memory_(memory),
        m0_(static_cast<int64_t>(blockIdx.x) * kTile),
        n0_(static_cast<int64_t>(blockIdx.y) * kTile),
        count_(*args.count),
        lane_(static_cast<int>(threadIdx.x % 32)),
        token_(static_cast<int>(threadIdx.x / 32) % 4 * 32),
        channel_(static_cast<int>(threadIdx.x / 32) / 4 * 64) {}

  __device__ void run() {
#pragma unroll 1
    for (int first = 0; first < count_; first += kColumns) {
      if (first < kMostGathered) {
        load(static_cast<const T*>(args_.x), m0_, args_.of.m, first, memory_.x);
        load(static_cast<const T*>(args_.w), n0_, args_.of.n, first, memory_.w);
      } else {
        load_scattered(first);
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kColumns; k += 16) multiply(k);
      __syncthreads();
    }
    store();
  }

 private:
  using Rows = T[kTile][kPitch];

  __device__ static void load(const T* from, int64_t row0, int64_t rows, int first, Rows& to) {
    constexpr int kVectors = kColumns / 8;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kVectors; i += kTileThreads) {
      const int64_t row = row0 + i / kVectors;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (row < rows) {
        v = *reinterpret_cast<const uint4*>(from + row * kMostGathered + first + i % kVectors * 8);
      }
      *reinterpret_cast<uint4*>(&to[i / kVectors][i % kVectors * 8]) = v;
    }
  }

  __device__ void load_scattered(int first) const {
    const OutlierArgs& of = args_.of;
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kColumns; i += kTileThreads) {
      const int row = i / kColumns;
      const int at = first + i % kColumns;
      const bool exists = at < count_;
      const int column = exists ? args_.columns[at] : 0;
      const T zero = rows::from_float<T>(0.0F);
      const bool is_token = exists && m0_ + row < of.m;
      const bool is_channel = exists && n0_ + row < of.n;
      memory_.x[row][i % kColumns] = is_token ? static_cast<const T*>(of.x)[(m0_ + row) * of.ldx + column] : zero;
      memory_.w[row][i % kColumns] =
          is_channel ? rows::from_float<T>(static_cast<float>(of.w[(n0_ + row) * of.k + column])) : zero;
    }
  }

  __device__ static uint32_t pair(const Rows& rows, int row, int k) {
    return *reinterpret_cast<const uint32_t*>(&rows[row][k]);
  }

  __device__ void multiply(int k) {
    const int column = k + lane_ % 4 * 2;
    uint32_t a[kTokenTiles][4];
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const int row = token_ + i * 16 + lane_ / 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = pair(memory_.x, row + j % 2 * 8, column + j / 2 * 8);
    }
#pragma unroll
    for (int i = 0; i < kChannelTiles; ++i) {
      const int row = channel_ + i * 8 + lane_ / 4;
      const uint32_t b0 = pair(memory_.w, row, column);
      const uint32_t b1 = pair(memory_.w, row, column + 8);
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) mma_half<T>(a[j], b0, b1, sums_[j][i]);
    }
  }

  // Through shared memory, for rows in whole sectors.
  __device__ void store() {
    const OutlierArgs& of = args_.of;
#pragma unroll
    for (int i = 0; i < kChannelTiles; ++i) {
      const int channel = channel_ + i * 8 + lane_ % 4 * 2;
      const int64_t n = n0_ + channel;
      const float first = n < of.n ? scale_at(of.w_scale, n) : 0.0F;
      const float second = n + 1 < of.n ? scale_at(of.w_scale, n + 1) : 0.0F;
#pragma unroll
      for (int j = 0; j < kTokenTiles * 2; ++j) {
        const float* const sums = &sums_[j / 2][i][j % 2 * 2];
        T* const to = &memory_.out[token_ + j * 8 + lane_ / 4][channel];
        to[0] = rows::from_float<T>(__fmul_rn(sums[0], first));
        to[1] = rows::from_float<T>(__fmul_rn(sums[1], second));
      }
    }
    __syncthreads();
    constexpr int kVectors = kTile / 8;
    const bool wide = of.n % 8 == 0;
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kVectors; i += kTileThreads) {
      const int64_t m = m0_ + i / kVectors;
      const int64_t n = n0_ + i % kVectors * 8;
      if (m >= of.m) break;
      const T* const from = &memory_.out[i / kVectors][i % kVectors * 8];
      T* const to = static_cast<T*>(of.out) + m * of.n + n;
      if (wide && n < of.n) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int j = 0; j < 8 && n + j < of.n; ++j) to[j] = from[j];
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kTileThreads) tile_kernel(const __grid_constant__ ProductArgs args) {
  __shared__ __align__(16) TileMemory<T> memory;
  TileProduct<T>(args, memory).run();
}

}  // namespace octofuse::outliers
