// LLM.int8() of many tokens (fewer: digits.cuh): columns with an outlier are multiplied behind the last block of K, in
// fp16 or bf16: x's follow in the ring, the weight's were taken out of it (columns.cuh), and those beyond are read
// where they lie. Sums of int8 become float and are multiplied by x's scales first, for which the epilogue then takes
// 1:
//
//   t = (float(acc) * x_scale + sum of the outliers' products) * w_scale + bias
//
// Without an outlier all this is left out, and the epilogue's formula stands as it is.
#pragma once

#include "epilogue/outliers.cuh"
#include "gemm/wgmma/tile.cuh"

namespace octofuse::wgmma {

// A warpgroup's sums as float times x's scales, in the same registers. scales: from its first row on.
template <bool kSwap, int kCols, int kRowBlocks>
__device__ inline void scale_sums(const float* scales, int thread, uint32_t (&sums)[kRowBlocks * kCols / 2]) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < kRowBlocks * kCols / 2; ++i) {
    const int token = kSwap ? i / 4 * 8 + thread % 4 * 2 + i % 2 : row + i / (kCols / 2) * 64 + i / 2 % 2 * 8;
    sums[i] = __float_as_uint(__fmul_rn(__int2float_rn(static_cast<int32_t>(sums[i])), scales[token]));
  }
}

// finish_tile() for outputs in x's type.
template <int kPitch, class Share, class Vectors>
__device__ inline void finish_half(const EpilogueArgs& e, const TileOutput& output, const Vectors& vectors,
                                   const Share& share, const float* sums) {
  if (output.type == DType::kFloat16) return finish_as<__half, kPitch>(e, output, vectors, share, sums);
  finish_as<__nv_bfloat16, kPitch>(e, output, vectors, share, sums);
}

// A sum as float: without an outlier it is int32.
__device__ inline float float_of(uint32_t sum, int count) {
  return count > 0 ? __uint_as_float(sum) : __int2float_rn(static_cast<int32_t>(sum));
}

// Four matrices of 8 rows by 16 bytes from shared memory, as mma's operands have them; lane i gives the address of row
// i % 8 of matrix i / 8.
__device__ inline uint4 load_matrices(const uint8_t* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(row))
               : "memory");
  return v;
}

// 16 bytes, number `octet` of a token's 128, in TMA's swizzle.
struct TokenOctets {
  const uint8_t* block;
  __device__ const uint8_t* operator()(int row, int octet) const { return block + row * 128 + (octet ^ row % 8) * 16; }
};

// A lane's columns 2 q, 2 q + 1 (x) and 8 further (y), q = lane % 4, of 16 of a channel: int8 to T.
template <class T>
__device__ inline uint2 widen_channel(const uint8_t* taken, int lane) {
  const uint32_t above = *reinterpret_cast<const uint32_t*>(taken + lane % 4 * 4) ^ 0x80808080U;  // 128 more
  const auto pair = [&](uint32_t selector) {
    const uint32_t joined = __byte_perm(above, 0x64646464U, selector);  // to the mantissa of 1024
    const __half2 exact = __hsub2(*reinterpret_cast<const __half2*>(&joined), __half2half2(__ushort_as_half(0x6480)));
    if constexpr (std::is_same_v<T, __half>) return *reinterpret_cast<const uint32_t*>(&exact);
    const float2 wide = __half22float2(exact);
    const __nv_bfloat162 narrow = __floats2bfloat162_rn(wide.x, wide.y);
    return *reinterpret_cast<const uint32_t*>(&narrow);
  };
  return make_uint2(pair(0x4140), pair(0x4342));
}

