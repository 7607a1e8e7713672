// Linears whose weights have 1 to 8 bits and whose activations are fp16 or bf16, or int8 with a scale for each token:
//   out = round(act(x_scale * (x * w^T) + bias) + residual).
//
// Weights lie in tiles of 16 rows and 128 columns (python/octofuse/quant/packing.py has the one description), and
//   uniform:  w = scale * (code - zero), codes of 1 to 8 bits; zero: given, or the middle of the codes
//   planes:   w = sum of scale[i] * (+1 where bit i of the code is set, else -1), 1 to 8 of them
//   sparse12: of every two columns one, its value of 7 bits times scale.
//
// Up to 4 tokens (lowbit_gemv.cu, lowbit_gemv_bits.cu): a token's 128 columns share a power of two, by which they
// become integers of 16 bits; products of these run on int8 or binary tensor cores and are exact; sums over groups are
// in fp32, in an order of K alone. More (lowbit_gemm.cu): weights are rounded once, to x's type, and multiplied on its
// tensor cores, with sums in fp32 in an order of N and K. So a token's bits do not depend on the other tokens.
#pragma once

#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

namespace octofuse {

enum class LowbitFormat : int8_t { kUniform, kPlanes, kSparse12 };

struct LowbitArgs {
  LowbitFormat format = LowbitFormat::kUniform;
  int bits = 4;                  // of a code; planes: how many
  DType type = DType::kFloat16;  // of x (but see there), scale, bias, residual and out: fp16 or bf16
  int m = 0, n = 0, k = 0;
  int group = 0;  // columns that share a scale, 0: all of a row; takes_group()
  const void* x = nullptr;
  bool x_is_int8 = false;  // which no kernel takes for more than 4 tokens
  int64_t ldx = 0;
  ScaleView x_scale;
  const uint32_t* packed = nullptr;  // 16-byte aligned
  const void* scale = nullptr;       // [groups, n]; planes: [groups, planes, n]
  const uint8_t* zero = nullptr;     // [groups, n], uniform alone, or null
  const void* bias = nullptr;        // [n], or null
  Activation activation = Activation::kNone;
  const void* residual = nullptr;  // [m, n], row stride residual_ld, or null
  int64_t residual_ld = 0;
  void* out = nullptr;           // [m, n], row stride n
  bool constant_weight = false;  // nothing in flight writes packed, scale, zero or bias
};

// Groups that the kernels can follow: 32, 64, 128 times a power of two, or 0.
constexpr bool takes_group(int64_t group) {
  return group == 0 || group == 32 || group == 64 || (group % 128 == 0 && (group & (group - 1)) == 0);
}

// Whether there is a kernel for these tokens on this device; else lowbit_dequantize and a product of fp16 rows.
bool takes_lowbit(const LowbitArgs& args, int device);
void lowbit_linear(const LowbitArgs& args, int device, Stream stream);

// The weight, [n, k] in `type`, row stride k: each value rounded once.
void lowbit_dequantize(const LowbitArgs& args, void* w, int device, Stream stream);

}  // namespace octofuse
