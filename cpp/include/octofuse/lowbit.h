// Linears whose weights have 1 to 8 bits and whose activations are fp16 or bf16, or int8 with a scale for each token:
//   out = round(act(x_scale * (x * w^T) + bias) + residual),
// or, gated, y = round(x_scale * (x * w^T) + bias), out = act(first half of y's row) * second half as row_pass() has
// it.
//
// Weights lie in tiles of 16 output channels, a row tile, by 128 columns, a k-block (python/octofuse/quant/packing.py
// has the one description), and
//   uniform:  w = scale * (code - zero), codes of 1 to 8 bits; zero: of each group, or one for all
//   planes:   w = sum of scale[i] * (+1 where bit i of the code is set, else -1), 1 to 8 of them
//   sparse12: of every two columns one, its value of 7 bits times scale
//   codebook: w = scale * levels[code], codes of 4 bits; levels and scale are of x's type.
//   float8:   w = scale * code, codes of 8 bits in e4m3, none of them NaN (0x7F, 0xFF); |scale| < 256.
//   two-level: w = scale * (group's scale * (code - group's zero)), codes of 4 bits; a row has one scale, and what it
//             multiplies is an integer of 8 bits
//
// Where x is int8 and a weight is its row's scale times integers of 8 bits (two-level, and uniform codes of 2 and more
// bits with a scale for each row and 2^(bits - 1) as their zero: has_integers()), sums are integers and exact: out has
// the bits of the int8 linear (octofuse/gemm.h) with these integers as its weight, by every engine, for any number of
// tokens.
//
// Up to 4 tokens, beside some uniform codes 8 (lowbit/gemv_int8.cu, lowbit/gemv_several.cu, lowbit/gemv_binary.cu): the
// 128 values of a token in a k-block share a power of two, by which they become integers of 16 bits. Products of these
// run on int8 or binary tensor cores and are exact; those of a codebook's levels, integers of 16 bits as well, but for
// 2^-16 of the largest. Beside float8 the values become fp16, and tensor cores add their products in fp32. Sums over
// groups are in fp32, in an order of K alone. More tokens (lowbit/gemm_kernel.cuh and gemm_stream.cuh, which
// give the same bits, lowbit/gemm_many_kernel.cuh): weights are rounded once, to x's type, and multiplied on its tensor
// cores, with sums in fp32, in an order of N and K in the one and of K alone in the other; a second one of K alone
// where blocks divide K. So by one engine a token's bits do not depend on the other tokens.
#pragma once

#include <array>
#include <cstdint>

#include "octofuse/gemm.h"
#include "octofuse/row_pass.h"
#include "octofuse/types.h"

