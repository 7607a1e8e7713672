// mma.sync int8, for sm_80 and every later chip: CUTLASS 2's main loop with this library's epilogue behind it. One
// kernel serves every output type, order and alignment; kTiled: both operands are COL32 instead of rows.
#pragma once

#include <cutlass/cutlass.h>

#include <cutlass/gemm/threadblock/default_mma.h>

#include "device/launch.h"
#include "epilogue/tile.cuh"
#include "gemm/cutlass/run.h"

namespace octofuse::sm80 {

// After the main loop the accumulators take the ring's memory, [kPassTokens][kPitch] of them at a time whatever the
// tile, so that all kernels of this file share one epilogue.
constexpr int kPassTokens = 128, kChannels = 128, kPitch = kChannels + 8;
using Vectors = TileVectors<kPassTokens, kChannels>;

// TileShare (epilogue/tile.cuh) for any number of threads: every step-th token from m on.
struct Share {
  static constexpr int kPiece = 8;
  static constexpr bool stores = true;
  int m, m_end, n, m0, n0, step;
};

struct Eight {
  float t[Share::kPiece];
};

// Out of line, like finish_pass: one copy of four activations, instead of one for every output and alignment.
template <class Out, bool kDoubleActivation>
__device__ __noinline__ Eight activated(Eight values, Activation activation) {
  activate_by<Out, kDoubleActivation>(activation, values.t);
  return values;
}

template <class Out>
__device__ void finish_as(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors, const Share& share,
                          const int32_t* accs) {
  // All but int8 and fp32 outputs have their activations alike.
  using Kind = std::conditional_t<std::is_same_v<Out, int8_t> || std::is_same_v<Out, float>, Out, __half>;
  const auto activate = [&](float (&t)[Share::kPiece]) {
    if (e.activation == Activation::kNone) return;
    Eight values;
#pragma unroll
    for (int i = 0; i < Share::kPiece; ++i) values.t[i] = t[i];
    values = activated<Kind, std::is_same_v<Out, float>>(values, e.activation);
#pragma unroll
    for (int i = 0; i < Share::kPiece; ++i) t[i] = values.t[i];
  };
  if (output.wide) return finish_wide<Out, kPitch>(e, output, vectors, share, accs, activate);
  finish_narrow<Out, kPitch>(e, output, vectors, share, accs, activate);
}

__device__ __noinline__ void finish_pass(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                                         const Share& share, const int32_t* accs) {
  switch (output.type) {
    case DType::kFloat16:
      return finish_as<__half>(e, output, vectors, share, accs);
    case DType::kBFloat16:
      return finish_as<__nv_bfloat16>(e, output, vectors, share, accs);
    case DType::kFloat32:
      return finish_as<float>(e, output, vectors, share, accs);
    case DType::kInt8:
      return finish_as<int8_t>(e, output, vectors, share, accs);
    default:
      return finish_as<int32_t>(e, output, vectors, share, accs);
  }
}

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kStages, bool kTiled>
struct Tile {
  // COL32 is, for CUTLASS, column-major in units of 32 consecutive k: of x [M, K], and of w^T [K, N] row-major.
  using LayoutX = std::conditional_t<kTiled, cutlass::layout::ColumnMajorInterleaved<32>, cutlass::layout::RowMajor>;
  using LayoutW = std::conditional_t<kTiled, cutlass::layout::RowMajorInterleaved<32>, cutlass::layout::ColumnMajor>;
  using Mma = typename cutlass::gemm::threadblock::DefaultMma<
      int8_t, LayoutX, 16, int8_t, LayoutW, 16, int32_t, cutlass::layout::RowMajor, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, cutlass::gemm::GemmShape<kTileM, kTileN, kTileK>,
      cutlass::gemm::GemmShape<kWarpM, kWarpN, kTileK>, cutlass::gemm::GemmShape<16, 8, 32>, kStages,
      cutlass::arch::OpMultiplyAddSaturate>::ThreadblockMma;

  static constexpr int kM = kTileM, kN = kTileN, kK = kTileK;
  static constexpr int kWarpTokens = kWarpM, kWarpsM = kTileM / kWarpM;
  static constexpr int kThreads = 32 * kWarpsM * (kTileN / kWarpN);
  static constexpr int kPasses = (kTileM + kPassTokens - 1) / kPassTokens;
  static constexpr size_t kRing = sizeof(typename Mma::SharedStorage);
  static constexpr size_t kParked = sizeof(int32_t) * kPitch * (kTileM < kPassTokens ? kTileM : kPassTokens);
  static constexpr size_t kVectorsAt = kRing > kParked ? kRing : kParked;
  static constexpr int kShared = static_cast<int>(kVectorsAt + kPasses * sizeof(Vectors));
  static_assert(kVectorsAt % 16 == 0 && kPassTokens % kWarpM == 0 && kTileN <= kChannels);
};

template <class T>
struct KernelArgs {
  typename T::Mma::IteratorA::Params x_steps;
  typename T::Mma::IteratorB::Params w_steps;
  int8_t* x;
  int8_t* w;
  int k, tiles_m, tiles_n;
  EpilogueArgs epilogue;
  TileOutput output;
};

// Neighbouring blocks take 8 tiles of tokens of the same channels, then the next channels: what they read stays in L2.
struct TilePosition {
  int tile_m, tile_n;

