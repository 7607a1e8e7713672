// A warp's share of a token: the 256 columns of two k-blocks, 8 columns in a lane, in the order in which tokens.cuh
// stores them as integers. They come straight from memory into registers, are normalised there, and are rounded as in
// rows/pass.cuh; 256 columns are also a group of rows/reduce.cuh's sums.
#pragma once

#include "lowbit/tokens.cuh"
#include "rows/reduce.cuh"

namespace octofuse::lowbit {

constexpr int kShareColumns = 2 * kBlockK;

// The tokens as they lie in memory. Columns 2 i and 2 i + 1 can be loaded at once (gemv_reads() in run.cpp).
struct TokenRows {
  const void* x;
  int64_t ldx;
  int k;
  DType type;
  bool is_int8;
};

#ifdef __CUDACC__

// This lane's columns of a share. pairs[k-block][j]: columns 2 t + 8 j and the one behind it of the lane's 16.
struct Share {
  uint32_t pairs[2][2];

  // The first of pairs[k_block][j].
  __device__ static int column(int group, const Columns& at, int k_block, int j) {
    return group * kShareColumns + k_block * kBlockK + at.step * 32 + at.half * 16 + j * 8 + at.t * 2;
  }

  // What lies behind the last column is zero. From L2: an earlier kernel of a chain has just written it.
  __device__ void load(const TokenRows& rows, int token, int group, const Columns& at) {
    const int first = column(group, at, 0, 0);
    if (rows.is_int8) {
      const char* const from = static_cast<const char*>(rows.x) + token * rows.ldx + first;
      each([&](uint32_t& pair, int offset) {
        pair = first + offset < rows.k ? __ldcg(reinterpret_cast<const uint16_t*>(from + offset)) : 0;
      });
    } else {
      const uint16_t* const from = static_cast<const uint16_t*>(rows.x) + token * rows.ldx + first;
      each([&](uint32_t& pair, int offset) {
        pair = first + offset < rows.k ? __ldcg(reinterpret_cast<const uint32_t*>(from + offset)) : 0;
      });
    }
  }

  // As load() of a vector that is even and aligned, which no earlier kernel writes.
  __device__ void load_vector(const void* data, int k, int group, const Columns& at) {
    const int first = column(group, at, 0, 0);
    const uint16_t* const from = static_cast<const uint16_t*>(data) + first;
    each([&](uint32_t& pair, int offset) {
      pair = first + offset < k ? *reinterpret_cast<const uint32_t*>(from + offset) : 0;
    });
  }

  // int8, byte i of four, of a k-block.
  __device__ uint32_t bytes(int k_block) const { return __byte_perm(pairs[k_block][0], pairs[k_block][1], 0x5140); }

  // v[k-block]: columns 2 t, 2 t + 8, 2 t + 1 and 2 t + 9, as a register of codes has them. The switch stands outside
  // the loops: what a block does before its products is bound by the instructions of its 16 warps.
  __device__ void widen(DType type, float (&v)[2][4]) const {
    if (type == DType::kFloat16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i / 2][i % 2]));
        v[i / 2][i % 2] = both.x;
        v[i / 2][2 + i % 2] = both.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i / 2][i % 2] = __uint_as_float(pairs[i / 2][i % 2] << 16);
        v[i / 2][2 + i % 2] = __uint_as_float(pairs[i / 2][i % 2] & 0xFFFF0000U);
      }
    }
  }

  // Values rounded to `type`, and what became of them.
  __device__ void round(DType type, float (&v)[2][4]) {
    if (type == DType::kFloat16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half2 both = __floats2half2_rn(v[i / 2][i % 2], v[i / 2][2 + i % 2]);
        pairs[i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(&both);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(v[i / 2][i % 2], v[i / 2][2 + i % 2]);
        pairs[i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(&both);
      }
    }
    widen(type, v);
  }

  // The sum of a group in the order of rows/reduce.cuh, in all lanes. A quad has four packs of 8 columns: its lanes
  // keep one each, and what follows are the exchanges of a tree over 32 packs.
  __device__ static float sum(const float (&v)[2][4], const Columns& at) {
    const bool odd = at.t % 2 == 1;
    const bool high = at.t >= 2;
    float of_k_block[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float first = __fadd_rn(v[i][0], v[i][2]);
      const float second = __fadd_rn(v[i][1], v[i][3]);
      of_k_block[i] = __fadd_rn(odd ? second : first, __shfl_xor_sync(kFullWarp, odd ? first : second, 1));
    }
    float sum = __fadd_rn(high ? of_k_block[1] : of_k_block[0],
                          __shfl_xor_sync(kFullWarp, high ? of_k_block[0] : of_k_block[1], 2));
    constexpr int kTree[] = {2, 8, 4, 16, 1};
#pragma unroll
    for (const int lanes : kTree) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, lanes));
    return sum;
  }

 private:
  // f(pair, columns behind this lane's first)
  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(pairs[i / 2][i % 2], i / 2 * kBlockK + i % 2 * 8);
  }
};

#endif

}  // namespace octofuse::lowbit
