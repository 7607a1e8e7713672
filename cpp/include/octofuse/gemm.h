// 8-bit GEMM with the fused epilogue: problem -> select -> run.
//
//   acc[m,n] = sum_k x[m,k] * w[n,k]                        int8: int32, exact; float8: fp32, see Arithmetic
//   t = float(acc) * w_scale[n] * x_scale[m] + bias[n]; t = act(t); t = t + residual[m,n]
//   with OutlierColumns the sum of their products is added to float(acc) * x_scale[m], which then is scaled by w_scale
//   out = round(t)  or, for int8,  clamp(rne(t * (1 / out_scale)), clamp_low, 127); for e4m3 rne, at most 448
//
// src/epilogue/EPILOGUES.md holds the formula's every rounding.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "octofuse/device.h"
#include "octofuse/types.h"

namespace octofuse {

enum class Engine : int8_t { kSkinny, kWgmma, kCutlassSm90, kCutlassSm80, kCublasLt, kNaive };

// What is multiplied, and how the products of a row are added up: along K in one order that nothing else changes, so
// that a row's bits depend on neither M nor the tile.
enum class Arithmetic : int8_t {
  kInt8,
  kFloat8,      // e4m3: 128 columns by the tensor cores, which keep about 14 bits, then added in fp32
  kFloat8Fast,  // e4m3: all columns by the tensor cores
  kE5M2,        // x in e5m2, w in e4m3; else as kFloat8
};

// Columns that are not quantised to int8 as the others are (OutlierColumns): none, gathered or as digits.
enum class Outliers : int8_t { kNone, kGathered, kDigits };

// What select() may look at: the shape and the kind of output, never a pointer or a value.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;  // m: rows of x
  DType out = DType::kFloat16;
  bool raw = false;                // is_raw() of the call
  int64_t ldo = 0;                 // leading dimension of the output in elements
  bool out_aligned = true;         // output pointer is 16-byte aligned
  bool double_activation = false;  // fp32 output through gelu, gelu_tanh or silu
  Arithmetic arithmetic = Arithmetic::kInt8;
  bool block_scales = false;
  Outliers outliers = Outliers::kNone;
};

// One kernel that could serve: an engine, one of its tiles and how its blocks share the work. None of it changes a bit
// of the output, but that cuBLASLt adds float8 products in an order of its own.
struct Candidate {
  Engine engine;
  std::string name;  // "wgmma/64x64_split2"
  int tile;          // index into the engine's own table
  int tile_m, tile_n;
  // wgmma alone:
  int split = 1;          // blocks that share the K of a tile
  int blocks_per_sm = 1;  // blocks that share an SM's memory
  int cluster = 1;        // persistent tiles: blocks that share the weights of neighbouring tiles
  Arithmetic arithmetic = Arithmetic::kInt8;
};

// Every candidate of this library, in a fixed order.
const std::vector<Candidate>& candidates();

// The fastest kernels of shapes that were measured on the user's device. It serves every M down to half of the measured
// one, where no smaller measured M is nearer.
struct TunedShape {
  int64_t m = 0, n = 0, k = 0;
  DType out = DType::kFloat16;
  const Candidate* best = nullptr;
};
struct TunedTable {
  std::vector<TunedShape> shapes;
  uint64_t id = 0;  // no two tables of a process have the same
};

// Replaces what select() knows of shapes measured on a device. Not while another thread is in a call.
void set_tuned(int device, TunedTable table);

struct Decision {
  const Candidate* chosen = nullptr;
  std::string why;                                            // one line
  std::vector<std::pair<std::string, std::string>> declined;  // candidate name, reason
};

// A pure function of the problem, the capability and the wish. `engine` is "auto", an engine's name ("cutlass",
// "cutlass_sm90", "cutlass_sm80", "wgmma", "skinny", "cublaslt", "naive") or a candidate's whole name. Throws
// ValueError for an unknown name and for a wish that cannot be served (with the reason). It runs in every call and
// allocates nothing.
const Candidate& select(const GemmProblem& problem, const Capability& capability, std::string_view engine);

// Estimated microseconds of every candidate that can serve.
std::vector<std::pair<const Candidate*, double>> estimates(const GemmProblem& problem, const Capability& capability);

// Microseconds of a kernel are the sum of all but the last of these, fitted by benchmarks/fit_select.py, times the
// problem's features, and not less than the last times its feature.
using TimeModel = std::array<double, 6>;
TimeModel features_of(const Candidate& candidate, const GemmProblem& problem, int sm_count);

// The kernel that runs in a captured graph, where weights are promised to be constant, instead of `chosen`: for one
// token there are kernels that are worth it in a chain alone. Pure; alignments are taken for granted.
std::string captured_kernel(const GemmProblem& problem, const Capability& capability, const Candidate& chosen);

// The same choice with a reason for every other candidate that the wish names.
Decision explain(const GemmProblem& problem, const Capability& capability, std::string_view engine);