namespace octofuse {

enum class LowbitFormat : int8_t { kUniform, kPlanes, kSparse12, kCodebook, kFloat8, kTwoLevel };

using Levels = std::array<float, 16>;

// What select_lowbit() may look at: kinds, shapes and alignments, never a value.
struct LowbitProblem {
  LowbitFormat format = LowbitFormat::kUniform;
  int bits = 4;  // of a code; planes: how many
  int64_t m = 0, n = 0, k = 0;
  int64_t group = 0;  // columns that share a scale, 0: all of a row
  bool has_zeros = false;
  bool is_integer = false;         // has_integers()
  bool aligned = true;             // scale and zero start at multiples of 16 bytes
  const char* unserved = nullptr;  // why no CUDA kernel at all can take it, if that is known already
  const char* why_not_cpu = "needs tensors on the CPU";  // nullptr: the CPU engine takes it
};

// cpu: host memory (octofuse/cpu.h). gemv_binary: one token, codes of up to 3 bits or up to 4 planes. gemv_int8: up to
// 4 tokens, beside some uniform codes 8. gemm: more, compute capability 9.0. gemm_split: from 65 on, likewise,
// beside few channels; its blocks divide K. gemm_many: more; where sums are integers, by its time. dequantized: the
// weight is written to memory in x's dtype for this call, and torch multiplies it; where sums are integers, in int8,
// and the int8 linear does.
enum class LowbitEngine : int8_t { kCpu, kGemvBinary, kGemvInt8, kGemm, kGemmSplit, kGemmMany, kDequantized };

const char* name_of(LowbitEngine engine);

// Pure. `engine`: "auto" or a name. Throws ValueError for an unknown name and for an engine that cannot serve, with the
// reason.
LowbitEngine select_lowbit(const LowbitProblem& problem, const Capability& capability, std::string_view engine);

struct LowbitDecision {
  LowbitEngine chosen = LowbitEngine::kDequantized;
  std::string why;
  std::vector<std::pair<std::string, std::string>> declined;  // engine, reason
};

// How an engine for many tokens cuts the outputs: its blocks' tile, the blocks that divide K, and whether blocks share
// tiles: gemm_many's clusters those that are left over behind whole rounds, gemm's blocks all. Other engines: no
// tokens.
struct LowbitTile {
  int tokens = 0, channels = 0, split = 1;
  bool shares = false;
};
LowbitTile tile_of(const LowbitProblem& problem, LowbitEngine engine);

// The same choice with a reason for every other engine.
LowbitDecision explain_lowbit(const LowbitProblem& problem, const Capability& capability, std::string_view engine);

struct LowbitArgs {
  LowbitFormat format = LowbitFormat::kUniform;
  int bits = 4;
  DType type = DType::kFloat16;  // of x (but see there), scale, bias and residual: fp16 or bf16
  int m = 0, n = 0, k = 0;
  int group = 0;
  const void* x = nullptr;  // [m, k], row stride ldx
  bool x_is_int8 = false;
  int64_t ldx = 0;
  const uint32_t* packed = nullptr;
  const void* scale = nullptr;            // [groups, n]; planes: [groups, planes, n]; two-level: [n]
  const uint8_t* zero = nullptr;          // [groups, n], uniform alone, or null
  const uint16_t* group_scale = nullptr;  // two-level: [groups, n], the group's scale and 256 times its zero
  int twice_zero = 0;  // uniform without `zero`: that of all, twice, since the middle of 2^b codes is x.5
  Levels levels{};     // codebook
  // Of it x_scale, out_scale, bias, activation and residual are read; bias and residual are of `type`.
  EpilogueArgs epilogue;
  bool gated = false;                // no residual then
  void* out = nullptr;               // [m, n], gated [m, n / 2], contiguous
  DType out_type = DType::kFloat16;  // `type` or int8
  bool constant_weight = false;      // nothing in flight writes packed, scale, zero, bias, or a norm's weight and bias
};

LowbitProblem problem_of(const LowbitArgs& args);

// Whether sums are integers (see above). Of other two-level weights kernels know nothing.
constexpr bool has_integers(const LowbitArgs& args) {
  const bool is_row = args.format == LowbitFormat::kUniform && args.bits > 1 && args.group == 0 && args.zero == nullptr;
  const bool is_middle = args.twice_zero == 1 << args.bits;
  return args.x_is_int8 && (args.format == LowbitFormat::kTwoLevel || (is_row && is_middle));
}

// Groups that the kernels can follow: 32, 64, 128 times a power of two, or 0.
constexpr bool takes_group(int64_t group) {
  return group == 0 || group == 32 || group == 64 || (group % 128 == 0 && (group & (group - 1)) == 0);
}

// out = linear(norm(x)); rows.norm may be none. `rows` describes x, which `args` then need not. The gemv kernels
// normalise in the kernel itself where the token fits; else row_pass() goes before. The bits are those of the two.
void lowbit_linear(const RowPassArgs& rows, const LowbitArgs& args, LowbitEngine engine, int device, Stream stream,
                   const Allocator& allocate);

// The weight, [n, k] in `type`, row stride k: each value rounded once.
void lowbit_dequantize(const LowbitArgs& args, void* w, int device, Stream stream);

}  // namespace octofuse
