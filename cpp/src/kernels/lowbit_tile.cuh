// What the low-bit kernels share: how codes lie, and the arithmetic of up to 4 tokens against 16 rows of weights over
// 128 columns (lowbit_gemv.cu).
//
// mma.sync m16n8k32: codes are its 16 rows, as unsigned bytes (sparse12: signed); a token is two of its 8 columns, the
// high and the low bytes of its integers. A quad's lane t then holds both sums of token t, for two rows:
//   total = 2 * (256 * high + low) - twice_zero * (the token's own sum)
// is exact in int32 (510 * 128 * 32639 < 2^31), and stands for 2 * sum of (code - zero) * integer; so it is for planes,
// with a zero of one half and half the scale, and for sparse12 without the 2, whose codes are twice their value. What
// follows is fp32: the totals of all planes times their scales, and these times the token's power of two and kFactor.
//
// Sums over K, in an order of K alone: part p of 16 adds chunks p, p + 16, ... of 128 columns in turn, of each its
// groups, of these its planes; four neighbouring parts are added in turn, then the four sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cutlass/epilogues.cuh"
#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

constexpr int kStrip = 16;         // rows of a tile
constexpr int kChunk = 128;        // columns of a tile, and of a token that share a power of two
constexpr int kSteps = 4;          // products of 32 columns
constexpr int kParts = 16;         // into which the chunks of a row are dealt
constexpr int kMostToken = 32639;  // 127 * 256 + 127: the largest sum of a high and a low byte

// ---- codes ----

// A kind of weight at compile time. kBits of uniform codes; as many planes, each a tile of one bit, 0: as Weight says.
template <LowbitFormat kFormat, int kBits>
struct Codes {
  static constexpr bool kPlanes = kFormat == LowbitFormat::kPlanes;
  static constexpr bool kSparse = kFormat == LowbitFormat::kSparse12;
  static constexpr int kWidth = kPlanes ? 1 : kSparse ? 4 : kBits;  // bits a column takes in a tile (of a plane)
  static constexpr int kCount = kPlanes ? kBits : 1;                // planes
  static constexpr int kTwiceMiddle = kPlanes ? 1 : kBits == 8 ? 256 : (1 << kBits) - 1;  // without zero points
  static constexpr int kWords = 2 * kWidth;                                               // a lane's, of a plane
  static constexpr int kBytes = 256 * kWidth;                                             // of a plane's tile
};

// Where a lane's words lie in a tile: 16 bytes of each piece, and of a field of one bit 8 bytes behind these.
template <int kWidth, class F>
__device__ inline void for_each_piece(int lane, F f) {
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) f(i * 4, i * 512 + lane * 16, std::integral_constant<int, 16>());
  if constexpr (kWidth % 2 == 1) f(kWidth / 2 * 4, kWidth / 2 * 512 + lane * 8, std::integral_constant<int, 8>());
}

template <int kWidth>
__device__ inline void read_words(const char* tile, int lane, uint32_t (&words)[2 * kWidth]) {
  for_each_piece<kWidth>(lane, [&](int first, int offset, auto bytes) {
    if constexpr (bytes.value == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(tile + offset);
      words[first] = v.x;
      words[first + 1] = v.y;
      words[first + 2] = v.z;
      words[first + 3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(tile + offset);
      words[first] = v.x;
      words[first + 1] = v.y;
    }
  });
}

// Register r of a lane's 16: four codes, one in each byte. r is known at compile time.
template <int kWidth>
__device__ inline uint32_t codes_of(const uint32_t (&words)[2 * kWidth], int r) {
  uint32_t codes = 0;
  int first = 0;
  int low = 0;
#pragma unroll
  for (int field = 8; field > 0; field /= 2) {
    if ((kWidth & field) == 0) continue;
    const int per_word = 8 / field;
    const int step = r / 4;
    const int half = r / 2 % 2;
    const int at = field > 2 ? r : r % 2 * 8 + (field == 2 ? half * 4 + step : step * 2 + half);
    const uint32_t word = words[first + at / per_word];
    const int shift = at % per_word * field - low;
    const uint32_t mask = 0x01010101U * (((1U << field) - 1U) << low);
    codes |= (shift >= 0 ? word >> shift : word << -shift) & mask;
    first += 2 * field;
    low += field;
  }
  return codes;
}

// One operand of a product of 32 columns: rows lane / 4 and lane / 4 + 8 of the first 16, then of the others. A
// register has columns 2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9 of its 16 (t: lane % 4).
template <LowbitFormat kFormat, int kBits>
__device__ inline void codes_of_step(const uint32_t (&words)[Codes<kFormat, kBits>::kWords], int step,
                                     uint32_t (&a)[4]) {
  if constexpr (Codes<kFormat, kBits>::kSparse) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t pairs = words[step * 2 + row];
      uint32_t odd;  // 0xFF where the high bit is set: the second column is kept
      asm("prmt.b32 %0, %1, 0, 0xBA98;" : "=r"(odd) : "r"(pairs));
      const uint32_t values = pairs << 1 & 0xFEFEFEFEU;  // twice the value, signed
      const uint32_t evens = values & ~odd;
      const uint32_t odds = values & odd;
      a[row] = __byte_perm(evens, odds, 0x5410);
      a[row + 2] = __byte_perm(evens, odds, 0x7632);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = codes_of<Codes<kFormat, kBits>::kWidth>(words, step * 4 + i);
  }
}

template <bool kSigned>
__device__ inline void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int32_t (&c)[4]) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- groups ----

// Which scales a chunk needs: those of its 2 or 4 groups, its segments, or of the one that it lies in.
struct Groups {
  int segments;  // of a chunk: 4, 2 or 1
  int log;       // chunks of a group, of which a row has up to 2^31

