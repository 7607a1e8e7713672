// Compiles one kernel and describes it to the host.
#pragma once

#include "gemm/wgmma/cooperative.cuh"
#include "gemm/wgmma/kernel.cuh"
#include "gemm/wgmma/pingpong.cuh"

namespace octofuse::wgmma {

template <class T, class Epilogue>
const void* persistent_kernel() {
  if constexpr (T::kForm == Form::kPingpong) {
    return reinterpret_cast<const void*>(gemm_pingpong<T, Epilogue>);
  } else {
    return reinterpret_cast<const void*>(gemm_cooperative<T, Epilogue>);
  }
}

template <class T, class Out>
void list_activations(const void** kernels) {
  const auto kernel_of = [](auto epilogue) { return persistent_kernel<T, decltype(epilogue)>(); };
  kernels[static_cast<int>(Activation::kNone)] = kernel_of(UsualEpilogue<Out, Activation::kNone, false>());
#define OCTOFUSE_ACTIVATION(id, name) \
  kernels[static_cast<int>(Activation::k##id)] = kernel_of(UsualEpilogue<Out, Activation::k##id, false>());
#include "octofuse/activations.def"
#undef OCTOFUSE_ACTIVATION
}

template <class T, Arithmetic kArithmetic>
void list_usual(const void** kernels) {
  if constexpr (T::kGathered) {
    kernels[0] = persistent_kernel<T, UsualEpilogue<__half, Activation::kNone, false>>();
    kernels[1] = persistent_kernel<T, UsualEpilogue<__nv_bfloat16, Activation::kNone, false>>();
  } else {
    list_activations<T, __half>(kernels);
    list_activations<T, __nv_bfloat16>(kernels + kActivations);
    using Narrow = std::conditional_t<kArithmetic == Arithmetic::kInt8, int8_t, __nv_fp8_e4m3>;
    list_activations<T, Narrow>(kernels + 2 * kActivations);
    kernels[3 * kActivations] = persistent_kernel<T, UsualEpilogue<__half, Activation::kNone, true>>();
    kernels[3 * kActivations + 1] = persistent_kernel<T, UsualEpilogue<__nv_bfloat16, Activation::kNone, true>>();
  }
}

template <int kRowBlocks, int kCols, Form kForm, Arithmetic kArithmetic, Outliers kOutliers>
KernelInfo describe() {
  if constexpr (kForm == Form::kPingpong || kForm == Form::kCooperative) {
    constexpr bool kGathered = kOutliers == Outliers::kGathered;
    using T = std::conditional_t<kForm == Form::kPingpong, PingpongTile<kRowBlocks, kCols, kArithmetic, kGathered>,
                                 CooperativeTile<kCols, kArithmetic, kGathered>>;
    KernelInfo info{persistent_kernel<T, AnyEpilogue>(), T::kThreads, T::kSharedBytes, 0, 0, 1, {}};
    list_usual<T, kArithmetic>(info.usual);
    return info;
  } else {
    using T = Tile<kRowBlocks, kCols, kForm == Form::kSwapped, kArithmetic, kOutliers>;
    static_assert(T::kFixedBytes + T::kEpilogueBytes <= 227 * 1024);
    return {reinterpret_cast<const void*>(gemm_wgmma<T>),
            T::kThreads,
            T::kFixedBytes,
            T::kStageBytes,
            T::kEpilogueBytes,
            T::kSlices,
            {}};
  }
}

#define OCTOFUSE_KERNEL_INFO(row_blocks, cols, form, arithmetic)                              \
  template <>                                                                                 \
  KernelInfo kernel_info<row_blocks, cols, Form::form, Arithmetic::arithmetic>() {            \
    return describe<row_blocks, cols, Form::form, Arithmetic::arithmetic, Outliers::kNone>(); \
  }

#define OCTOFUSE_OUTLIER_KERNEL_INFO(row_blocks, cols, form, arithmetic)                          \
  template <>                                                                                     \
  KernelInfo outlier_kernel_info<row_blocks, cols, Form::form>() {                                \
    return describe<row_blocks, cols, Form::form, Arithmetic::arithmetic, Outliers::kGathered>(); \
  }

#define OCTOFUSE_DIGIT_KERNEL_INFO(row_blocks, cols, form, arithmetic)                          \
  template <>                                                                                   \
  KernelInfo digit_kernel_info<row_blocks, cols, Form::form>() {                                \
    return describe<row_blocks, cols, Form::form, Arithmetic::arithmetic, Outliers::kDigits>(); \
  }

}  // namespace octofuse::wgmma
