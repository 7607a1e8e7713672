// How the codes of a weight lie in its tiles, and the exact arithmetic of a few tokens against one tile.
//
// A tile has 16 output channels (a row tile) by 128 columns (a k-block). mma.sync m16n8k32 multiplies it in 4 steps of
// 32 columns: the codes are its 16 rows, as unsigned bytes (sparse12: signed); each token is two of its 8 columns, one
// of the high and one of the low bytes of the token's integers. A quad's lane t then has both sums of token t for two
// channels, and
//   total = 2 * (256 * high + low) - twice_zero * (the sum of the token's integers)
// is exact in int32 (510 * 128 * 32639 < 2^31). It stands for 2 * sum of (code - zero) * integer. So it is for planes,
// whose zero is one half and whose scale is halved, and for sparse12 without the factor 2, since its codes are stored
// as twice their value. What follows is fp32: the totals of all planes times their scales, and these times the token's
// power of two and kFactor.
//
// Sums over K come in an order of K alone: slice i of 16 adds k-blocks i, i + 16, ... in turn, of each its groups, of
// these its planes; four neighbouring slices are added in turn, then the four sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "lowbit/levels.h"
#include "lowbit/shape.h"
#include "octofuse/lowbit.h"

namespace octofuse::lowbit {

constexpr int kSteps = 4;          // products of 32 columns in a k-block
constexpr int kMostToken = 32639;  // 127 * 256 + 127: the largest sum of a high and a low byte

// ---- codes ----

// A kind of weight at compile time. kBits: of uniform codes; of planes, how many, 0: as Weight says at run time.
template <LowbitFormat kFormat_, int kBits_>
struct Codes {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kBits = kBits_;
  static constexpr bool kPlanes = kFormat == LowbitFormat::kPlanes;
  static constexpr bool kSparse = kFormat == LowbitFormat::kSparse12;
  static constexpr bool kCodebook = kFormat == LowbitFormat::kCodebook;
  static constexpr bool kFloat8 = kFormat == LowbitFormat::kFloat8;
  static constexpr int kWidth = width_of(kFormat, kBits);  // bits that a column takes in a tile (of a plane)
  static constexpr int kCount = planes_of(kFormat, kBits);
  static constexpr int kWords = 2 * kWidth;    // of a lane and plane
  static constexpr int kBytes = 256 * kWidth;  // of a plane of a tile
};

// Calls f(first word, offset in the tile, bytes) for each piece of a lane's words: 16 bytes at a time, and behind these
// 8 bytes of a field of one bit.
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

// The same, but a register's codes are those of four neighbouring columns, 4 * t to 4 * t + 3 of 16: what wgmma wants
// beside tokens whose columns lie in their own order. Two lanes of the quad have them, two bytes each.
template <int kWidth>
struct WordsInOrder {
  uint32_t of_two[2][2 * kWidth];

  __device__ void read(const char* tile, int lane) {
    const int first = (lane & ~3) + lane % 2 * 2;
    read_words<kWidth>(tile, first, of_two[0]);
    read_words<kWidth>(tile, first + 1, of_two[1]);
  }
  __device__ void put_in_order(int lane, uint32_t (&words)[2 * kWidth]) const {
    const uint32_t selector = lane % 4 < 2 ? 0x6420U : 0x7531U;
#pragma unroll
    for (int i = 0; i < 2 * kWidth; ++i) words[i] = __byte_perm(of_two[0][i], of_two[1][i], selector);
  }
};

// Where a field of `field` bits of register r lies: in which word of the field's, and how many bits up in each byte.
struct FieldPlace {
  int word, shift;

