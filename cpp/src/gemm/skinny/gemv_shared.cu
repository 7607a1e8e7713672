// The dp4a kernel for one token in a captured chain, and for one in floating point, which every block normalises and
// quantises for itself: that takes less time than a kernel before it would.
//
// A block an SM. It copies its slice of the weights to shared memory before earlier kernels have to be finished: no
// register waits for it, so the slices of several kernels of the chain are on their way at once. What the chain waits
// for is then the one token's way through the kernel. Steps of the GPT-2 XL, H200, batch 1, single runs, small changes
// included: norms in kernels of their own and weights in registers 1057 us; this with bulk copies by TMA 855, by
// cp.async 831; a rehearsal of everything while earlier kernels run 896; products by mma.sync 1016 where dp4a with sums
// over lanes took 944; successors let in after the own wait 975 instead of 865.
#include <algorithm>

#include "gemm/skinny/gemv.cuh"
#include "gemm/skinny/run.h"
#include "rows/token.cuh"

namespace octofuse::skinny {
namespace {

constexpr int kMostShared = 160 << 10;  // bytes: slice and token
constexpr int kEach = 2;                // channels of a lane at a time

struct SharedArgs : TokenArgs {  // gemm.warp_channels: channels of a block
  int pitch = 0;                 // bytes from channel to channel of the slice
  int log_lanes = 0;             // lanes of a warp that have channels of their own
};

// Channels so far apart that what 8 lanes read at once lies in different banks: `lanes` channels, and 8 / lanes pieces
// of each.
int pitch_of(int64_t k, int log_lanes) {
  const int64_t apart = 8 >> std::min(log_lanes, 3);
  return static_cast<int>((k / 16 + ((apart - k / 16) % 8 + 8) % 8) * 16);
}

// Lanes of a warp that have channels of their own, as a power of two.
int lanes_of(int channels) {
  int log = 0;
  while (kEach << log < channels && log < 5) ++log;
  return log;
}

// A token in floating point.
template <class T>
class OwnToken : public rows::Token<T, kStreamThreads> {
 public:
  __device__ OwnToken(const SharedArgs& args, int8_t* memory)
      : rows::Token<T, kStreamThreads>(args.rows, args.per_token, memory) {}
  static int bytes(const SharedArgs& args) { return static_cast<int>(args.rows.cols); }
};

// A token that is int8 already.
class GivenToken {
 public:
  __device__ GivenToken(const SharedArgs& args, int8_t* memory) : x_(args.gemm.x), k_(args.gemm.k), values_(memory) {}
  static int bytes(const SharedArgs& args) { return args.gemm.k; }

  __device__ void prefetch(int) {}
  __device__ void prepare(int thread) {
#pragma unroll 2
    for (int at = thread * 16; at < k_; at += kStreamThreads * 16) {
      *reinterpret_cast<uint4*>(values_ + at) = *reinterpret_cast<const uint4*>(x_ + at);
    }
  }
  __device__ const int8_t* data() const { return values_; }
  __device__ float scale(float given) const { return given; }