// Everything a kernel reads beside x and w. Plain data: it is passed to kernels by value.
struct EpilogueArgs {
  ScaleView x_scale;               // fp32, one or [M]
  ScaleView w_scale;               // fp32, one or [N]
  ScaleView out_scale;             // fp32, one; int8 and e4m3 output only
  IntView x_zero;                  // int32, one or [M]: read where w_sum is given
  const int32_t* w_sum = nullptr;  // [N]: sum_k w[n, k]; given, x is asymmetric and stands for x - x_zero
  const void* bias = nullptr;      // [N], bias_type, stride 1
  const void* residual = nullptr;  // [M, N], residual_type, row stride residual_ld
  int64_t residual_ld = 0;
  DType bias_type = DType::kFloat32;
  DType residual_type = DType::kFloat32;
  Activation activation = Activation::kNone;
  int clamp_low = -127;  // -128 for the raw requantisation of i8i8_matmul
};

// LLM.int8(): columns whose products are added to those of the int8 x, in which they are zero. Which they are is known
// on the device alone. They are gathered and multiplied in floating point; or, for few tokens, they are integers below
// 2^22 (an infinity: 2^23), whose three signed digits of 8 bits are further rows of x.
struct OutlierColumns {
  DType type = DType::kFloat16;  // of x and of what is gathered: fp16 or bf16
  const void* x = nullptr;       // [m, k], row stride ldx
  int64_t ldx = 0;
  const int8_t* w = nullptr;  // [n, k], row stride ldw
  int64_t ldw = 0;
  // Gathered: how many columns, and which, ascending; the first kMostGathered of x's side by side, [m, kMostGathered],
  // zeros behind the last up to a multiple of kOutlierBlock. Of more columns the others are read where they lie.
  const int* count = nullptr;
  const int* columns = nullptr;
  const void* x_gathered = nullptr;
  // Digits: the int8 x has kDigitRows rows a token, its values and its outliers' three digits, the highest first.
  // Factors of the sums of both, [m, 2]: 1 and 0 without outliers. Behind one token's, a bit for each column.
  const float* factors = nullptr;

  Outliers kind() const {
    return factors != nullptr ? Outliers::kDigits : count != nullptr ? Outliers::kGathered : Outliers::kNone;
  }
};
constexpr int kDigitRows = 4;
constexpr int kMostGathered = 128;
constexpr int kOutlierBlock = 64;  // 128 bytes

struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  const int8_t* x = nullptr;  // [x_rows(), K], row stride ldx; the bytes of float8, too
  int64_t ldx = 0;
  const int8_t* w = nullptr;  // [N, K], row stride ldw
  int64_t ldw = 0;
  void* out = nullptr;  // [M, N], row stride ldo
  int64_t ldo = 0;
  int64_t out_group = 0;  // COL32 output (ldo is 32): elements from one group of 32 columns to the next; 0: rows
  DType out_type = DType::kFloat16;
  DType x_type = DType::kInt8, w_type = DType::kInt8;
  bool fast_accumulate = false;    // of e4m3
  BlockScales x_blocks, w_blocks;  // of float8, both or none; with them the epilogue's scales are 1
  OutlierColumns outliers;         // of int8 with an output of their type, neither asymmetric nor requantised
  EpilogueArgs epilogue;
  // Nothing in flight on the stream writes w, w_scale, bias or w_sum: in a captured chain they may be read before the
  // kernel's predecessor has finished.
  bool constant_weight = false;

  int64_t x_rows() const { return outliers.kind() == Outliers::kDigits ? kDigitRows * m : m; }
};

inline Arithmetic arithmetic_of(const GemmArgs& args) {
  if (args.x_type == DType::kInt8) return Arithmetic::kInt8;
  if (args.x_type == DType::kE5M2) return Arithmetic::kE5M2;
  return args.fast_accumulate ? Arithmetic::kFloat8Fast : Arithmetic::kFloat8;
}

// What cuBLASLt can write itself: int32 accumulators, or int8 by one host factor in w_scale, which clamps at -128.
inline bool is_raw(const GemmArgs& args) {
  return args.out_type == DType::kInt32 || (args.out_type == DType::kInt8 && args.epilogue.clamp_low == -128);
}

// Scratch memory on the current stream; freed by the caller after the launch.
using Allocator = std::function<void*(size_t bytes)>;
// cudaStream_t, kept opaque so that this header needs no CUDA.
using Stream = void*;

// Launches on `stream`; returns before the device is done. Throws RuntimeError if a launch fails.
void run_gemm(const Candidate& candidate, const GemmArgs& args, int device, Stream stream, const Allocator& allocate);

// Measures every algorithm that cuBLASLt's heuristic offers for this raw problem and keeps the fastest for later calls.
// Synchronises the stream. Returns (algorithm index, median microseconds) pairs in the heuristic's order.
std::vector<std::pair<int, double>> tune_cublaslt(const GemmArgs& args, int device, Stream stream,
                                                  const Allocator& allocate);

// Uses an algorithm that tune_cublaslt found before, for contiguous operands. Launches nothing; false if the heuristic
// has no such algorithm now.
bool prefer_cublaslt(int64_t m, int64_t n, int64_t k, DType out, int algorithm, int device);

}  // namespace octofuse
