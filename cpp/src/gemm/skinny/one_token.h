// One token in a captured chain on compute capability 9.0: which of two kernels takes it instead of gemv.cu's. Pure:
// the launch and `explain` both ask here.
#pragma once

#include <cstdint>

#include "device/align.h"
#include "octofuse/device.h"

namespace octofuse::skinny {

constexpr int kStreamWarps = 8;  // of a block, which stream weights
constexpr int kSpan = 512;       // bytes of a channel that a warp of a dp4a kernel reads at once

// gemv_shared.cu: a block an SM, its slice of the weights in shared memory.
constexpr int kMostChannels = 128;     // of a block
constexpr int kMostSlice = 100 << 10;  // bytes of weights: two kernels of the chain side by side
constexpr int kMostToken = 16384;      // columns of an int8 token

// gemv_registers.cu: a thread's share of the weights in the registers that it multiplies from.
constexpr int kRegisterChannels = 8;          // of a warp
constexpr int64_t kMostWeights = 2400 << 10;  // bytes

// An even share of the channels for every SM.
constexpr int channels_of_block(int64_t n, int sm_count) { return static_cast<int>(ceil_div(n, sm_count)); }

// How many of a block's warps share K, as a power of two.
constexpr int log_k_warps(int64_t k) {
  int log = 0;
  while (1 << log < kStreamWarps && (kSpan << log) < k) ++log;
  return log;
}

// Whether a block's slice and its token fit.
constexpr bool fits_shared(int64_t n, int64_t k, int sm_count) {
  const int channels = channels_of_block(n, sm_count);
  return k <= kMostToken && channels <= kMostChannels && channels * (k + 128) <= kMostSlice;
}

constexpr bool fits_registers(int64_t n, int64_t k, int sm_count) {
  const int64_t groups = int64_t{sm_count} * (kStreamWarps >> log_k_warps(k));
  return n <= groups * kRegisterChannels && n * k <= kMostWeights;
}

inline bool has_chained_kernels(const Capability& capability) {
  return capability.compute_capability == 90 && capability.kernels_sm90a;
}

// The kernel's name, or nullptr where gemv.cu's keep the token.
inline const char* chained_kernel(int64_t n, int64_t k, const Capability& capability) {
  if (!has_chained_kernels(capability) || !fits_shared(n, k, capability.sm_count)) return nullptr;
  return fits_registers(n, k, capability.sm_count) ? "skinny/gemv_registers" : "skinny/gemv_shared";
}

}  // namespace octofuse::skinny
