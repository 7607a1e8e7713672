// The epilogue as a pass of its own, and what else moves a matrix once.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

struct DequantizeArgs {
  int64_t rows = 0, cols = 0;
  const void* q = nullptr;  // [rows, cols] int8, int32, float8 or fp32, row stride ldq
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

// A matrix [rows, cols], row stride ld.
struct Rows {
  const void* data = nullptr;
  DType type = DType::kInt8;
  int64_t rows = 0, cols = 0, ld = 0;
};

// Copies int8, fp16 or bf16 to [rows, padded], contiguous, with zeros behind each row; `type`: the same, or fp16 or
// bf16 for int8.
void pad_rows(const Rows& source, void* out, DType type, int64_t padded, int device, Stream stream);

}  // namespace octofuse
