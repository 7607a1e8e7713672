// Linked instead of the sm_90a kernels where the build leaves them out; select() never sends a call here.
#include "cutlass/gemm_cutlass.h"
#include "octofuse/error.h"
#include "wgmma/launch.h"

namespace octofuse::sm90 {

void run(const GemmArgs&, int, cudaStream_t) { throw RuntimeError("cutlass_sm90: this build holds no sm_90a kernels"); }

}  // namespace octofuse::sm90

namespace octofuse::wgmma {

void run(const Candidate&, const GemmArgs&, int, cudaStream_t) {
  throw RuntimeError("wgmma: this build holds no sm_90a kernels");
}

}  // namespace octofuse::wgmma
