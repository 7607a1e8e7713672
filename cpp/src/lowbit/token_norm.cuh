// A layer or RMS norm of the tokens of a gemv kernel, in every block for itself: that takes less time than a kernel in
// front would. Sums have the order of rows/reduce.cuh and each step is rounded as in rows/pass.cuh, so the bits are
// those of the norm as a kernel of its own.
#pragma once

#include "lowbit/norm.h"
#include "lowbit/share.cuh"
#include "rows/pass.cuh"

namespace octofuse::lowbit {

#ifdef __CUDACC__

// Of one token. kAhead: shares of this warp whose weight and bias are on their way while earlier kernels run.
template <int kAhead>
class TokenNorm {
  const NormArgs& args_;
  DType type_;
  int k_, groups_;
  float mean_ = 0.0F, root_ = 0.0F;
  Share weight_[kAhead], bias_[kAhead];

 public:
  __device__ TokenNorm(const NormArgs& args, const TokenRows& rows)
      : args_(args), type_(rows.type), k_(rows.k), groups_((rows.k + kShareColumns - 1) / kShareColumns) {}

  __device__ bool is_centred() const { return args_.kind == Norm::kLayer; }

  // Requests what no earlier kernel writes, for this warp's i-th share.
  __device__ void prefetch(int i, int group, const Columns& at) {
    if (args_.weight != nullptr) weight_[i].load_vector(args_.weight, k_, group, at);
    if (args_.bias != nullptr) bias_[i].load_vector(args_.bias, k_, group, at);
  }

  // What a share adds to the sum of the row, then to that of squares.
  __device__ float sum(const Share& share, const Columns& at) const {
    float v[2][4];
    share.widen(type_, v);
    return Share::sum(v, at);
  }
  __device__ float sum_of_squares(const Share& share, int group, const Columns& at) const {
    float v[2][4];
    share.widen(type_, v);
    if (is_centred()) centre(group, at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = __fmul_rn(v[i / 4][i % 4], v[i / 4][i % 4]);
    return Share::sum(v, at);
  }

  // sums, squares: of each group, in shared memory.
  __device__ void take_mean(const float* sums, int lane) {
    mean_ = __fdiv_rn(total_of(sums, lane), static_cast<float>(k_));
  }
  __device__ void take_root(const float* squares, int lane) {
    root_ = rows::inverse_root(total_of(squares, lane), k_, args_.eps);
  }

  // A share becomes normalised values, v in fp32; what lies behind the last column stays zero. Shares come in the order
  // of their requests, and the next one of these is made.
  __device__ void apply(Share& share, int group, int next_group, const Columns& at, float (&v)[2][4]) {
    float of[2][4];
    share.widen(type_, v);
    if (is_centred()) centre(group, at, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = __fmul_rn(v[i / 4][i % 4], root_);
    if (args_.weight != nullptr) {
      weight_[0].widen(type_, of);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = __fmul_rn(v[i / 4][i % 4], of[i / 4][i % 4]);
    }
    if (args_.bias != nullptr) {
      bias_[0].widen(type_, of);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = __fadd_rn(v[i / 4][i % 4], of[i / 4][i % 4]);
    }
    share.round(type_, v);
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) {
      weight_[i] = weight_[i + 1];
      bias_[i] = bias_[i + 1];
    }
    if (next_group < groups_) prefetch(kAhead - 1, next_group, at);
  }

 private:
  // The mean subtracted from columns that exist.
  __device__ void centre(int group, const Columns& at, float (&v)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool exists = Share::column(group, at, i / 4, i % 2) < k_;
      v[i / 4][i % 4] = exists ? __fsub_rn(v[i / 4][i % 4], mean_) : 0.0F;
    }
  }

  __device__ float total_of(const float* of_group, int lane) const {
    if (groups_ <= 8) return rows::few_groups_sum(of_group, groups_);
    float mine = 0.0F;
#pragma unroll 1
    for (int i = lane; i < groups_; i += 32) mine = __fadd_rn(mine, of_group[i]);
    __syncwarp();
    return rows::warp_sum(mine);
  }
};

#endif

}  // namespace octofuse::lowbit