 private:
  const int8_t* const x_;
  const int k_;
  int8_t* const values_;
};

// The block's channels on their way to `slice`.
__device__ void copy_slice(const SharedArgs& args, int n0, int channels, int thread, int8_t* slice) {
  const KernelArgs& gemm = args.gemm;
  const int8_t* const from = gemm.w + n0 * gemm.ldw;
#pragma unroll 1
  for (int n = thread / 32; n < channels; n += kStreamWarps) {
    for (int k = thread % 32 * 16; k < gemm.k; k += 512) {
      copy_async(shared_address(slice + n * args.pitch + k), from + n * gemm.ldw + k);
    }
  }
}

// The sums over this warp's part of K to `sums` ([warp][channel]). A lane takes whole channels, kEach at a time: what
// limits it is reading shared memory, and so a piece of the token serves for all of them. Where channels are too few
// for 32 lanes, the others share K too.
__device__ void multiply(const SharedArgs& args, const int8_t* token, const int8_t* slice, int channels, int thread,
                         int32_t* sums) {
  const int lane = thread % 32;
  const int lanes = 1 << args.log_lanes;
  const int step = (kStreamThreads * 16) >> args.log_lanes;
#pragma unroll 1
  for (int base = 0; base < channels; base += kEach * lanes) {
    int32_t acc[kEach][2] = {};
    const int n = base + (lane & (lanes - 1));
    const int8_t* w[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) w[i] = slice + min(n + i * lanes, channels - 1) * args.pitch;
#pragma unroll 4
    for (int k = (thread >> args.log_lanes) * 16; k < args.gemm.k; k += step) {
      const uint4 x = *reinterpret_cast<const uint4*>(token + k);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(w[i] + k);
        acc[i][0] = __dp4a(static_cast<int>(v.x), static_cast<int>(x.x), acc[i][0]);
        acc[i][1] = __dp4a(static_cast<int>(v.y), static_cast<int>(x.y), acc[i][1]);
        acc[i][0] = __dp4a(static_cast<int>(v.z), static_cast<int>(x.z), acc[i][0]);
        acc[i][1] = __dp4a(static_cast<int>(v.w), static_cast<int>(x.w), acc[i][1]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) acc[i][0] += acc[i][1];
#pragma unroll 1
    for (int other = lanes; other < 32; other *= 2) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) acc[i][0] += __shfl_xor_sync(kFullWarp, acc[i][0], other);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (lane < lanes && n + i * lanes < channels) sums[thread / 32 * kMostChannels + n + i * lanes] = acc[i][0];
    }
  }
}

template <class Token>
__global__ void __launch_bounds__(kThreads, 3) gemv_shared(const __grid_constant__ SharedArgs args) {
  extern __shared__ __align__(128) int4 memory[];
  __shared__ TileVectors<1, kMostChannels> vectors;
  __shared__ int32_t sums[kStreamWarps * kMostChannels];
  __shared__ float residuals[kMostChannels];
  const KernelArgs& gemm = args.gemm;
  const int thread = static_cast<int>(threadIdx.x);
  const bool loads_vectors = thread >= kStreamThreads;
  const int n0 = static_cast<int>(blockIdx.x) * gemm.warp_channels;
  const int channels = min(gemm.warp_channels, gemm.output.n - n0);
  auto* const slice = reinterpret_cast<int8_t*>(memory);
  Token token(args, slice + gemm.warp_channels * args.pitch);
  launch_dependents();  // they wait for this one's end, and have time to load until then
  if (loads_vectors) {
    load_vector_warp(gemm, n0, gemm.warp_channels, thread % 32, residuals, vectors);
  } else {
    if (!gemm.constant_weight) wait_for_predecessors();
    token.prefetch(thread);
    copy_slice(args, n0, channels, thread, slice);
    wait_for_predecessors();
    token.prepare(thread);
    wait_for_all_copies();
    sync_streams();
    multiply(args, token.data(), slice, channels, thread, sums);
  }
  __syncwarp();  // lanes have left their loops one by one
  __syncthreads();
  if (thread >= channels) return;
  int32_t total = 0;
#pragma unroll
  for (int i = 0; i < kStreamWarps; ++i) total += sums[i * kMostChannels + thread];
  const Operands<1> operands{
      {vectors.w_scale[thread]},     {token.scale(vectors.x_scale[0])},
      {vectors.bias[thread]},        {gemm.epilogue.residual == nullptr ? -0.0F : residuals[thread]},
      {vectors.minus_w_sum[thread]}, {vectors.x_zero[0]}};
  finish_one(gemm.epilogue, gemm.output, gemm.output.offset(0, n0 + thread), total, operands, vectors.out_inverse,
             true);
}

template <class Token>
void launch(SharedArgs args, int device, bool chained, cudaStream_t stream) {
  static DeviceFlags raised;
  const auto* function = reinterpret_cast<const void*>(gemv_shared<Token>);
  KernelArgs& gemm = args.gemm;
  gemm.warp_channels = channels_of_block(gemm.output.n, device_capability(device).sm_count);
  gemm.log_channels = 0;
  while (1 << gemm.log_channels < gemm.warp_channels) ++gemm.log_channels;
  args.log_lanes = lanes_of(gemm.warp_channels);
  args.pitch = pitch_of(gemm.k, args.log_lanes);
  const auto blocks = static_cast<unsigned>((gemm.output.n + gemm.warp_channels - 1) / gemm.warp_channels);
  allow_shared_memory(function, kMostShared, device, raised);
  launch_kernel("skinny", function, dim3(blocks), dim3(kThreads), gemm.warp_channels * args.pitch + Token::bytes(args),
                dim3(1), chained, &args, stream, {gemm.w, gemm.output.n * gemm.ldw});
}

// Whether a block's slice and its token fit, and can be copied 16 bytes at a time.
bool fits(const GemmArgs& args, int device) {
  const Capability& capability = device_capability(device);
  return args.m == 1 && has_chained_kernels(capability) && fits_shared(args.n, args.k, capability.sm_count) &&
         is_aligned(args.w) && args.ldw % 16 == 0;
}

bool takes_registers(const GemmArgs& args, int device) {
  return fits_registers(args.n, args.k, device_capability(device).sm_count);
}

}  // namespace

bool takes_shared(const GemmArgs& args, int device) { return args.constant_weight && fits(args, device); }

bool takes_rows(const RowPassArgs& rows, const GemmArgs& args, int device) {
  if (rows.type == DType::kFloat32 || args.out_type == DType::kFloat32 || !fits(args, device)) return false;
  if (rows.cols % 16 != 0 || rows.cols > (rows.norm == Norm::kNone ? rows::Token<__half, kStreamThreads>::kCopyColumns
                                                                   : rows::Token<__half, kStreamThreads>::kNormColumns))
    return false;
  const bool plain = rows.activation == Activation::kNone && rows.residual == nullptr && rows.sum == nullptr;
  if (!plain || !is_aligned(rows.x)) return false;
  if (rows.weight != nullptr && (rows.affine_type != rows.type || !is_aligned(rows.weight))) return false;
  return rows.bias == nullptr || (rows.affine_type == rows.type && is_aligned(rows.bias));
}

void run_shared(const GemmArgs& args, int device, cudaStream_t stream) {
  SharedArgs token{};
  token.gemm = kernel_args(args, true);
  if (takes_registers(args, device)) return run_registers(token, device, true, stream);
  launch<GivenToken>(token, device, true, stream);
}

void run_rows(const RowPassArgs& rows, bool per_token, const GemmArgs& args, int device, cudaStream_t stream) {
  const bool chained = is_chained(stream, device);
  SharedArgs token{};
  token.gemm = kernel_args(args, chained);
  token.type = rows.type;
  token.rows = rows;
  token.per_token = per_token;
  if (takes_registers(args, device)) return run_registers(token, device, chained, stream);
  if (rows.type == DType::kFloat16) return launch<OwnToken<__half>>(token, device, chained, stream);
  launch<OwnToken<__nv_bfloat16>>(token, device, chained, stream);
}

}  // namespace octofuse::skinny
