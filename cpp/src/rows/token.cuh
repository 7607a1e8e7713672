// One token in floating point that every block of a kernel normalises and quantises for itself, by kThreads of its
// threads: for kernels that have time for that while their weights are on their way.
#pragma once

#include "rows/pass.cuh"

namespace octofuse::rows {

// `values`: the int8 token, in shared memory. A norm gives the bits of pass_row in fewer instructions, which are
// what it costs here: a thread has one pack, and what is absent is neutral (a weight of 1, a bias of -0).
template <class T, int kThreads>
class Token {
  using Packed = rows::Pack<T>;
  static constexpr int kCopyPacks = 2;  // of a thread

 public:
  static constexpr int kNormColumns = kThreads * kPack;
  static constexpr int kCopyColumns = kNormColumns * kCopyPacks;

  __device__ Token(const RowPassArgs& row, bool per_token, int8_t* values)
      : row_(row), per_token_(per_token), values_(values) {}

  // Reads what no earlier kernel writes: a norm's weight and bias, and a given scale.
  __device__ void prefetch(int thread) {
    const bool mine = row_.norm != Norm::kNone && thread < count();
    if (mine && row_.weight != nullptr) {
      weight_ = static_cast<const Packed*>(row_.weight)[thread];
    } else {
      fill(weight_, 1.0F);
    }
    if (mine && row_.bias != nullptr) {
      bias_ = static_cast<const Packed*>(row_.bias)[thread];
    } else {
      fill(bias_, -0.0F);
    }
    if (!per_token_) inverse_ = reciprocal(scale_at(row_.scale, 0));
  }

  // Once earlier kernels have finished. The caller has its kThreads threads wait for each other before one reads
  // data().
  __device__ void prepare(int thread) {
    if (row_.norm == Norm::kNone) {
      copy(thread);
    } else {
      normalise(thread);
    }
  }

  __device__ const int8_t* data() const { return values_; }
  __device__ float scale(float given) const { return per_token_ ? token_scale() : given; }

 private:
  __device__ static float& token_scale() {
    __shared__ float scale;
    return scale;
  }
  __device__ static void fill(Packed& pack, float value) {
#pragma unroll
    for (T& element : pack.values) element = from_float<T>(value);
  }
  __device__ int count() const { return static_cast<int>(row_.cols) / kPack; }

  __device__ void copy(int thread) {
    __shared__ Meeting<kThreads, kCopyColumns / 256> meeting;
    RowPassArgs row = row_;
    row.y = nullptr;  // what follows is known here, so that the code for it falls away
    row.q = values_;
    row.q_group = 0;
    row.q_type = DType::kInt8;
    row.block_scales = false;
    row.scales = per_token_ ? &token_scale() : nullptr;
    const auto given = [this] { return inverse_; };
    pass_row<T, RowOp::kCopy, kThreads, kCopyPacks>(row, given, 0, thread, meeting);
  }

  // The sum over the row of what each thread has of it, in the order of reduce.cuh.
  __device__ float sum(const Pack<float>& terms, float* of_group, int thread) const {
    const float group = warp_sum(tree_sum(terms.values));
    if (thread % 32 == 0) of_group[thread / 32] = group;
    row_barrier<kThreads>();
    return few_groups_sum(of_group, (count() + 31) / 32);
  }

  __device__ void normalise(int thread) {
    __shared__ float of_group[2][kThreads / 32];
    const bool mine = thread < count();
    Pack<float> row = {};
    if (mine) row = widen(static_cast<const Packed*>(row_.x)[thread]);
    float mean = 0.0F;
    if (row_.norm == Norm::kLayer) mean = __fdiv_rn(sum(row, of_group[0], thread), static_cast<float>(row_.cols));
    Pack<float> squares;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      row.values[j] = __fsub_rn(row.values[j], mean);
      squares.values[j] = mine ? __fmul_rn(row.values[j], row.values[j]) : 0.0F;
    }
    const float root = inverse_root(sum(squares, of_group[1], thread), static_cast<int>(row_.cols), row_.eps);
    const Pack<float> factor = widen(weight_);
    const Pack<float> term = widen(bias_);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const float scaled = __fmul_rn(__fmul_rn(row.values[j], root), factor.values[j]);
      row.values[j] = mine ? __fadd_rn(scaled, term.values[j]) : 0.0F;  // no part of the token's scale
    }
    quantise(narrow<T>(row), mine, thread);
  }

  __device__ void quantise(const Packed& pack, bool mine, int thread) {
    __shared__ uint32_t of_warp[kThreads / 32];
    float inverse = inverse_;
    if (per_token_) {
      Largest<T> largest;
      largest.take(pack);
      const float scale = scale_of(row_max<kThreads>(largest.value(), thread, of_warp), DType::kInt8);
      if (thread == 0) token_scale() = scale;
      inverse = reciprocal(scale);
    }
    Pack<int8_t> out;
    round_to(widen(pack).values, -127, inverse, out.values);
    if (mine) reinterpret_cast<Pack<int8_t>*>(values_)[thread] = out;
  }

  const RowPassArgs& row_;
  const bool per_token_;
  int8_t* const values_;
  Packed weight_, bias_;
  float inverse_ = 0.0F;  // 1 / the given scale
};

}  // namespace octofuse::rows