// A warp's 16 rows by all cols of a tile times 16 columns with outliers, by mma.sync: sums that were no accumulators
// before would have wgmma's instructions wait for each other. tokens: x's columns in the ring, from this warpgroup's
// first token on; taken: those of the channels in columns.cuh's order, from its first channel on; row: the warp's
// first, of 64.
template <class T, class Tile>
__device__ inline void multiply_step(const TokenOctets& tokens, int step, const uint8_t* taken, int row, int lane,
                                     uint32_t (&sums)[Tile::kRowBlocks * Tile::kCols / 2]) {
  constexpr int kCols = Tile::kCols;
  const auto of_channel = [&](int channel) { return widen_channel<T>(taken + (channel + lane / 4) * 16, lane); };
  const auto multiply = [&](const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int first) {
    mma_half<T>(a, b0, b1, reinterpret_cast<float (&)[4]>(sums[first]));
  };
  if constexpr (Tile::kSwap) {
    static_assert(Tile::kRowBlocks == 1);
    const uint2 low = of_channel(row), high = of_channel(row + 8);
    const uint32_t a[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
    for (int col = 0; col < kCols; col += 16) {
      const uint4 b = load_matrices(tokens(col + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
      multiply(a, b.x, b.y, col / 2);
      multiply(a, b.z, b.w, col / 2 + 4);
    }
  } else {
    uint4 a[Tile::kRowBlocks];
#pragma unroll
    for (int r = 0; r < Tile::kRowBlocks; ++r) {
      a[r] = load_matrices(tokens(r * 64 + row + lane % 16, step * 2 + lane / 16));
    }
#pragma unroll
    for (int col = 0; col < kCols; col += 8) {
      const uint2 b = of_channel(col);
#pragma unroll
      for (int r = 0; r < Tile::kRowBlocks; ++r) {
        multiply({a[r].x, a[r].y, a[r].z, a[r].w}, b.x, b.y, r * (kCols / 2) + col / 2);
      }
    }
  }
}

// Of the columns that were taken, the block-th kOutlierBlock of them, whose tile's begin at step `first`. channel: this
// warpgroup's first one of the tile. done(step): its bytes have been read.
template <class Tile, class Done>
__device__ inline void multiply_block(DType type, const uint8_t* tokens, const typename Tile::Columns& columns,
                                      uint32_t first, int block, const ColumnCount& count, uint32_t channel, int thread,
                                      uint32_t (&sums)[Tile::kRowBlocks * Tile::kCols / 2], Done done) {
  constexpr int kSteps = kOutlierBlock / 16;
  const int end = min(kSteps, count.steps - block * kSteps);
#pragma unroll 1
  for (int step = 0; step < end; ++step) {
    const uint32_t of_all = first + static_cast<uint32_t>(block * kSteps + step);
    const uint8_t* const taken = columns.at(of_all) + Tile::Columns::offset(channel, 0);
    if (type == DType::kFloat16) {
      multiply_step<__half, Tile>({tokens}, step, taken, thread / 32 * 16, thread % 32, sums);
    } else {
      multiply_step<__nv_bfloat16, Tile>({tokens}, step, taken, thread / 32 * 16, thread % 32, sums);
    }
    done(of_all);
  }
}

// The columns from `first` on, read where they lie. row, col: of the output, the first of this thread's warpgroup.
template <bool kSwap, int kCols, int kRowBlocks>
__device__ inline void multiply_rest(const OutlierKernelArgs& args, int first, int count, int row, int col, int thread,
                                     uint32_t (&sums)[kRowBlocks * kCols / 2]) {
  if (first >= count) return;
  const auto multiply = [&](auto type) {
    using T = decltype(type);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      multiply_columns<T, kSwap>(args.outliers, first, count, args.output.m, args.output.n,
                                 row + r * 64 + thread / 32 * 16, col, thread % 32,
                                 reinterpret_cast<float (&)[kCols / 2]>(sums[r * (kCols / 2)]));
    }
  };
  if (args.outliers.type == DType::kFloat16) {
    multiply(__half());
  } else {
    multiply(__nv_bfloat16());
  }
}

// The columns with outliers of a tile from (m0, n0) on, by a kernel that computes one.
template <class Tile>
class TileOutliers {
  const OutlierKernelArgs& args_;
  int m0_, n0_, warpgroup_, thread_;
  ColumnCount count_;

 public:
  // Behind the wait for earlier kernels.
  __device__ TileOutliers(const OutlierKernelArgs& args, int m0, int n0, int thread)
      : args_(args),
        m0_(m0),
        n0_(n0),
        warpgroup_(warpgroup_of(thread)),
        thread_(thread % 128),
        count_(args, Tile::Columns::kTaken) {}

  __device__ int count() const { return count_.all; }

  // Behind multiply(). d: float afterwards if there are some.
  __device__ void multiply(const Place& place, typename Tile::Shared& shared, const uint8_t* ring,
                           uint32_t (&d)[Tile::kCols / 2]) {
    if (count_.all == 0) return;
    int stage = place.k_count % args_.stages;
    uint32_t phase = static_cast<uint32_t>(place.k_count / args_.stages) & 1;
    int last = stage == 0 ? args_.stages - 1 : stage - 1;
    shared.columns.wait_full(0);
    scale_sums<Tile::kSwap, Tile::kCols, 1>(shared.scales + (Tile::kSwap ? 0 : 64 * warpgroup_), thread_, d);
    for (int block = 0; block < count_.blocks; ++block) {
      __syncwarp();
      cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(1 + warpgroup_));  // all have read the last stage
      if (thread_ == 0) shared.empty[last].arrive();
      shared.full[stage].wait(phase);
      const uint8_t* const tokens =
          ring + stage * Tile::kStageBytes + (Tile::kSwap ? Tile::kBytesA : warpgroup_ * 64 * kBlockK);
      multiply_block<Tile>(args_.outliers.type, tokens, shared.columns, 0, block, count_,
                           Tile::kSwap ? 64 * static_cast<uint32_t>(warpgroup_) : 0, thread_, d, [](uint32_t) {});
      last = stage;
      if (++stage == args_.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
    const int row = (Tile::kSwap ? n0_ : m0_) + 64 * warpgroup_;
    multiply_rest<Tile::kSwap, Tile::kCols, 1>(args_, count_.taken, count_.all, row, Tile::kSwap ? m0_ : n0_, thread_,
                                               d);
  }
};

}  // namespace octofuse::wgmma
