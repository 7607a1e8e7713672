// Matrices as the bulk copy engine (TMA) reads and writes them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace octofuse {

// A box of `box_rows` rows and `box` elements of each, from `rows` rows of `columns` elements of `bytes` bytes (1, 2 or
// 8), `pitch` bytes apart; zeros beyond the edges. swizzled: a box's rows are 32, 64 or 128 bytes, in the swizzle of as
// many bytes; else they lie one behind the other. data and pitch: multiples of 16.
struct BoxedMatrix {
  const void* data;
  int64_t rows, columns, pitch;
  int bytes, box_rows, box;
  bool swizzled;
};

CUtensorMap tensor_map(const BoxedMatrix& matrix);

}  // namespace octofuse