  __host__ __device__ constexpr FieldPlace(int field, int r) : word(0), shift(0) {
    const int step = r / 4;
    const int half = r / 2 % 2;
    const int at = field > 2 ? r : r % 2 * 8 + (field == 2 ? half * 4 + step : step * 2 + half);
    word = at * field / 8;
    shift = at * field % 8;
  }
};

// Register r of a lane's 16: four codes, one in each byte. r is known at compile time.
template <int kWidth>
__device__ inline uint32_t codes_of(const uint32_t (&words)[2 * kWidth], int r) {
  uint32_t codes = 0;
  int first = 0;
  int low = 0;
#pragma unroll
  for (int field = 8; field > 0; field /= 2) {
    if ((kWidth & field) == 0) continue;
    const FieldPlace place(field, r);
    const uint32_t word = words[first + place.word];
    const int shift = place.shift - low;
    const uint32_t mask = 0x01010101U * (((1U << field) - 1U) << low);
    codes |= (shift >= 0 ? word >> shift : word << -shift) & mask;
    first += 2 * field;
    low += field;
  }
  return codes;
}

// The first operand of a product of 32 columns: channels lane / 4 and lane / 4 + 8 over the first 16 columns, then over
// the other 16. A register has columns 2 * t, 2 * t + 8, 2 * t + 1 and 2 * t + 9 of these (t: lane % 4).
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
  } else if constexpr (Codes<kFormat, kBits>::kCodebook) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = i % 2 == 0 ? words[step * 2 + i / 2] : words[step * 2 + i / 2] >> 16;
      a[i] = (codes & 0x0F0FU) | (codes & 0xF0F0U) << 12;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = codes_of<Codes<kFormat, kBits>::kWidth>(words, step * 4 + i);
  }
}

// ---- float8 ----

// Numbers in e4m3, one in each byte, as fp16 or bf16: those of bytes 0 and 2, or of bytes 1 and 3. The bits stay and
// exponents are read with another bias, so that values are 2^-kFloat8Shift of what they should be, exactly: also those
// that are subnormal in either format.
template <DType kType>
constexpr int kFloat8Shift = kType == DType::kFloat16 ? 8 : 120;

template <DType kType>
__device__ inline uint32_t float8_pair(uint32_t codes, int byte) {
  constexpr uint32_t kSigns = 0x80008000U;
  constexpr bool kIsHalf = kType == DType::kFloat16;
  constexpr int kDown = kIsHalf ? 1 : 4;  // from below a byte's sign to the exponent's end and the mantissa
  constexpr uint32_t kRest = kIsHalf ? 0x3F803F80U : 0x07F007F0U;
  const uint32_t rest = byte == 0 ? codes << (8 - kDown) : codes >> kDown;
  return ((byte == 0 ? codes << 8 : codes) & kSigns) | (rest & kRest);
}

// Those of the two low bytes, as fp16.
__device__ inline uint32_t halves_of_e4m3(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return halves;
#else
  const uint32_t apart = float8_pair<DType::kFloat16>(__byte_perm(codes, 0, 0x1404), 1);
  const __half2 halves = __hmul2(reinterpret_cast<const __half2&>(apart), __float2half2_rn(0x1p8F));
  return reinterpret_cast<const uint32_t&>(halves);
#endif
}

// ---- codebooks ----

// The levels of both codes of every byte, in shared memory: high and low byte of the first one, then of the second.
// Each lane has a copy, so that no two ever meet in a bank, and a row is twice as long as 32 of these: then one byte
// permutation makes an offset of a byte of codes.
class LevelTable {
  static constexpr int kRow = 256;
  uint32_t table_;  // in shared memory
  uint32_t copy_;   // this lane's place in a row

 public:
  __device__ LevelTable(const char* memory, const IntegerLevels& /*levels*/, int lane)
      : table_(shared_address(memory)), copy_(static_cast<uint32_t>(lane * 4)) {}

  // By 16 warps.
  __device__ static void fill(char* memory, const IntegerLevels& levels) {
    const uint32_t first = levels.bytes[threadIdx.x / 32];
    char* const to = memory + threadIdx.x / 32 * kRow + threadIdx.x % 32 * 4;
#pragma unroll
    for (int second = 0; second < 16; ++second) {
      const uint32_t both = first | static_cast<uint32_t>(levels.bytes[second]) << 16;
      *reinterpret_cast<uint32_t*>(to + second * 16 * kRow) = __byte_perm(both, 0, 0x2301);
    }
    if (threadIdx.x < 64) reinterpret_cast<uint32_t*>(memory + kLevelZerosAt)[threadIdx.x] = 0;
  }

