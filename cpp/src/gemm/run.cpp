// From a chosen kernel to its launch: pads what the kernel cannot read, then calls it.
#include <cuda_runtime_api.h>

#include "device/align.h"
#include "gemm/cublaslt/matmul.h"
#include "gemm/cutlass/run.h"
#include "gemm/naive/run.h"
#include "gemm/skinny/run.h"
#include "gemm/wgmma/launch.h"
#include "octofuse/epilogue_pass.h"
#include "octofuse/error.h"
#include "octofuse/gemm.h"
#include "octofuse/layout.h"

namespace octofuse {
namespace {

constexpr int64_t kAlignment = 16;  // bytes: TMA, cp.async and cuBLASLt's fast paths

// Zeros behind each row add nothing to a sum, so a padded copy gives the same bits. Float8 is copied as bytes.
void align_operand(const int8_t*& data, int64_t& ld, int64_t rows, int64_t k, int device, Stream stream,
                   const Allocator& allocate) {
  const bool aligned =
      is_aligned(data, kAlignment) && k % kAlignment == 0 && ((ld % kAlignment == 0 && ld >= k) || rows == 1);
  if (aligned) {
    if (rows == 1) ld = round_up(k, kAlignment);
    return;
  }
  const int64_t padded = round_up(k, kAlignment);
  auto* copy = static_cast<int8_t*>(allocate(static_cast<size_t>(rows * padded)));
  pad_rows({data, DType::kInt8, rows, k, ld}, copy, DType::kInt8, padded, device, stream);
  data = copy;
  ld = padded;
}

GemmArgs with_aligned_operands(GemmArgs args, int device, Stream stream, const Allocator& allocate) {
  align_operand(args.x, args.ldx, args.x_rows(), args.k, device, stream, allocate);
  const int8_t* const weight = args.w;
  align_operand(args.w, args.ldw, args.n, args.k, device, stream, allocate);
  args.constant_weight = args.constant_weight && args.w == weight;  // a copy is not there before its kernel has ended
  args.k = round_up(args.k, kAlignment);
  return args;
}

// From sums [M, N], row stride ld, to the output.
DequantizeArgs second_pass(const GemmArgs& args, const void* sums, int64_t ld, DType type) {
  DequantizeArgs second;
  second.rows = args.m;
  second.cols = args.n;
  second.q = sums;
  second.ldq = ld;
  second.q_type = type;
  second.out = args.out;
  second.ldo = args.ldo;
  second.out_type = args.out_type;
  second.epilogue = args.epilogue;
  return second;
}

void run_cublaslt(const GemmArgs& args, int device, Stream stream, const Allocator& allocate) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (is_raw(args)) return cublaslt::matmul(args, device, cuda_stream, allocate);
  GemmArgs raw = args;
  raw.out_type = is_float8(args.x_type) ? DType::kFloat32 : DType::kInt32;
  raw.ldo = args.n;
  raw.out = allocate(static_cast<size_t>(args.m * args.n) * sizeof(int32_t));
  cublaslt::matmul(raw, device, cuda_stream, allocate);
  apply_epilogue(second_pass(args, raw.out, raw.ldo, raw.out_type), device, stream);
}

// Activations of fp32 outputs, evaluated in double, would serialise wgmma: of float8, which has no other kernel, the
// sums go to the output and take a second pass there.
void run_wgmma(const Candidate& candidate, const GemmArgs& args, int device, cudaStream_t stream) {
  const Activation activation = args.epilogue.activation;
  const bool exact = activation == Activation::kNone || activation == Activation::kRelu;
  if (args.x_type == DType::kInt8 || args.out_type != DType::kFloat32 || exact) {
    return wgmma::run(candidate, args, device, stream);
  }
  GemmArgs sums = args;
  sums.epilogue = EpilogueArgs();
  wgmma::run(candidate, sums, device, stream);
  apply_epilogue(second_pass(args, args.out, args.ldo, DType::kFloat32), device, stream);
}

}  // namespace

void run_gemm(const Candidate& candidate, const GemmArgs& args, int device, Stream stream, const Allocator& allocate) {
  if (args.m == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (candidate.engine == Engine::kNaive) return run_naive(args, cuda_stream);
  const GemmArgs aligned = with_aligned_operands(args, device, stream, allocate);
  switch (candidate.engine) {
    case Engine::kSkinny:
      return skinny::run(candidate.tile, aligned, device, cuda_stream);
    case Engine::kWgmma:
      return run_wgmma(candidate, aligned, device, cuda_stream);
    case Engine::kCutlassSm90:
      return sm90::run(aligned, device, cuda_stream);
    case Engine::kCutlassSm80:
      return sm80::run(candidate.tile, aligned, device, cuda_stream);
    default:
      return run_cublaslt(aligned, device, stream, allocate);
  }
}

void run_gemm_col32(const GemmArgs& args, int device, Stream stream) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.out_group != 0 && args.n % 32 != 0) {  // the last group's padding
    const size_t group = static_cast<size_t>(args.out_group) * size_of(args.out_type);
    char* last = static_cast<char*>(args.out) + static_cast<size_t>(args.n / 32) * group;
    if (cudaMemsetAsync(last, 0, group, cuda_stream) != cudaSuccess) throw RuntimeError("col32: memset failed");
  }
  sm80::run_col32(args, device, cuda_stream);
}

std::vector<std::pair<int, double>> tune_cublaslt(const GemmArgs& args, int device, Stream stream,
                                                  const Allocator& allocate) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(cuda_stream, &capturing) == cudaSuccess && capturing != cudaStreamCaptureStatusNone) {
    throw RuntimeError("tune_cublaslt: the stream is being captured; tune before the capture");
  }
  return cublaslt::tune(with_aligned_operands(args, device, stream, allocate), device, cuda_stream, allocate);
}

bool prefer_cublaslt(int64_t m, int64_t n, int64_t k, DType out, int algorithm, int device) {
  const DeviceGuard guard(device);
  GemmArgs args;
  args.m = m;
  args.n = args.ldo = n;
  args.k = args.ldx = args.ldw = round_up(k, kAlignment);  // as with_aligned_operands leaves them
  args.out_type = out;
  return cublaslt::prefer(args, device, algorithm);
}

}  // namespace octofuse
