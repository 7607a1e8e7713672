// One pass over rows: add a residual, normalise or activate, quantise. Symmetric quantisation: s = amax / 127, r = 1 /
// s (each rounded once to fp32), q = clamp(rne(float(t) * r), -127, 127); to float8 s = amax / 448 in e4m3 and amax /
// 57344 in e5m2, and q = float8(t * r), rounded to even, at most the largest number.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

enum class Norm : int8_t { kNone, kLayer, kRms };

// h = x + residual; t = norm(h), or act(x), or act(first half of x's row) * second half; every one of them is rounded
// to `type`, as if it were stored. Then t is quantised, or written as it is.
struct RowPassArgs {
  int64_t rows = 0, cols = 0;  // of the output
  DType type = DType::kFloat16;
  const void* x = nullptr;  // [rows, cols], gated [rows, 2 * cols]; row stride ldx
  int64_t ldx = 0;
  const void* residual = nullptr;  // [rows, cols], with a norm only; row stride residual_ld
  int64_t residual_ld = 0;
  void* sum = nullptr;  // [rows, cols], contiguous: where h goes
  Norm norm = Norm::kNone;
  const void* weight = nullptr;  // [cols], of affine_type: fp32 or `type`
  const void* bias = nullptr;    // likewise
  DType affine_type = DType::kFloat32;
  float eps = 0.0F;
  Activation activation = Activation::kNone;
  bool gated = false;
  // y's column j is the result's column order[j]; null: as they are. Only with y, and without `sum`. Values outside
  // [0, cols) read the last column.
  const int32_t* order = nullptr;
  // The output, contiguous: y in `type`, or q, which starts at a multiple of 8 bytes if it is COL32. With `scales`
  // every row gets its own scale, else all have `scale`.
  void* y = nullptr;
  int8_t* q = nullptr;
  DType q_type = DType::kInt8;  // or kE4M3, kE5M2: the bytes of q
  int64_t q_group = 0;  // int8 q in COL32, padding included: elements from one group of 32 columns to the next; 0: rows
  float* scales = nullptr;
  bool block_scales = false;  // of q in e4m3: every 128 columns their own, scales[block * rows + row]
  bool bare_scales = false;  // a row of zeros gets scale 0: it is part of a row whose scale is the largest of its parts
  ScaleView scale;           // of all rows, or of each; 0 counts as 1
  // Nothing in flight on the stream writes weight, bias, order or scale: in a captured chain they may be read before
  // the kernel's predecessor has finished.
  bool constants = false;
};

// A zero row gets scale 1. A row with NaN or Inf gets a non-finite scale and zeros where the product is NaN, so that
// its real values stay NaN and no other row changes; with one given scale NaN becomes 0 and infinities saturate. In
// float8 NaN stays NaN.
void row_pass(const RowPassArgs& args, int device, Stream stream);

// Whether row_pass() takes a norm or an activation together with `order`: a row has to fit a block's shared memory.
bool orders_row(const RowPassArgs& args);

}  // namespace octofuse
