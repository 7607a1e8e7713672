// Products of columns that hold outliers, where they lie in memory, by a warp on tensor cores: mma.sync.
#pragma once

#include "device/mma.cuh"
#include "epilogue/formula.cuh"

namespace octofuse {

// Eight columns of a row, from the list's number `at` on, in T: zeros behind its end. kUnroll: of 4, how many pairs
// are on their way at once.
template <class T, int kUnroll, class From>
__device__ inline uint4 load_columns(const From* row, const int* columns, int at, int count) {
  const auto value = [&](int i) {
    const float found = to_float(row[columns[min(i, count - 1)]]);
    return i < count ? found : 0.0F;
  };
  uint4 found = make_uint4(0, 0, 0, 0);
#pragma unroll kUnroll
  for (int i = at; i < at + 8; i += 2) {
    struct alignas(4) {
      T values[2];
    } pair;
    const float of_pair[2] = {value(i), value(i + 1)};
    round_to(of_pair, 0, 0.0F, pair.values);
    found = make_uint4(found.y, found.z, found.w, *reinterpret_cast<const uint32_t*>(&pair));
  }
  return found;
}

// sums += the warp's 16 rows by 2 * kSize cols of the product of the list's columns from `first` on; rows are tokens
// and cols channels, or with kSwap the other way round. sums: as mma's results, 4 a block of 8 cols, rows lane / 4 and
// 8 further, cols lane % 4 * 2 and the next. Of rows and cols that do not exist, nothing that counts.
template <class T, bool kSwap, int kUnroll, int kSize>
__device__ inline void multiply_columns(const OutlierColumns& given, int first, int count, int m, int n, int row,
                                        int col, int lane, float (&sums)[kSize]) {
  row += lane / 4;
  col += lane / 4;
#pragma unroll 1
  for (int at = first + lane % 4 * 8; at - lane % 4 * 8 < count; at += 32) {
    const auto of_x = [&](int token) {
      const T* const x = static_cast<const T*>(given.x) + min(token, m - 1) * given.ldx;
      return load_columns<T, kUnroll>(x, given.columns, at, count);
    };
    const auto of_w = [&](int channel) {
      const int8_t* const w = given.w + min(channel, n - 1) * given.ldw;
      return load_columns<T, kUnroll>(w, given.columns, at, count);
    };
    const uint4 low = kSwap ? of_w(row) : of_x(row);
    const uint4 high = kSwap ? of_w(row + 8) : of_x(row + 8);
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      const uint4 of_col = kSwap ? of_x(col + i * 8) : of_w(col + i * 8);
      mma_quads<T>(low, high, of_col, reinterpret_cast<float (&)[4]>(sums[4 * i]));
    }
  }
}

}  // namespace octofuse
