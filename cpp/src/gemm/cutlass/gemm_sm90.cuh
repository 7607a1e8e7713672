// CUTLASS 3, sm_90a: TMA loads, wgmma int8, warp-specialised, and one visitor node that is the whole epilogue.
// A new tile is a few lines in tiles_sm90.h and one in gemm_sm90.cu.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <type_traits>

#include "device/launch.h"
#include "epilogue/tile.cuh"
#include "gemm/cutlass/run.h"
#include "gemm/cutlass/tiles_sm90.h"

namespace octofuse::sm90 {

// The epilogue as a leaf of CUTLASS's visitor tree: it sees int32 accumulators with their coordinates and returns
// finished outputs, which the collective stores through shared memory and TMA. A tile's row and column vectors are read
// once into shared memory, already as fp32: types and flags stay run-time switches, and no tile is compiled twice for
// them.
template <class Element, class Out, int kTileM, int kTileN, int kThreads>
struct FormulaNode : cutlass::epilogue::fusion::Sm90VisitorImpl<> {
  using SharedStorage = TileVectors<kTileM, kTileN>;
  using Arguments = EpilogueArgs;
  using Params = EpilogueArgs;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE FormulaNode() {}
  CUTLASS_HOST_DEVICE FormulaNode(Params const& params, SharedStorage const& shared)
      : params_(&params), shared_(const_cast<SharedStorage*>(&shared)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(cutlass::epilogue::fusion::detail::ProducerLoadArgs<Args...> const&) {
    return cutlass::epilogue::fusion::detail::EmptyProducerLoadCallbacks{};
  }

  template <class ThreadCoordinates>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE ConsumerStoreCallbacks(ThreadCoordinates coordinates, int tile_m, int tile_n, int thread_m,
                                          int thread_n, int m_end, int n_end, int thread, Params const* params,
                                          SharedStorage* shared)
        : coordinates(coordinates),
          tile_m(tile_m),
          tile_n(tile_n),
          thread_m(thread_m),
          thread_n(thread_n),
          m_end(m_end),
          n_end(n_end),
          thread(thread),
          params(params),
          shared(shared) {}

    // Once a tile, before its first fragment. The collective synchronises the warpgroup behind it, and has synchronised
    // the last tile's readers already: its TMA store needs that.
    CUTLASS_DEVICE void begin() {
      if constexpr (!std::is_same_v<Out, int32_t>) {
        const TileOutput output{nullptr, 0, 0, DType::kOther, false, m_end, n_end};
        load_vectors<kThreads>(*params, output, tile_m, tile_n, false, thread, *shared);
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return !std::is_same_v<Out, int32_t>; }

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE cutlass::Array<Element, kSize> visit(cutlass::Array<Accumulator, kSize> const& acc, int epi_v,
                                                        int epi_m, int epi_n) {
      using namespace cute;
      auto subtile = coordinates(_, _, _, epi_m, epi_n);
      octofuse::Coordinates<kSize> at;
      at.m_end = m_end;
      at.n_end = n_end;
      Operands<kSize> operands;
      int32_t values[kSize];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        auto coordinate = subtile(epi_v * kSize + i);
        const int m = thread_m + get<0>(coordinate);
        const int n = thread_n + get<1>(coordinate);
        at.m[i] = tile_m + m;
        at.n[i] = tile_n + n;
        values[i] = acc[i];
        operands.w_scale[i] = shared->w_scale[n];
        operands.x_scale[i] = shared->x_scale[m];
        operands.bias[i] = shared->bias[n];
        operands.minus_w_sum[i] = shared->minus_w_sum[n];
        operands.x_zero[i] = shared->x_zero[m];
      }
      if (params->residual != nullptr) load_residual(at, *params, operands.residual);
      Out out[kSize];
      epilogue<Out, false>(values, operands, *params, out);
      cutlass::Array<Element, kSize> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) result[i] = reinterpret_cast<Element const&>(out[i]);
      return result;
    }

    ThreadCoordinates coordinates;  // relative to this thread's first element
    int tile_m, tile_n;             // the tile's first element in the matrix
    int thread_m, thread_n;         // this thread's first element in the tile
    int m_end, n_end;
    int thread;
    Params const* params;
    SharedStorage* shared;
  };

  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    const int m_end = get<0>(args.problem_shape_mnkl);
    const int n_end = get<1>(args.problem_shape_mnkl);
    const int tile_m = m_end - get<0>(args.residue_cD);
    const int tile_n = n_end - get<1>(args.residue_cD);
    return ConsumerStoreCallbacks<decltype(args.tCcD)>(
        args.tCcD, tile_m, tile_n, m_end - get<0>(args.residue_tCcD) - tile_m,
        n_end - get<1>(args.residue_tCcD) - tile_n, m_end, n_end, args.thread_idx, params_, shared_);
  }

  Params const* params_ = nullptr;
  SharedStorage* shared_ = nullptr;
};

// CUTLASS's name for an output type, and the CUDA type that the formula returns.
template <class Element>
struct FormulaType {
  using type = Element;
};
template <>
struct FormulaType<cutlass::half_t> {
  using type = __half;
};
template <>
struct FormulaType<cutlass::bfloat16_t> {
  using type = __nv_bfloat16;
};

template <class Tile, class Element>
struct Kernel {
  using TileShape = typename Tile::TileShape;
  using ClusterShape = typename Tile::ClusterShape;
  using RowMajor = cutlass::layout::RowMajor;
  static constexpr int kOutAlignment = 16 / sizeof(Element);
  static constexpr int kInAlignment = 16;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void, RowMajor, kOutAlignment, Element, RowMajor,
      kOutAlignment, typename Tile::EpilogueSchedule,
      FormulaNode<Element, typename FormulaType<Element>::type, cute::size<0>(TileShape{}), cute::size<1>(TileShape{}),
                  Tile::kEpilogueThreads>>::CollectiveOp;

  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, RowMajor, kInAlignment, int8_t,
      cutlass::layout::ColumnMajor, kInAlignment, int32_t, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      typename Tile::MainloopSchedule>::CollectiveOp;

  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                          CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  static void run(const GemmArgs& args, int device, cudaStream_t stream) {
    using namespace cute;
    const int m = static_cast<int>(args.m);
    const int n = static_cast<int>(args.n);
    const int k = static_cast<int>(args.k);
    typename GemmKernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = make_shape(m, n, k, 1);
    arguments.mainloop.ptr_A = args.x;
    arguments.mainloop.dA = make_stride(args.ldx, _1{}, int64_t{0});
    arguments.mainloop.ptr_B = args.w;
    arguments.mainloop.dB = make_stride(args.ldw, _1{}, int64_t{0});
    arguments.epilogue.thread = args.epilogue;
    arguments.epilogue.ptr_D = static_cast<Element*>(args.out);
    arguments.epilogue.dD = make_stride(args.ldo, _1{}, int64_t{0});
    arguments.hw_info.device_id = device;
    // Given here, so that no launch asks the driver for it.
    arguments.hw_info.sm_count = device_capability(device).sm_count;

    allow_shared_memory(reinterpret_cast<const void*>(cutlass::device_kernel<GemmKernel>),
                        GemmKernel::SharedStorageSize, device, raised_);
    auto params = GemmKernel::to_underlying_arguments(arguments, nullptr);
    const cutlass::Status status = Gemm::run(params, stream);
    if (status != cutlass::Status::kSuccess) throw_launch_error("cutlass_sm90", cutlassGetStatusString(status));
  }

 private:
  static inline DeviceFlags raised_{};
};

}  // namespace octofuse::sm90
