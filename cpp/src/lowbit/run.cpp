// From a chosen low-bit kernel to its launch: what the kernel cannot read is copied first, and a norm that it does not
// take becomes a kernel of its own.
#include <cuda_runtime_api.h>

#include <atomic>
#include <random>

#include "lowbit/kernels.h"
#include "lowbit/several_shape.h"
#include "octofuse/device.h"
#include "octofuse/epilogue_pass.h"
#include "octofuse/error.h"
#include "octofuse/lowbit.h"

namespace octofuse {
namespace {

// x becomes a copy of `type`, which has all of its values, with rows at multiples of 16 bytes.
void copy_rows(LowbitArgs& args, DType type, int device, Stream stream, const Allocator& allocate) {
  const int64_t padded = round_up(args.k, 16);
  void* copy = allocate(static_cast<size_t>(args.m * padded) * size_of(type));
  pad_rows({args.x, args.x_is_int8 ? DType::kInt8 : args.type, args.m, args.k, args.ldx}, copy, type, padded, device,
           stream);
  args.x = copy;
  args.ldx = padded;
  args.x_is_int8 = type == DType::kInt8;
}

// What gemm, gemm_split and gemm_many read x as. int8 values are exact in any type.
DType gemm_type(const LowbitArgs& args) { return has_integers(args) ? DType::kInt8 : args.type; }

// They read it by TMA.
bool gemm_reads(const LowbitArgs& args) {
  const bool is_own = args.x_is_int8 == has_integers(args);
  return is_own && args.ldx * static_cast<int64_t>(size_of(gemm_type(args))) % 16 == 0 && is_aligned(args.x);
}

// The gemv kernels read pairs of columns.
bool gemv_reads(const LowbitArgs& args) {
  const bool even = args.k % 2 == 0 && (args.ldx % 2 == 0 || args.m == 1);
  return even && is_aligned(args.x, args.x_is_int8 ? 2 : 4);
}

// gemv_several.cu reads 8 columns at once.
bool several_reads(const LowbitArgs& args) {
  return args.k % 8 == 0 && args.ldx % 8 == 0 && is_aligned(args.x, args.x_is_int8 ? 8 : 16);
}

// Whether gemv_int8 means gemv_several.cu. That has neither norms nor gates of its own: up to 4 tokens with one of
// these stay with the kernel that has.
bool goes_to_several(const LowbitArgs& args, bool has_norm, LowbitEngine engine, int device) {
  if (engine != LowbitEngine::kGemvInt8 || args.m < lowbit::kLeastSeveral) return false;
  const Capability& capability = device_capability(device);
  const LowbitProblem problem = problem_of(args);
  const bool by_one_set =
      args.m <= lowbit::kTokensOfSet && lowbit::least_int8_gemv(problem) <= capability.shared_memory;
  if (by_one_set && (has_norm || args.gated)) return false;
  return lowbit::takes_several(problem, capability.shared_memory, capability.kernels_sm90a);
}

// Whether the chosen kernel normalises the tokens itself. Those for rows of scales that cannot be copied 16 bytes at a
// time do not.
bool takes_norm(const LowbitArgs& args, const RowPassArgs& rows, LowbitEngine engine, int device) {
  if (!lowbit::fits_gemv(rows)) return false;
  if (engine == LowbitEngine::kGemvBinary) return true;
  if (engine != LowbitEngine::kGemvInt8 || goes_to_several(args, true, engine, device)) return false;
  return lowbit::int8_gemv_shape(problem_of(args)).groups > 0;
}

// Whether it multiplies values by their activated gates itself.
bool takes_gate(const LowbitArgs& args, LowbitEngine engine, int device) {
  const int room = device_capability(device).shared_memory;
  if (engine == LowbitEngine::kGemvBinary) return lowbit::binary_gemv_takes_gate(problem_of(args), room);
  if (engine != LowbitEngine::kGemvInt8 || goes_to_several(args, false, engine, device)) return false;
  return lowbit::int8_gemv_takes_gate(problem_of(args), room);
}

// x becomes norm(x).
void normalise(RowPassArgs rows, LowbitArgs& args, int device, Stream stream, const Allocator& allocate) {
  rows.y = allocate(static_cast<size_t>(rows.rows * rows.cols) * size_of(rows.type));
  rows.constants = args.constant_weight;
  row_pass(rows, device, stream);
  args.x = rows.y;
  args.ldx = rows.cols;
}

void multiply(const RowPassArgs& rows, LowbitArgs args, LowbitEngine engine, int device, Stream stream,
              const Allocator& allocate) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  lowbit::NormArgs norm;
  if (rows.norm != Norm::kNone) {
    if (takes_norm(args, rows, engine, device)) {
      norm = lowbit::NormArgs(rows);
    } else {
      normalise(rows, args, device, stream, allocate);
    }
  }
  const DType own = args.x_is_int8 ? DType::kInt8 : args.type;
  switch (engine) {
    case LowbitEngine::kGemvBinary:
      if (!gemv_reads(args)) copy_rows(args, own, device, stream, allocate);
      return lowbit::run_gemv_binary(args, norm, device, cuda_stream);
    case LowbitEngine::kGemvInt8:
      if (goes_to_several(args, norm.kind != Norm::kNone, engine, device)) {
        if (!several_reads(args)) copy_rows(args, own, device, stream, allocate);
        return lowbit::run_gemv_several(args, device, cuda_stream);
      }
      if (!gemv_reads(args)) copy_rows(args, own, device, stream, allocate);
      return lowbit::run_gemv_int8(args, norm, device, cuda_stream);
    case LowbitEngine::kGemm:
      if (!gemm_reads(args)) copy_rows(args, gemm_type(args), device, stream, allocate);
      return lowbit::run_gemm(args, device, cuda_stream, allocate);
    case LowbitEngine::kGemmSplit:
      if (!gemm_reads(args)) copy_rows(args, gemm_type(args), device, stream, allocate);
      return lowbit::run_gemm_split(args, device, cuda_stream, allocate);
    case LowbitEngine::kGemmMany:
      if (!gemm_reads(args)) copy_rows(args, gemm_type(args), device, stream, allocate);
      return lowbit::run_gemm_many(args, device, cuda_stream, allocate);
    case LowbitEngine::kCpu:
    case LowbitEngine::kDequantized:
      throw RuntimeError("lowbit_linear: a dequantised weight is multiplied elsewhere");
  }
}

// out = act(first half of x) * second half, where x has the rows of the linear's output.
void gate(const LowbitArgs& args, const void* x, int device, Stream stream) {
  RowPassArgs rows;
  rows.rows = args.m;
  rows.cols = args.n / 2;
  rows.type = args.type;
  rows.x = x;
  rows.ldx = args.n;
  rows.activation = args.epilogue.activation;
  rows.gated = true;
  rows.constants = args.constant_weight && args.out_type != DType::kInt8;  // nothing is promised about out_scale
  if (args.out_type == DType::kInt8) {
    rows.q = static_cast<int8_t*>(args.out);
    rows.scale = args.epilogue.out_scale;
  } else {
    rows.y = args.out;
  }
  row_pass(rows, device, stream);
}

}  // namespace

uint64_t lowbit::next_mark() {
  static std::atomic<uint64_t> state{[] {
    std::random_device source;
    return uint64_t{source()} << 32 | source();
  }()};
  // splitmix64: every state gives another number.
  uint64_t mark = state += 0x9E3779B97F4A7C15;
  mark = (mark ^ mark >> 30) * 0xBF58476D1CE4E5B9;
  mark = (mark ^ mark >> 27) * 0x94D049BB133111EB;
  mark ^= mark >> 31;
  return mark != 0 ? mark : next_mark();
}

void lowbit_linear(const RowPassArgs& rows, const LowbitArgs& args, LowbitEngine engine, int device, Stream stream,
                   const Allocator& allocate) {
  const DeviceGuard guard(device);
  if (!args.gated || takes_gate(args, engine, device)) return multiply(rows, args, engine, device, stream, allocate);
  LowbitArgs linear = args;
  linear.gated = false;
  linear.epilogue.activation = Activation::kNone;
  linear.out_type = args.type;
  linear.out = allocate(static_cast<size_t>(int64_t{args.m} * args.n) * size_of(args.type));
  multiply(rows, linear, engine, device, stream, allocate);
  gate(args, linear.out, device, stream);
}

}  // namespace octofuse
