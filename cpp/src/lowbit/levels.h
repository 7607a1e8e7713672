// The levels of a codebook as kernels look them up.
#pragma once

#include <cstdint>

#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

// A level is unit * (256 * high + low), two signed bytes for products of int8; the unit is the one with which the
// largest relative error of a level is the smallest.
struct IntegerLevels {
  uint16_t bytes[16];  // high, low
  float unit;
};

// Kept for this thread's next calls: the search takes longer than a kernel.
const IntegerLevels& integers_of(const Levels& levels);

// The bits of a level in fp16 or bf16.
uint16_t level_bits(float level, DType type);

}  // namespace octofuse::lowbit
