#include "octofuse/row_linear.h"

#include <cuda_runtime_api.h>

#include "gemm/skinny/run.h"

namespace octofuse {

void run_row_linear(const RowPassArgs& given, bool per_token, const GemmArgs& args, const GemmProblem& problem,
                    int device, Stream stream, const Allocator& allocate) {
  if (args.m == 0) return;
  RowPassArgs rows = given;
  GemmArgs gemm = args;
  gemm.epilogue.x_scale = rows.scale;
  if (args.x_type == DType::kInt8 && skinny::takes_rows(rows, gemm, device)) {
    const DeviceGuard guard(device);
    return skinny::run_rows(rows, per_token, gemm, device, static_cast<cudaStream_t>(stream));
  }
  const Candidate& candidate = select(problem, device_capability(device), "auto");
  rows.q = static_cast<int8_t*>(allocate(static_cast<size_t>(args.m * args.k)));
  rows.q_type = args.x_type;
  if (per_token) {
    rows.block_scales = args.w_blocks.data != nullptr;
    const int64_t blocks = rows.block_scales ? scale_blocks(args.k) : 1;
    rows.scales = static_cast<float*>(allocate(static_cast<size_t>(args.m * blocks) * sizeof(float)));
    if (rows.block_scales) {
      gemm.x_blocks = {rows.scales, 1, args.m};
    } else {
      gemm.epilogue.x_scale = {rows.scales, 1, 1.0F};
    }
  }
  rows.constants = args.constant_weight;
  row_pass(rows, device, stream);
  gemm.x = rows.q;
  gemm.ldx = args.k;
  run_gemm(candidate, gemm, device, stream, allocate);
}

}  // namespace octofuse
