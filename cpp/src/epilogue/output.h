// Where the epilogue of a tile writes.
#pragma once

#include <cstdint>

#include "device/align.h"
#include "octofuse/gemm.h"

namespace octofuse {

struct TileOutput {
  void* out;
  int64_t ldo, group;  // GemmArgs' ldo and out_group
  DType type;
  bool wide;  // 8 channels of output and residual can be accessed at once, and N is a multiple of 8
  int m, n;   // of the whole output

#ifdef __CUDACC__
  __device__ int64_t offset(int row, int column) const {
    const int64_t at = static_cast<int64_t>(row) * ldo;
    return group == 0 ? at + column : at + column / 32 * group + column % 32;
  }
#endif
};

inline TileOutput output_of(const GemmArgs& args) {
  const EpilogueArgs& e = args.epilogue;
  const bool wide = args.n % 8 == 0 && is_vectorizable(args.out, args.ldo, args.out_type, 8) &&
                    is_vectorizable(e.residual, e.residual_ld, e.residual_type, 8);
  return {args.out, args.ldo, args.out_group, args.out_type, wide, static_cast<int>(args.m), static_cast<int>(args.n)};
}

}  // namespace octofuse