  // The first operand of a product of 16 columns, two bytes for each: of a word, whose low half has codes of channel
  // lane / 4, whose high half has those of channel lane / 4 + 8.
  __device__ void operand(uint32_t word, uint32_t (&a)[4]) const {
    constexpr uint32_t kSelectors[4] = {0x7604, 0x7624, 0x7614, 0x7634};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t offset = __byte_perm(word, copy_, kSelectors[i]);  // byte * 256 + copy
      asm("ld.shared.u32 %0, [%1];" : "=r"(a[i]) : "r"(table_ + offset));
    }
  }
};

// The levels' bytes in registers, as two parts each (levels.h) that have products of their own: less to read from
// shared memory than with the table, and more instructions.
class LevelBytes {
  uint32_t words_[4][2];

 public:
  static constexpr int kTables = 4;  // of eight bytes: two of high bytes, two of low ones

  __device__ LevelBytes(const char* /*memory*/, const IntegerLevels& levels, int /*lane*/) {
#pragma unroll
    for (int i = 0; i < kTables; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) words_[i][j] = levels.parts[i][j];
    }
  }

  // The parts of four codes: of the low half of a word.
  __device__ void look_up(uint32_t codes, uint32_t (&parts)[kTables]) const {
    const uint32_t others = codes ^ 0x8888U;
#pragma unroll
    for (int i = 0; i < kTables; ++i) {
      asm("prmt.b32 %0, %1, %2, %3;"
          : "=r"(parts[i])
          : "r"(words_[i][0]), "r"(words_[i][1]), "r"(i % 2 == 0 ? codes : others));
    }
  }
};

struct NoLevels {
  __device__ NoLevels(const char* /*memory*/, const IntegerLevels& /*levels*/, int /*lane*/) {}
};

// ---- groups ----

// Which scales a k-block needs: those of its 2 or 4 groups, its segments, or of the one group that it lies in.
struct Groups {
  int segments;  // of a k-block: 4, 2 or 1
  int log;       // k-blocks of a group, as a power of two; a row has fewer than 2^31

  __host__ __device__ explicit Groups(int group) : segments(segments_of(group)), log(0) {
    while (kBlockK << log < group) ++log;
    if (group == 0) log = 31;
  }
  // The group of a k-block's segment.
  __host__ __device__ int of(int k_block, int segment) const {
    return static_cast<int>(static_cast<uint32_t>(k_block * segments + segment) >> log);
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

// Sums of slices: of numbers in floating point with a rounding each, which the compiler must not move.
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline int32_t add(int32_t a, int32_t b) { return a + b; }
__device__ inline uint32_t add(uint32_t a, uint32_t b) { return a + b; }

// What a scale is multiplied by beside the token's power of two (see above).
template <LowbitFormat kFormat>
constexpr float kFactor = kFormat == LowbitFormat::kCodebook                                     ? 256.0F
                          : kFormat == LowbitFormat::kPlanes || kFormat == LowbitFormat::kFloat8 ? 1.0F
                                                                                                 : 0.5F;

// Adds a segment's products of one plane, of channels lane / 4 and lane / 4 + 8 and one token, times their scales, and
// clears them.
template <LowbitFormat kFormat>
__device__ inline void add_products(int32_t (&c)[4], const float (&scale)[2], const int (&twice_zero)[2], int sum,
                                    float (&y)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int total = 0;
    if constexpr (kFormat == LowbitFormat::kSparse12 || kFormat == LowbitFormat::kCodebook) {
      total = c[row * 2] * 256 + c[row * 2 + 1];
    } else {
      total = c[row * 2] * 512 + (c[row * 2 + 1] * 2 - twice_zero[row] * sum);
    }
    y[row] = __fmaf_rn(static_cast<float>(total), scale[row], y[row]);
    c[row * 2] = c[row * 2 + 1] = 0;
  }
}

// The same of products in floating point, whose odd columns are unused.
template <LowbitFormat kFormat>
__device__ inline void add_products(float (&c)[4], const float (&scale)[2], const int (& /*twice_zero*/)[2],
                                    int /*sum*/, float (&y)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) y[row] = __fmaf_rn(c[row * 2], scale[row], y[row]);
#pragma unroll
  for (float& sum : c) sum = 0.0F;
}

}  // namespace octofuse::lowbit
