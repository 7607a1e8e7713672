// What every instruction set offers: one table of functions. None of them makes threads; each does a part of a call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "octofuse/epilogue_pass.h"
#include "octofuse/gemm.h"
#include "octofuse/lowbit.h"
#include "octofuse/row_pass.h"

namespace octofuse::cpu {

// Channels that one call of `gemm` takes at most, and tokens: what its accumulators have room for.
constexpr int kGemmChannels = 64;
constexpr int kGemmTokens = 96;
// Tokens that one call of `lowbit` takes at most.
constexpr int kLowbitTokens = 32;
// Rows and columns of a tile of low-bit weights (python/octofuse/quant/packing.py).
constexpr int kTileRows = 16;
constexpr int kBlockK = 128;

// x as the int8 product reads it: rows of `step`'s multiple, filled up with zeros.
struct PreparedX {
  const void* data = nullptr;
  int64_t ld = 0;                 // elements
  const int32_t* sums = nullptr;  // of each row; where the product takes w + 128 for w
};

constexpr int64_t row_pass_floats(int64_t cols) { return 2 * (cols + 256); }

struct Kernels {
  const char* name;
  // int8: elements of a prepared x, and what a row's length is a multiple of.
  size_t x_size;
  int64_t x_step;
  void (*prepare)(const int8_t* x, int64_t k, int64_t ld, void* prepared, int32_t* sum);
  // Tokens [m0, m1) by channels [n0, n1), with the whole epilogue.
  void (*gemm)(const GemmArgs& args, const PreparedX& x, int64_t m0, int64_t m1, int64_t n0, int64_t n1);
  // Rows [first, last); buffer: row_pass_floats(cols).
  void (*row_pass)(const RowPassArgs& args, int64_t first, int64_t last, float* buffer);
  void (*dequantize)(const DequantizeArgs& args, int64_t first, int64_t last);
  // A row of floats in the order of packed codes, [ld] with zeros behind.
  void (*permute)(const void* x, DType type, int64_t k, float* permuted, int64_t ld);
  // Tokens [m0, m1) by the 16 channels of one row tile; x: permuted, row stride ldx.
  void (*lowbit)(const LowbitArgs& args, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t tile);
  // The weights of a row tile, where they are integers (has_integers()): [16][ld], whole k-blocks.
  void (*integers)(const LowbitArgs& args, int64_t tile, int8_t* to, int64_t ld);
  // float8: a row, whose first element is x[first], as floats, [ld] with zeros behind.
  void (*widen)(const void* x, DType type, int64_t first, int64_t k, int64_t ld, float* to);
  // Tokens [m0, m1) by channels [n0, n1), with the whole epilogue; x: widened, row stride ldx.
  void (*float8)(const GemmArgs& args, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t n0, int64_t n1);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvxVnni, kAvx512Vnni;
#elif defined(__aarch64__)
extern const Kernels kNeonDotprod;
#endif

}  // namespace octofuse::cpu
