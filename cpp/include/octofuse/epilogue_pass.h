// The epilogue as a pass of its own, and what else moves a matrix once.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

struct DequantizeArgs {
  int64_t rows = 0, cols = 0;
  const void* q = nullptr;  // [rows, cols] int8 or int32, row stride ldq
  int64_t ldq = 0;
  int64_t q_group = 0;  // q in COL32 (ldq is 32): elements from one group of 32 columns to the next; 0: rows
  DType q_type = DType::kInt8;
  void* out = nullptr;  // [rows, cols], row stride ldo
  int64_t ldo = 0;
  DType out_type = DType::kFloat16;
  EpilogueArgs epilogue;
};

// out = epilogue(q): the second pass behind cuBLASLt's int32, and, with x_scale alone, plain dequantisation.
void apply_epilogue(const DequantizeArgs& args, int device, Stream stream);

// Copies [rows, cols] int8 with row stride `ld` to [rows, padded] with zeros behind each row.
void pad_rows(const int8_t* source, int64_t rows, int64_t cols, int64_t ld, int8_t* padded_rows, int64_t padded,
              int device, Stream stream);

}  // namespace octofuse