  __host__ __device__ explicit Groups(int group) : segments(group == 32 || group == 64 ? kChunk / group : 1), log(0) {
    while (kChunk << log < group) ++log;
    if (group == 0) log = 31;
  }
  // The group of a chunk's segment.
  __host__ __device__ int of(int chunk, int segment) const {
    return static_cast<int>(static_cast<uint32_t>(chunk * segments + segment) >> log);
  }
};

__device__ inline float half_of(uint16_t bits, DType type) {
  return type == DType::kFloat16 ? __half2float(__ushort_as_half(bits))
                                 : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ inline uint16_t half_bits(float value, DType type) {
  return type == DType::kFloat16 ? __half_as_ushort(__float2half_rn(value))
                                 : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// What a scale is multiplied by, beside the token's power of two: see above.
template <LowbitFormat kFormat>
constexpr float kFactor = kFormat == LowbitFormat::kPlanes ? 1.0F : 0.5F;

// A segment's products of one plane, rows lane / 4 and lane / 4 + 8 of one token, times their scales; and clears them.
template <LowbitFormat kFormat>
__device__ inline void add_products(int32_t (&c)[4], const float (&scale)[2], const int (&twice_zero)[2], int sum,
                                    float (&y)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int total = 0;
    if constexpr (kFormat == LowbitFormat::kSparse12) {
      total = c[row * 2] * 256 + c[row * 2 + 1];
    } else {
      total = c[row * 2] * 512 + (c[row * 2 + 1] * 2 - twice_zero[row] * sum);
    }
    y[row] = __fmaf_rn(static_cast<float>(total), scale[row], y[row]);
    c[row * 2] = c[row * 2 + 1] = 0;
  }
}

// ---- outputs ----

template <class Part>
__device__ inline float sum_of_parts(Part part) {
  float total = 0.0F;
#pragma unroll
  for (int i = 0; i < kParts; i += 4) {
    const float four = __fadd_rn(__fadd_rn(__fadd_rn(part(i), part(i + 1)), part(i + 2)), part(i + 3));
    total = i == 0 ? four : __fadd_rn(total, four);
  }
  return total;
}

// What the epilogue adds to outputs side by side, if anything, as fp16 or bf16 bits; and multiplies by.
template <int kCount>
struct Addends {
  uint16_t bias[kCount] = {}, residual[kCount] = {};
  float x_scale = 1.0F;
};

struct Epilogue {
  ScaleView x_scale;
  const uint16_t* bias;
  Activation activation;
  const uint16_t* residual;
  int64_t residual_ld;
  uint16_t* out;
  int64_t ldo;
  bool whole_quads;  // 4 outputs can be written at once, and their addends read
  DType type;

  explicit Epilogue(const LowbitArgs& args)
      : x_scale(args.x_scale),
        bias(static_cast<const uint16_t*>(args.bias)),
        activation(args.activation),
        residual(static_cast<const uint16_t*>(args.residual)),
        residual_ld(args.residual_ld),
        out(static_cast<uint16_t*>(args.out)),
        ldo(args.n),
        whole_quads(args.n % 4 == 0 && args.residual_ld % 4 == 0 && aligned(args.out) && aligned(args.bias) &&
                    aligned(args.residual)),
        type(args.type) {}

  static bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 8 == 0; }

  // So that its first token is the one behind `tokens`.
  void skip(int tokens) {
    out += tokens * ldo;
    if (x_scale.data != nullptr) x_scale.data += tokens * x_scale.step;
    if (residual != nullptr) residual += tokens * residual_ld;
  }

  // Of outputs n to n + kCount - 1 of a token.
  template <int kCount>
  __device__ Addends<kCount> load(int token, int n) const {
    Addends<kCount> addends;
    addends.x_scale = scale_at(x_scale, token);
    if (bias != nullptr) load_row(bias + n, n, addends.bias);
    if (residual != nullptr) load_row(residual + token * residual_ld + n, n, addends.residual);
    return addends;
  }

  template <int kCount>
  __device__ void store(const float (&y)[kCount], const Addends<kCount>& addends, int token, int n) const {
    float t[kCount];
    uint16_t bits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      t[i] = __fmul_rn(y[i], addends.x_scale);
      if (bias != nullptr) t[i] += half_of(addends.bias[i], type);
    }
    if (activation != Activation::kNone) {
#pragma unroll 1
      for (int turn = 0; turn < kCount; ++turn) {  // its code is long: one at a time
        float first[1] = {t[0]};
        activate_by<__half, false>(activation, first);
#pragma unroll
        for (int i = 1; i < kCount; ++i) t[i - 1] = t[i];
        t[kCount - 1] = first[0];
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (residual != nullptr) t[i] += half_of(addends.residual[i], type);
      bits[i] = half_bits(t[i], type);
    }
    uint16_t* const to = out + token * ldo + n;
    if constexpr (kCount == 4) {
      if (whole_quads) {
        *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kCount == 1 || n + i < ldo) to[i] = bits[i];
    }
  }

 private:
  template <int kCount>
  __device__ void load_row(const uint16_t* from, int n, uint16_t (&to)[kCount]) const {
    if constexpr (kCount == 4) {
      if (whole_quads) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        to[0] = static_cast<uint16_t>(v.x);
        to[1] = static_cast<uint16_t>(v.x >> 16);
        to[2] = static_cast<uint16_t>(v.y);
        to[3] = static_cast<uint16_t>(v.y >> 16);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (kCount == 1 || n + i < ldo) to[i] = from[i];
    }
  }
};

}  // namespace octofuse::lowbit