  __device__ TilePosition(int tiles_m, int tiles_n) {
    constexpr int kGroup = 8;
    const int block = static_cast<int>(blockIdx.x);
    const int first = block / (kGroup * tiles_n) * kGroup;
    const int rows = min(kGroup, tiles_m - first);
    const int rest = block - first * tiles_n;
    tile_m = first + rest % rows;
    tile_n = rest / rows;
  }
};

// A warp's accumulators to [tokens][kPitch].
template <class T>
__device__ void park(const typename T::Mma::FragmentC& accumulators, int32_t* parked, int warp_m, int warp_n,
                     int lane) {
  typename T::Mma::Operator::IteratorC::TensorRef ref(parked, cutlass::layout::RowMajor(kPitch));
  typename T::Mma::Operator::IteratorC target(ref, lane);
  target.add_tile_offset({warp_m, warp_n});
  target.store(accumulators);
}

template <class T>
__global__ void __launch_bounds__(T::kThreads) gemm_mma(const __grid_constant__ KernelArgs<T> args) {
  using Mma = typename T::Mma;
  extern __shared__ __align__(128) uint8_t memory[];
  auto* vectors = reinterpret_cast<Vectors*>(memory + T::kVectorsAt);
  auto* parked = reinterpret_cast<int32_t*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = cutlass::canonical_warp_idx_sync();
  const int lane = thread % 32;
  const TilePosition position(args.tiles_m, args.tiles_n);
  const int m0 = position.tile_m * T::kM;
  const int n0 = position.tile_n * T::kN;
  wait_for_predecessors();
  launch_dependents();

  for (int i = 0; i < T::kPasses; ++i) {
    load_vectors<T::kThreads>(args.epilogue, args.output, m0 + i * kPassTokens, n0, false, thread, vectors[i]);
  }
  typename Mma::FragmentC accumulators;
  accumulators.clear();
  {
    typename Mma::IteratorA x(args.x_steps, args.x, {args.output.m, args.k}, thread, {m0, 0});
    typename Mma::IteratorB w(args.w_steps, args.w, {args.k, args.output.n}, thread, {0, n0});
    Mma mma(*reinterpret_cast<typename Mma::SharedStorage*>(memory), thread, warp, lane);
    mma((args.k + T::kK - 1) / T::kK, accumulators, x, w, accumulators);
  }

  constexpr int kPieces = T::kN / Share::kPiece;
  const int warp_m = warp % T::kWarpsM;
  for (int i = 0; i < T::kPasses; ++i) {
    const int first = m0 + i * kPassTokens;
    __syncthreads();  // the ring, or the part before, has been read
    const int row = warp_m - i * (kPassTokens / T::kWarpTokens);
    if (row >= 0 && row * T::kWarpTokens < kPassTokens) {
      park<T>(accumulators, parked, row, warp / T::kWarpsM, lane);
    }
    __syncthreads();
    const int n = thread % kPieces * Share::kPiece;
    const int tokens = n0 + n < args.output.n ? min(T::kM, min(kPassTokens, args.output.m - first)) : 0;
    const Share share{thread / kPieces, tokens, n, first, n0, T::kThreads / kPieces};
    finish_pass(args.epilogue, args.output, vectors[i], share, parked);
  }
}

template <class T>
void run_tile(const GemmArgs& args, int device, cudaStream_t stream) {
  static DeviceFlags raised{};
  const auto* function = reinterpret_cast<const void*>(gemm_mma<T>);
  if (T::kShared > 48 * 1024) allow_shared_memory(function, T::kShared, device, raised);
  KernelArgs<T> kernel{typename T::LayoutX(args.ldx),
                       typename T::LayoutW(args.ldw),
                       const_cast<int8_t*>(args.x),  // CUTLASS's iterators know no const
                       const_cast<int8_t*>(args.w),
                       static_cast<int>(args.k),
                       static_cast<int>((args.m + T::kM - 1) / T::kM),
                       static_cast<int>((args.n + T::kN - 1) / T::kN),
                       args.epilogue,
                       output_of(args)};
  const dim3 grid(static_cast<unsigned>(kernel.tiles_m) * static_cast<unsigned>(kernel.tiles_n));
  launch_kernel("cutlass_sm80", function, grid, dim3(T::kThreads), T::kShared, dim3(1), is_chained(stream, device),
                &kernel, stream);
}

}  // namespace octofuse::sm80
