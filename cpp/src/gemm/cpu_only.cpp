// Stands in for everything that launches in a build without CUDA. The bindings refuse CUDA tensors first, so a call
// that arrives here asked about a device by number.
#include "octofuse/decode.h"
#include "octofuse/epilogue_pass.h"
#include "octofuse/error.h"
#include "octofuse/gemm.h"
#include "octofuse/layout.h"
#include "octofuse/lowbit.h"
#include "octofuse/outliers.h"
#include "octofuse/parallel.h"
#include "octofuse/row_linear.h"
#include "octofuse/row_pass.h"

namespace octofuse {
namespace {

[[noreturn]] void absent() {
  throw RuntimeError("this octofuse was built for the CPU only; reinstall it with OCTOFUSE_CUDA=ON");
}

}  // namespace

int toolkit_version() { return 0; }
const char* cutlass_version() { return ""; }
CublasLtStatus cublaslt_status() { return {false, "this octofuse was built for the CPU only", "", 0}; }
const Capability& device_capability(int) { absent(); }
bool allow_overlap(bool) { return false; }
int limit_shared_memory(int, int) { return 0; }
DeviceGuard::DeviceGuard(int) { absent(); }
DeviceGuard::~DeviceGuard() = default;
void set_tuned(int, TunedTable) { absent(); }
bool prefer_cublaslt(int64_t, int64_t, int64_t, DType, int, int) { absent(); }
void run_gemm(const Candidate&, const GemmArgs&, int, Stream, const Allocator&) { absent(); }
std::vector<std::pair<int, double>> tune_cublaslt(const GemmArgs&, int, Stream, const Allocator&) { absent(); }
void run_gemm_col32(const GemmArgs&, int, Stream) { absent(); }
void convert_layout(const ConvertArgs&, int, Stream) { absent(); }
void convert_layout_cublaslt(const ConvertArgs&, int, Stream) { absent(); }
int cublaslt_algorithms(const OrderedGemm&, int) { absent(); }
void run_gemm_ordered(const OrderedGemm&, int, int, Stream, const Allocator&) { absent(); }
AttendScratch attend_scratch(int64_t, int64_t, int64_t, int64_t, int64_t) { absent(); }
void append(const HeadsArgs&, const int64_t*, int, Stream) { absent(); }
void attend(const AttendArgs&, int, Stream) { absent(); }
bool takes_logits(int64_t, int) { return false; }
void logits(const LogitsArgs&, int, Stream) { absent(); }
void embed(const EmbedArgs&, int, Stream) { absent(); }
void argmax(const ArgmaxArgs&, int, Stream) { absent(); }
void lowbit_linear(const RowPassArgs&, const LowbitArgs&, LowbitEngine, int, Stream, const Allocator&) { absent(); }
void lowbit_dequantize(const LowbitArgs&, void*, int, Stream) { absent(); }
void run_row_linear(const RowPassArgs&, bool, const GemmArgs&, const GemmProblem&, int, Stream, const Allocator&) {
  absent();
}
void row_pass(const RowPassArgs&, int, Stream) { absent(); }
OutlierColumns gather_outliers(const OutlierArgs&, int, Stream, const Allocator&) { absent(); }
OutlierColumns outlier_digits(const OutlierArgs&, int, Stream, const Allocator&) { absent(); }
Outliers outliers_of_kernels(int64_t, int) { return Outliers::kNone; }
void outlier_product(const OutlierArgs&, const OutlierColumns&, const ScaleView&, void*, int, Stream) { absent(); }
void gather(const GatherArgs&, int, Stream) { absent(); }
bool gathers_bulk(const GatherArgs&) { return false; }
int64_t most_gathered_columns(bool, bool, int) { return 0; }
void gather_rows(const GatherRowsArgs&, int, Stream) { absent(); }
bool orders_row(const RowPassArgs&) { return false; }
void apply_epilogue(const DequantizeArgs&, int, Stream) { absent(); }
void pad_rows(const Rows&, void*, DType, int64_t, int, Stream) { absent(); }

}  // namespace octofuse
