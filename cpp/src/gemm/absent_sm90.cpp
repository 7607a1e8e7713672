// Linked instead of the sm_90a kernels where the build leaves them out; select() never sends a call here.
#include "gemm/cutlass/run.h"
#include "gemm/skinny/run.h"
#include "gemm/wgmma/launch.h"
#include "lowbit/kernels.h"
#include "octofuse/decode.h"
#include "octofuse/error.h"
#include "octofuse/outliers.h"
#include "parallel/clustered.h"
#include "rows/pass_chained.h"

namespace octofuse::sm90 {

void run(const GemmArgs&, int, cudaStream_t) { throw RuntimeError("cutlass_sm90: this build holds no sm_90a kernels"); }

}  // namespace octofuse::sm90

namespace octofuse::wgmma {

void run(const Candidate&, const GemmArgs&, int, cudaStream_t) {
  throw RuntimeError("wgmma: this build holds no sm_90a kernels");
}

}  // namespace octofuse::wgmma

namespace octofuse::skinny {

bool takes_shared(const GemmArgs&, int) { return false; }
void run_shared(const GemmArgs&, int, cudaStream_t) {
  throw RuntimeError("skinny: this build holds no sm_90a kernels");
}
bool takes_rows(const RowPassArgs&, const GemmArgs&, int) { return false; }
void run_rows(const RowPassArgs&, bool, const GemmArgs&, int, cudaStream_t) {
  throw RuntimeError("skinny_rows: this build holds no sm_90a kernels");
}

}  // namespace octofuse::skinny

namespace octofuse::peers {

bool run_clustered(const GatherRowsArgs&, int, cudaStream_t) { return false; }

}  // namespace octofuse::peers

namespace octofuse::rows {

bool run_few(const RowPassArgs&, cudaStream_t) { return false; }

}  // namespace octofuse::rows

namespace octofuse::lowbit {

void run_gemm(const LowbitArgs&, int, cudaStream_t, const Allocator&) {
  throw RuntimeError("lowbit_gemm: this build holds no sm_90a kernels");
}
void run_gemm_split(const LowbitArgs&, int, cudaStream_t, const Allocator&) {
  throw RuntimeError("lowbit_gemm_split: this build holds no sm_90a kernels");
}
void run_gemm_many(const LowbitArgs&, int, cudaStream_t, const Allocator&) {
  throw RuntimeError("lowbit_gemm_many: this build holds no sm_90a kernels");
}

}  // namespace octofuse::lowbit

namespace octofuse {

bool takes_logits(int64_t, int) { return false; }
void logits(const LogitsArgs&, int, Stream) { throw RuntimeError("logits: this build holds no sm_90a kernels"); }
OutlierColumns outlier_digits(const OutlierArgs&, int, Stream, const Allocator&) {
  throw RuntimeError("outliers_digits: this build holds no sm_90a kernels");
}

}  // namespace octofuse
