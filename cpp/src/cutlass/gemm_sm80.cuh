// CUTLASS 2, mma.sync int8 (sm_80 and every later chip): the same formula behind a visitor that stores by itself, so
// that one kernel serves every output type and every alignment of the output.
#pragma once

#include <cutlass/cutlass.h>
// The visitors below do not include what they use, so this one comes first.
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>

#include "cutlass/epilogues.cuh"
#include "cutlass/gemm_cutlass.h"
#include "kernels/launch.h"

namespace octofuse::sm80 {

struct StoreArgs {
  EpilogueArgs epilogue;
  void* out;
  int64_t ldo;
  DType type;
  bool vector;  // rows of kVector elements start at multiples of their size
};

template <class ThreadMap>
struct FormulaStore : cutlass::epilogue::threadblock::VisitorImpl2x<> {
  struct SharedStorage {};
  using Arguments = StoreArgs;
  using Params = StoreArgs;
  static constexpr int kVector = ThreadMap::kElementsPerAccess;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }

  CUTLASS_HOST_DEVICE FormulaStore() {}
  CUTLASS_HOST_DEVICE FormulaStore(Params const& params, SharedStorage const&) : params_(&params) {}

  template <class ThreadCoordinates>
  struct Callbacks : cutlass::epilogue::threadblock::EmptyCallbacks {
    CUTLASS_DEVICE Callbacks(ThreadCoordinates coordinates, int m_end, int n_end, Params const* params)
        : coordinates(coordinates), m_end(m_end), n_end(n_end), params(params) {}

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE auto visit(int iteration, int row, int column, int, cutlass::Array<Accumulator, kSize> const& acc) {
      using namespace cute;
      auto first = coordinates(column, row, iteration);
      octofuse::Coordinates<kSize> at;
      at.m_end = m_end;
      at.n_end = n_end;
      int32_t values[kSize];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        at.m[i] = get<0>(first);
        at.n[i] = get<1>(first) + i;
        values[i] = acc[i];
      }
      if (at.inside(0)) {
        const int64_t offset = static_cast<int64_t>(at.m[0]) * params->ldo + at.n[0];
        store_row(params->out, params->type, offset, values, at, params->epilogue, params->vector);
      }
      return acc;
    }

    ThreadCoordinates coordinates;
    int m_end, n_end;
    Params const* params;
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, ProblemShape shape) {
    using namespace cute;
    // (column access, row access, iteration) -> coordinate of the access's first element
    auto coordinates =
        group_modes<2, 5>(ThreadMap::partition(make_identity_tensor(shape), thread, tile)(_0{}, _, _, _, _, _));
    return Callbacks<decltype(coordinates)>(coordinates, get<0>(shape), get<1>(shape), params_);
  }

  Params const* params_ = nullptr;
};

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kStages>
struct Kernel {
  using RowMajor = cutlass::layout::RowMajor;
  using ThreadblockShape = cutlass::gemm::GemmShape<kTileM, kTileN, kTileK>;
  using WarpShape = cutlass::gemm::GemmShape<kWarpM, kWarpN, kTileK>;
  // The thread map speaks of int32 outputs, 16 bytes an access; the visitor narrows them itself.
  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<ThreadblockShape, WarpShape, int32_t, 4, 1>;
  using Visitor = FormulaStore<ThreadMap>;
  using GemmKernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      int8_t, RowMajor, cutlass::ComplexTransform::kNone, 16, int8_t, cutlass::layout::ColumnMajor,
      cutlass::ComplexTransform::kNone, 16, int32_t, RowMajor, 4, int32_t, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, ThreadblockShape, WarpShape, cutlass::gemm::GemmShape<16, 8, 32>, Visitor,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, kStages, cutlass::arch::OpMultiplyAddSaturate,
      1>::GemmKernel;

  static void run(const GemmArgs& args, int device, cudaStream_t stream) {
    constexpr int64_t kVector = Visitor::kVector;
    const size_t access = kVector * size_of(args.out_type);
    StoreArgs store{args.epilogue, args.out, args.ldo, args.out_type,
                    args.ldo % kVector == 0 && reinterpret_cast<uintptr_t>(args.out) % access == 0};
    typename GemmKernel::Arguments arguments(
        cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(args.m), static_cast<int>(args.n), static_cast<int>(args.k)}, 1, store,
        const_cast<int8_t*>(args.x), const_cast<int8_t*>(args.w), nullptr, nullptr, 0, 0, 0, 0,
        static_cast<int>(args.ldx), static_cast<int>(args.ldw), 0, 0);

    constexpr int kShared = static_cast<int>(sizeof(typename GemmKernel::SharedStorage));
    if (kShared > 48 * 1024) {
      allow_shared_memory(reinterpret_cast<const void*>(cutlass::Kernel2<GemmKernel>), kShared, device, raised_);
    }
    typename GemmKernel::Params params(arguments, device_capability(device).sm_count, 1);
    const dim3 grid = params.get_grid_dims();
    cutlass::Kernel2<GemmKernel><<<grid, GemmKernel::kThreadCount, kShared, stream>>>(params);
    check_launch("cutlass_sm80");
  }

 private:
  static inline DeviceFlags raised_{};
};

}  // namespace octofuse::sm80
