// Plain types shared by host code and kernels. No Python, no torch, no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octofuse {

enum class DType : int8_t { kInt8, kInt32, kFloat16, kBFloat16, kFloat32, kE4M3, kE5M2, kOther };

constexpr bool is_float8(DType type) { return type == DType::kE4M3 || type == DType::kE5M2; }

constexpr size_t size_of(DType type) {
  return type == DType::kInt8 || is_float8(type) ? 1 : type == DType::kFloat16 || type == DType::kBFloat16 ? 2 : 4;
}

constexpr const char* name_of(DType type) {
  return type == DType::kInt8       ? "int8"
         : type == DType::kInt32    ? "int32"
         : type == DType::kFloat16  ? "float16"
         : type == DType::kBFloat16 ? "bfloat16"
         : type == DType::kFloat32  ? "float32"
         : type == DType::kE4M3     ? "float8_e4m3fn"
         : type == DType::kE5M2     ? "float8_e5m2"
                                    : "other";
}

enum class Activation : int8_t {
  kNone,
#define OCTOFUSE_ACTIVATION(id, name) k##id,
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
};

// How many there are, "none" included.
constexpr int kActivations = 1
#define OCTOFUSE_ACTIVATION(id, name) +1
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
    ;

// |int8 * int8| <= 2^14, so K <= 2^17 - 1 products can never leave int32, whatever the values.
constexpr int64_t kMaxK = 131071;
// Kernels hold coordinates in 32 bits.
constexpr int64_t kMaxExtent = 2147483647;

// One fp32 factor per row or column: data[i * step], or `value` where there is no tensor.
struct ScaleView {
  const float* data = nullptr;
  int64_t step = 0;  // 0: one scalar for all
  float value = 1.0F;
};

// A factor of every block of 128 columns: that of row i (of w: of its block of 128 rows) at data[i * row + block *
// step].
struct BlockScales {
  const float* data = nullptr;  // null: there are none
  int64_t row = 0, step = 0;
};

// Columns, and rows of w, that share a factor.
constexpr int64_t kScaleBlock = 128;
constexpr int64_t scale_blocks(int64_t extent) { return (extent + kScaleBlock - 1) / kScaleBlock; }

// One int32 per row: data[i * step], or `value` where there is no tensor.
struct IntView {
  const int32_t* data = nullptr;
  int64_t step = 0;
  int32_t value = 0;
};

}  // namespace octofuse
