#pragma once

#include "cpu/kernels.h"

namespace octofuse::cpu {

// Those of the instruction set in use.
const Kernels& kernels();

}  // namespace octofuse::cpu
