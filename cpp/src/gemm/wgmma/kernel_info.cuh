// Compiles one kernel and describes it to the host.
#pragma once

#include "gemm/wgmma/kernel.cuh"
#include "gemm/wgmma/pingpong.cuh"

namespace octofuse::wgmma {

template <class T, class Out>
void list_activations(const void** kernels) {
  const auto kernel_of = [](auto epilogue) {
    return reinterpret_cast<const void*>(gemm_pingpong<T, decltype(epilogue)>);
  };
  kernels[static_cast<int>(Activation::kNone)] = kernel_of(UsualEpilogue<Out, Activation::kNone, false>());
#define OCTOFUSE_ACTIVATION(id, name) \
  kernels[static_cast<int>(Activation::k##id)] = kernel_of(UsualEpilogue<Out, Activation::k##id, false>());
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
}

template <int kRowBlocks, int kCols, Form kForm>
KernelInfo describe() {
  if constexpr (kForm == Form::kPingpong) {
    using T = PingpongTile<kRowBlocks, kCols>;
    KernelInfo info{
        reinterpret_cast<const void*>(gemm_pingpong<T, AnyEpilogue>), T::kThreads, T::kSharedBytes, 0, 0, {}};
    list_activations<T, __half>(info.usual);
    list_activations<T, __nv_bfloat16>(info.usual + kActivations);
    list_activations<T, int8_t>(info.usual + 2 * kActivations);
    using Half = UsualEpilogue<__half, Activation::kNone, true>;
    using BFloat = UsualEpilogue<__nv_bfloat16, Activation::kNone, true>;
    info.usual[3 * kActivations] = reinterpret_cast<const void*>(gemm_pingpong<T, Half>);
    info.usual[3 * kActivations + 1] = reinterpret_cast<const void*>(gemm_pingpong<T, BFloat>);
    return info;
  } else {
    using T = Tile<kRowBlocks, kCols, kForm == Form::kSwapped>;
    return {reinterpret_cast<const void*>(gemm_wgmma<T>),
            T::kThreads,
            T::kFixedBytes,
            T::kStageBytes,
            T::kEpilogueBytes,
            {}};
  }
}

#define OCTOFUSE_KERNEL_INFO(row_blocks, cols, form)       \
  template <>                                              \
  KernelInfo kernel_info<row_blocks, cols, Form::form>() { \
    return describe<row_blocks, cols, Form::form>();       \
  }

}  // namespace octofuse::wgmma
