// The levels of a codebook as kernels look them up.
#pragma once

#include <cstdint>

#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

// A level is unit * (256 * high + low), two signed bytes for products of int8; of units for which there are `parts`,
// the one with which the largest relative error of a level is the smallest.
struct IntegerLevels {
  uint16_t bytes[16];  // high, low
  // The same for prmt, which looks up in eight bytes: a high byte is the sum of two, of parts[0] with codes below 8 and
  // of parts[1] with the others, and a low one of two of parts[2] and parts[3]. For a code of the other half, whose
  // fourth bit tells, prmt gives the sign of a byte, 0 or -1, which the other part allows for.
  uint32_t parts[4][2];
  float unit;
};

// Kept for this thread's next calls: the search takes longer than a kernel.
const IntegerLevels& integers_of(const Levels& levels);

// The bits of a level in fp16 or bf16.
uint16_t level_bits(float level, DType type);

}  // namespace octofuse::lowbit
