// Products of columns that hold outliers, where they lie in memory, by a warp on tensor cores: mma.sync.
#pragma once

#include "device/mma.cuh"
#include "epilogue/formula.cuh"

namespace octofuse {

// Of 16 columns of a row, from the list's number `at` on, those that a lane of a quad has of mma's operands, in T:
// zeros behind the list's end.
template <class T, class From>
__device__ inline uint2 load_columns(const From* row, const int* columns, int at, int count, int lane) {
  const auto pair_at = [&](int first) {
    float values[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float found = to_float(row[columns[min(first + i, count - 1)]]);
      values[i] = first + i < count ? found : 0.0F;
    }
    struct alignas(4) {
      T values[2];
    } pair;
    round_to(values, 0, 0.0F, pair.values);
    return *reinterpret_cast<const uint32_t*>(&pair);
  };
  at += lane % 4 * 2;
  return make_uint2(pair_at(at), pair_at(at + 8));
}

// sums += the warp's 16 rows by 2 * kSize cols of the product of the list's columns from `first` on; rows are tokens
// and cols channels, or with kSwap the other way round. sums: as mma's results, 4 a block of 8 cols, rows lane / 4 and
// 8 further, cols lane % 4 * 2 and the next. Of rows and cols that do not exist, nothing that counts.
template <class T, bool kSwap, int kSize>
__device__ inline void multiply_columns(const OutlierColumns& given, int first, int count, int m, int n, int row,
                                        int col, int lane, float (&sums)[kSize]) {
  row += lane / 4;
  col += lane / 4;
#pragma unroll 1
  for (int at = first; at < count; at += 16) {
    const auto of_x = [&](int token) {
      const T* const x = static_cast<const T*>(given.x) + min(token, m - 1) * given.ldx;
      return load_columns<T>(x, given.columns, at, count, lane);
    };
    const auto of_w = [&](int channel) {
      const int8_t* const w = given.w + min(channel, n - 1) * given.ldw;
      return load_columns<T>(w, given.columns, at, count, lane);
    };
    const uint2 low = kSwap ? of_w(row) : of_x(row);
    const uint2 high = kSwap ? of_w(row + 8) : of_x(row + 8);
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      const uint2 of_col = kSwap ? of_x(col + i * 8) : of_w(col + i * 8);
      mma_half<T>({low.x, high.x, low.y, high.y}, of_col.x, of_col.y, reinterpret_cast<float (&)[4]>(sums[4 * i]));
    }
  }
}

}  // namespace octofuse
