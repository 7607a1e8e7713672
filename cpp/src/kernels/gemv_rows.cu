// The dp4a kernel for one token in floating point: every block normalises and quantises it for itself, into shared
// memory, while its weights are on their way. That takes less time than a kernel before it would.
#include "kernels/gemv.cuh"
#include "kernels/row_pass.cuh"

namespace octofuse::skinny {
namespace {

using rows::RowOp;

struct RowsArgs {
  KernelArgs gemm;
  RowPassArgs rows;
  bool per_token;
};

constexpr int kAllStreams = 8;  // named barrier of the streaming threads
constexpr int kNormColumns = 2048;
constexpr int kCopyColumns = 4096;

// The streaming threads share the token; its int8 values lie in shared memory.
template <class T>
class RowToken {
  static constexpr int kNormPacks = kNormColumns / rows::kPack / kStreamThreads;  // of a thread
  static constexpr int kCopyPacks = kCopyColumns / rows::kPack / kStreamThreads;

 public:
  __device__ explicit RowToken(const RowsArgs& args) : row_(args.rows), per_token_(args.per_token) {}

  // Takes what no earlier kernel writes: a norm's weight and bias, and a given scale.
  __device__ void prefetch(int thread) {
    if (row_.norm != Norm::kNone) {
      rows::stage_affine<kStreamThreads>(row_, reinterpret_cast<char*>(memory()) + kNormColumns, thread);
    }
    row_.q = memory();
    row_.scales = per_token_ ? token_scale() : nullptr;
    row_.affine_type = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    inverse_ = rows::given_inverse(row_);
  }

  __device__ void prepare(int thread) {
    __shared__ rows::Meeting<kStreamThreads, kNormColumns / 256> meeting;
    RowPassArgs row = row_;
    row.y = nullptr;  // what follows is known here, so that the code for it falls away
    row.sum = nullptr;
    row.residual = nullptr;
    row.q_group = 0;
    const auto given = [this] { return inverse_; };
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (row.norm != Norm::kNone) {
      rows::pass_row<T, RowOp::kNorm, kStreamThreads, kNormPacks>(row, given, 0, thread, meeting);
    } else {
      rows::pass_row<T, RowOp::kCopy, kStreamThreads, kCopyPacks>(row, given, 0, thread, meeting);
    }
    asm volatile("bar.sync %0, %1;" : : "n"(kAllStreams), "n"(kStreamThreads) : "memory");
  }

  __device__ const int8_t* data() const { return memory(); }
  __device__ int64_t ld() const { return 0; }
  __device__ float scale(int, float given) const { return per_token_ ? *token_scale() : given; }

 private:
  __device__ static int8_t* memory() {
    // The token; with a norm, which is shorter, its weight and bias behind it.
    __shared__ alignas(16) int8_t bytes[kNormColumns + 2 * kNormColumns * sizeof(T)];
    return bytes;
  }
  __device__ static float* token_scale() {
    __shared__ float scale;
    return &scale;
  }

  RowPassArgs row_;
  const bool per_token_;
  float inverse_ = 0.0F;  // 1 / the given scale
};

constexpr int kTile = 0;  // of kTiles
static_assert(kTiles[kTile].tokens == 1 && kTiles[kTile].channels == 8);

template <class T>
__global__ void __launch_bounds__(kThreads, 2) gemv_rows(const __grid_constant__ RowsArgs args) {
  RowToken<T> input(args);
  gemv_tile<1, 8>(args.gemm, input);
}

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace

bool takes_rows(const RowPassArgs& rows, const GemmArgs& args, int device) {
  const Capability& capability = device_capability(device);
  if (capability.compute_capability != 90 || !capability.kernels_sm90a) return false;
  if (rows.rows != 1 || rows.type == DType::kFloat32 || args.out_type == DType::kFloat32) return false;
  if (rows.cols % 16 != 0 || rows.cols > (rows.norm == Norm::kNone ? kCopyColumns : kNormColumns)) return false;
  const bool plain = rows.activation == Activation::kNone && rows.residual == nullptr && rows.sum == nullptr;
  if (!plain || !aligned(rows.x) || !aligned(args.w) || args.ldw % 16 != 0) return false;
  if (rows.weight != nullptr && (rows.affine_type != rows.type || !aligned(rows.weight))) return false;
  if (rows.bias != nullptr && (rows.affine_type != rows.type || !aligned(rows.bias))) return false;
  // One block an SM: each of them quantises, and two would wait for each other longer than a kernel for it takes.
  KernelArgs kernel = kernel_args(args, false);
  return gemv_blocks(kTile, capability.sm_count, kernel) <= static_cast<unsigned>(capability.sm_count);
}

void run_rows(const RowPassArgs& rows, bool per_token, const GemmArgs& args, int device, cudaStream_t stream) {
  const bool chained = is_chained(stream, device);
  RowsArgs kernel{kernel_args(args, chained), rows, per_token};
  const unsigned blocks = gemv_blocks(kTile, device_capability(device).sm_count, kernel.gemm);
  const void* function = rows.type == DType::kFloat16 ? reinterpret_cast<const void*>(gemv_rows<__half>)
                                                      : reinterpret_cast<const void*>(gemv_rows<__nv_bfloat16>);
  launch_kernel("skinny_rows", function, dim3(blocks), dim3(kThreads), 0, dim3(1), chained, &kernel, stream);
}

}  // namespace octofuse::skinny
