// Symmetric quantisation: s = amax / 127, r = 1 / s (each rounded once to fp32), q = clamp(rne(float(x) * r), -127,
// 127).
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

struct QuantizeArgs {
  int64_t rows = 0, cols = 0;
  const void* x = nullptr;  // [rows, cols], fp16/bf16/fp32, row stride ldx
  int64_t ldx = 0;
  DType x_type = DType::kFloat16;
  int8_t* q = nullptr;      // [rows, cols], contiguous
  float* scales = nullptr;  // [rows]: written by quantize_per_token
  ScaleView scale;          // read by quantize_per_tensor
};

// q = quantised x with one given scale. NaN becomes 0; infinities saturate.
void quantize_per_tensor(const QuantizeArgs& args, int device, Stream stream);

// One scale per row, found on the way. A zero row gets scale 1; a row with NaN or Inf gets a non-finite scale and zeros
// where the product is NaN, so that its real values stay NaN and no other row changes.
void quantize_per_token(const QuantizeArgs& args, int device, Stream stream);

struct DequantizeArgs {
  int64_t rows = 0, cols = 0;
  const void* q = nullptr;  // [rows, cols] int8 or int32, row stride ldq
  int64_t ldq = 0;
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
