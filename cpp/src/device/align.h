// Rounding and alignment, for host code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "octofuse/types.h"

namespace octofuse {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

inline bool is_aligned(const void* data, size_t bytes = 16) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Whether every `count` elements of a row, counted from its start, can be accessed at once, 16 bytes at a time or all
// of them if they are fewer. A pointer that is null is never accessed.
inline bool is_vectorizable(const void* data, int64_t ld, DType type, int64_t count) {
  const size_t bytes = std::min<size_t>(16, static_cast<size_t>(count) * size_of(type));
  return data == nullptr || (is_aligned(data, bytes) && static_cast<size_t>(ld) * size_of(type) % bytes == 0);
}

}  // namespace octofuse
