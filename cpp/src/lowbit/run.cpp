// From a chosen low-bit kernel to its launch: what the kernel cannot read is copied first, and a norm that it does not
// take becomes a kernel of its own.
#include <cuda_runtime_api.h>

#include "lowbit/kernels.h"
#include "lowbit/shape.h"
#include "octofuse/device.h"
#include "octofuse/epilogue_pass.h"
#include "octofuse/error.h"
#include "octofuse/lowbit.h"

namespace octofuse {
namespace {

// gemm.cu reads x by TMA, as fp16 or bf16 and with rows at multiples of 16 bytes. int8 values are exact in either type.
void make_readable(LowbitArgs& args, int device, Stream stream, const Allocator& allocate) {
  if (!args.x_is_int8 && args.ldx % 8 == 0 && is_aligned(args.x)) return;
  const int64_t padded = round_up(args.k, 8);
  void* copy = allocate(static_cast<size_t>(args.m * padded) * 2);
  pad_rows({args.x, args.x_is_int8 ? DType::kInt8 : args.type, args.m, args.k, args.ldx}, copy, args.type, padded,
           device, stream);
  args.x = copy;
  args.ldx = padded;
  args.x_is_int8 = false;
}

// Whether the chosen kernel normalises the tokens itself. Those for rows of scales that cannot be copied 16 bytes at a
// time do not.
bool takes_norm(const LowbitArgs& args, const RowPassArgs& rows, LowbitEngine engine) {
  if (!lowbit::fits_gemv(rows)) return false;
  if (engine == LowbitEngine::kGemvBinary) return true;
  if (engine != LowbitEngine::kGemvInt8) return false;
  const bool wide = args.n % 16 == 0 && is_aligned(args.scale) && is_aligned(args.zero);
  return lowbit::int8_gemv_shape(args.format, args.bits, lowbit::segments_of(args.group), wide).groups > 0;
}

// x becomes norm(x).
void normalise(RowPassArgs rows, LowbitArgs& args, int device, Stream stream, const Allocator& allocate) {
  rows.y = allocate(static_cast<size_t>(rows.rows * rows.cols) * size_of(rows.type));
  rows.constants = args.constant_weight;
  row_pass(rows, device, stream);
  args.x = rows.y;
  args.ldx = rows.cols;
}

}  // namespace

void lowbit_linear(const RowPassArgs& rows, const LowbitArgs& given, LowbitEngine engine, int device, Stream stream,
                   const Allocator& allocate) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  LowbitArgs args = given;
  lowbit::NormArgs norm;
  if (rows.norm != Norm::kNone) {
    if (takes_norm(args, rows, engine)) {
      norm = lowbit::NormArgs(rows);
    } else {
      normalise(rows, args, device, stream, allocate);
    }
  }
  switch (engine) {
    case LowbitEngine::kGemvBinary:
      return lowbit::run_gemv_binary(args, norm, device, cuda_stream);
    case LowbitEngine::kGemvInt8:
      return lowbit::run_gemv_int8(args, norm, device, cuda_stream);
    case LowbitEngine::kGemm:
      make_readable(args, device, stream, allocate);
      return lowbit::run_gemm(args, device, cuda_stream);
    case LowbitEngine::kCpu:
    case LowbitEngine::kDequantized:
      throw RuntimeError("lowbit_linear: a dequantised weight is multiplied elsewhere");
  }
}

}  // namespace octofuse
