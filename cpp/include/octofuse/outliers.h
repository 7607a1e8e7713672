// LLM.int8(): columns with an outlier, |x| >= threshold in any row, are multiplied in floating point, or as integers of
// 22 bits, all others in int8.
//
// Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022. Which columns these are
// is known on the device alone, and nothing waits for the host.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

struct OutlierArgs {
  DType type = DType::kFloat16;  // of x: fp16 or bf16
  const void* x = nullptr;       // [m, k], row stride ldx
  int64_t m = 0, n = 0, k = 0, ldx = 0;
  float threshold = 6.0F;
  int8_t* q = nullptr;        // [m, k], contiguous
  float* scales = nullptr;    // [m]
  const int8_t* w = nullptr;  // [n, k], contiguous
};

// q and scales: each row quantised as by row_pass(), but its outliers do not count for its scale, and columns with an
// outlier in any row are zero in every row. Returns these columns, gathered in scratch memory.
OutlierColumns gather_outliers(const OutlierArgs& args, int device, Stream stream, const Allocator& allocate);

// The same for at most kMostDigitTokens rows, but that q is [kDigitRows * m, k], with three rows of digits behind each,
// and scales are one where there are outliers (OutlierColumns::factors).
OutlierColumns outlier_digits(const OutlierArgs& args, int device, Stream stream, const Allocator& allocate);
constexpr int kMostDigitTokens = 48;

// What the device's int8 kernels take of m rows as GemmArgs::outliers.
Outliers outliers_of_kernels(int64_t m, int device);

// For other kernels: out [m, n], contiguous, in x's type, x * (w_scale * w)^T over the columns that are gathered,
// summed in fp32, rounded once.
void outlier_product(const OutlierArgs& args, const OutlierColumns& columns, const ScaleView& w_scale, void* out,
                     int device, Stream stream);

}  // namespace octofuse
