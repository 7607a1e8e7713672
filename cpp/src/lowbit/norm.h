// The norm in front of a low-bit linear, as the gemv kernels take it.
#pragma once

#include "device/align.h"
#include "octofuse/row_pass.h"

namespace octofuse::lowbit {

// Plain data of a kernel's arguments.
struct NormArgs {
  Norm kind = Norm::kNone;
  float eps = 0.0F;
  const void* weight = nullptr;  // [k], of the tokens' type, 16-byte aligned, or null
  const void* bias = nullptr;    // likewise

  NormArgs() = default;
  explicit NormArgs(const RowPassArgs& rows) : kind(rows.norm), eps(rows.eps), weight(rows.weight), bias(rows.bias) {}
};

// The most columns whose sums fit where a block keeps the sums of its K slices later.
constexpr int kMostNormColumns = 65536;

// Whether the gemv kernels can take this norm; row_pass() takes all.
inline bool fits_gemv(const RowPassArgs& rows) {
  const bool affine = rows.weight != nullptr || rows.bias != nullptr;
  return rows.activation == Activation::kNone && rows.residual == nullptr && rows.sum == nullptr &&
         rows.cols % 8 == 0 && rows.cols <= kMostNormColumns && is_aligned(rows.weight) && is_aligned(rows.bias) &&
         (!affine || rows.affine_type == rows.type);
}

}  // namespace octofuse::lowbit
