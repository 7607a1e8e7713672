// LLM.int8(): columns with an outlier, |x| >= threshold in any row, are multiplied in floating point, all others in
// int8.
//
// Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022. Which columns these are
// is known on the device alone, and nothing waits for the host.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

struct OutlierArgs {
  DType type = DType::kFloat16;  // of x and out: fp16 or bf16
  const void* x = nullptr;       // [m, k], row stride ldx
  int64_t m = 0, n = 0, k = 0, ldx = 0;
  float threshold = 6.0F;
  int8_t* q = nullptr;        // [m, k], contiguous
  float* scales = nullptr;    // [m]
  uint32_t* mask = nullptr;   // [ceil(k / 32)], a bit for each column with an outlier: outlier_product()'s own
  const int8_t* w = nullptr;  // [n, k], contiguous
  ScaleView w_scale;
  void* out = nullptr;  // [m, n], contiguous
};

// q and scales: each row quantised as by row_pass(), but its outliers do not count for its scale, and columns with an
// outlier in any row are zero in every row. out = x * (w_scale * w)^T over these columns, summed in fp32, rounded once.
void outlier_product(const OutlierArgs& args, int device, Stream stream, const Allocator& allocate);

}  // namespace octofuse
