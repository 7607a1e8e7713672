// Matrices in the memory orders of int8 GEMMs (python/octofuse/layouts/maps.py says where each element lies).
#pragma once

#include <cstdint>
#include <string>

#include "octofuse/gemm.h"

namespace octofuse {

// Every order cuts the columns into groups `tile_cols` wide that lie one after the other, and a group into tiles of
// `tile_rows` rows; `inner` says how a tile is filled. A matrix is padded with zeros to whole tiles.
struct MatrixOrder {
  enum class Inner : int8_t { kRows, kTuring, kAmpere };
  std::string name;
  int64_t tile_rows = 1, tile_cols = 1;
  Inner inner = Inner::kRows;

  int64_t padded_rows(int64_t rows) const { return (rows + tile_rows - 1) / tile_rows * tile_rows; }
  int64_t padded_cols(int64_t cols) const { return (cols + tile_cols - 1) / tile_cols * tile_cols; }
  int64_t size(int64_t rows, int64_t cols) const { return padded_rows(rows) * padded_cols(cols); }
};

// "ROW" (for a matrix of `cols` columns), "COL", "COL32", "COL4_4R2_8C", "COL32_2R_4R4" or "interleaved<k>"; anything
// else is a ValueError that names `argument`.
MatrixOrder order_named(const std::string& name, const char* argument, int64_t cols);

struct ConvertArgs {
  int64_t rows = 0, cols = 0;
  int64_t element = 1;     // bytes: 1, 2 or 4
  void* matrix = nullptr;  // [rows, cols], `ld` elements from row to row
  int64_t ld = 0;
  void* laid_out = nullptr;  // order.size(rows, cols) elements, at a multiple of 16 bytes
  MatrixOrder order;
  bool to_layout = true;  // matrix -> laid_out, padding included; else the other way
};

void convert_layout(const ConvertArgs& args, int device, Stream stream);

// cuBLASLt's own transformation, int8 only: a second implementation. Throws ValueError where it does not serve.
void convert_layout_cublaslt(const ConvertArgs& args, int device, Stream stream);

// x w^T through CUTLASS's mma.sync kernels, x, w and, where out_group is given, the output in COL32.
void run_gemm_col32(const GemmArgs& args, int device, Stream stream);

// x w^T through cuBLASLt in the given orders, int32 output or int8 with the factor in epilogue.w_scale.
struct OrderedGemm {
  GemmArgs args;
  MatrixOrder x, w, out;
};

// How many algorithms cuBLASLt offers for it, or, as a negative number, the status with which it declines.
int cublaslt_algorithms(const OrderedGemm& gemm, int device);
void run_gemm_ordered(const OrderedGemm& gemm, int algorithm, int device, Stream stream, const Allocator& allocate);

}  // namespace octofuse
