// LLM.int8() beside dot products with dp4a: a lane holds 16 columns of its channels anyway, and multiplies those with
// an outlier once more, in fp32. Values of such a column that are no outliers themselves are in int8 as well; so what
// is multiplied of them is the rest, x - q * scale.
#pragma once

#include "gemm/skinny/stream.cuh"

namespace octofuse::skinny {

// Byte `index` of 16, as float.
__device__ inline float byte_of(const uint4& v, int index) {
  const uint32_t low = (index & 4) == 0 ? v.x : v.y;
  const uint32_t high = (index & 4) == 0 ? v.z : v.w;
  const uint32_t word = (index & 8) == 0 ? low : high;
  return static_cast<float>(static_cast<int8_t>(word >> (index & 3) * 8));
}

// A thread's part. Its sums are in shared memory, since few threads need them, and registers bound how many weights are
// on their way.
template <int kTokens, int kChannels>
struct OutlierSums {
  using Memory = float[kChannels * kTokens][kStreamThreads];
  const KernelArgs& args;
  Memory& sums;
  int words;  // of a row's marks

  __device__ OutlierSums(const KernelArgs& args, Memory& memory)
      : args(args), sums(memory), words(static_cast<int>(words_of_marks(args.k))) {
#pragma unroll
    for (auto& sum : sums) sum[threadIdx.x] = 0.0F;
  }

  // Columns k to k + 15 that hold an outlier in any row.
  __device__ uint32_t columns(int k) const {
    uint32_t all = 0;
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      if (k < args.k && m < args.output.m) all |= args.outliers.marks[m * words + k / 32];
    }
    return all >> k % 32 & 0xFFFF;
  }

  __device__ void add(uint32_t columns, int k, const uint4 (&w)[kChannels]) {
    for (; columns != 0; columns &= columns - 1) {
      const int index = __ffs(static_cast<int>(columns)) - 1;
      float x[kTokens];
#pragma unroll
      for (int m = 0; m < kTokens; ++m) x[m] = m < args.output.m ? value(m, k + index) : 0.0F;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        const float weight = byte_of(w[i], index);
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
          float& sum = sums[i * kTokens + m][threadIdx.x];
          sum = __fmaf_rn(weight, x[m], sum);
        }
      }
    }
  }

  // The warp's sums to `to` ([token][pitch]), lane by lane.
  __device__ void store(float* to, int pitch, int lane) const {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      float mine = 0.0F;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        float sum = sums[i * kTokens + m][threadIdx.x];
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, apart));
        if (lane == i) mine = sum;
      }
      if (lane < kChannels) to[m * pitch + lane] = mine;
    }
  }

 private:
  __device__ float value(int m, int column) const {
    const float found = load_as_float(args.outliers.x, args.outliers.type, m * args.outliers.ldx + column);
    if (kTokens == 1) return found;  // its own outlier
    const float taken = static_cast<float>(args.x[m * args.ldx + column]);
    return __fmaf_rn(-taken, scale_at(args.epilogue.x_scale, m), found);
  }
};

template <int kTokens, int kChannels>
struct NoOutlierSums {
  using Memory = int;
  __device__ NoOutlierSums(const KernelArgs&, Memory&) {}
  __device__ uint32_t columns(int) const { return 0; }
  __device__ void add(uint32_t, int, const uint4 (&)[kChannels]) {}
  __device__ void store(float*, int, int) const {}
};

}  // namespace octofuse::skinny
