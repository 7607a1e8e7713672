// Codes of a tile, 16 rows by 128 columns, out of their packed words (python/octofuse/quant/packing.py), a byte each.
// Inside every 32 columns they stand as the words have them: byte t * 8 + h * 4 + b is column 16 * h + {2 * t,
// 2 * t + 8, 2 * t + 1, 2 * t + 9}[b], and activations are put into the same order once for a call.
#pragma once

#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "cpu/kernels.h"

namespace octofuse::cpu {
namespace {

// Eight words: those of t = 0 .. 3 with h = 0 and 1, the 32 bytes of one row and one step of 32 columns.
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint64_t Pairs __attribute__((vector_size(32)));

#if defined(__clang__) || __GNUC__ >= 12
#define OCTOFUSE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define OCTOFUSE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif

template <class Vector>
inline Vector load_vector(const void* at) {
  Vector vector;
  std::memcpy(&vector, at, sizeof(vector));
  return vector;
}

inline void column_order(int* order) {
  constexpr int kOf[] = {0, 8, 1, 9};
  for (int t = 0; t < 4; ++t) {
    for (int h = 0; h < 2; ++h) {
      for (int b = 0; b < 4; ++b) order[t * 8 + h * 4 + b] = 16 * h + 2 * t + kOf[b];
    }
  }
}

typedef uint8_t Bytes __attribute__((vector_size(32)));

// 32 of them in the order of their columns.
inline Bytes in_order(Bytes codes) {
  return OCTOFUSE_SHUFFLE(codes, codes, 0, 2, 8, 10, 16, 18, 24, 26, 1, 3, 9, 11, 17, 19, 25, 27, 4, 6, 12, 14, 20, 22,
                          28, 30, 5, 7, 13, 15, 21, 23, 29, 31);
}

// A field of `kBits` bits of a tile's codes: what lanes 4 * g .. 4 * g + 3 have of it, and rows' bytes out of that.
template <int kBits>
struct Field;

template <>
struct Field<8> {
  static constexpr int kBits = 8;
  Words of[4][2];  // [step][row g or g + 8]
  void load(const uint32_t* words, int g) {
    for (int s = 0; s < 4; ++s) {
      const auto a = load_vector<Words>(words + s * 128 + g * 16), b = load_vector<Words>(words + s * 128 + g * 16 + 8);
      of[s][0] = OCTOFUSE_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
      of[s][1] = OCTOFUSE_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
    }
  }
  Words codes(int s, int half) const { return of[s][half]; }
};

template <>
struct Field<4> {
  static constexpr int kBits = 4;
  Words of[4];
  void load(const uint32_t* words, int g) {
    for (int c = 0; c < 2; ++c) {
      const uint32_t* at = words + c * 128 + g * 16;
      const auto a = load_vector<Pairs>(at), b = load_vector<Pairs>(at + 8);
      of[2 * c] = reinterpret_cast<Words>(OCTOFUSE_SHUFFLE(a, b, 0, 2, 4, 6));
      of[2 * c + 1] = reinterpret_cast<Words>(OCTOFUSE_SHUFFLE(a, b, 1, 3, 5, 7));
    }
  }
  Words codes(int s, int half) const { return of[s] >> (4 * half) & 0x0F0F0F0F; }
};

template <>
struct Field<2> {
  static constexpr int kBits = 2;
  Words of[2];
  void load(const uint32_t* words, int g) {
    const auto a = load_vector<Pairs>(words + g * 16), b = load_vector<Pairs>(words + g * 16 + 8);
    of[0] = reinterpret_cast<Words>(OCTOFUSE_SHUFFLE(a, b, 0, 2, 4, 6));
    of[1] = reinterpret_cast<Words>(OCTOFUSE_SHUFFLE(a, b, 1, 3, 5, 7));
  }
  Words codes(int s, int half) const { return of[half] >> (2 * s) & 0x03030303; }
};

template <>
struct Field<1> {
  static constexpr int kBits = 1;
  Words of[2];
  void load(const uint32_t* words, int g) {
    const auto a = load_vector<Words>(words + g * 8);
    constexpr Words kSecond = {0, 1, 0, 1, 0, 1, 0, 1};
    of[0] = OCTOFUSE_SHUFFLE(a, a, 0, 0, 2, 2, 4, 4, 6, 6) >> kSecond;
    of[1] = OCTOFUSE_SHUFFLE(a, a, 1, 1, 3, 3, 5, 5, 7, 7) >> kSecond;
  }
  Words codes(int s, int half) const { return of[half] >> (2 * s) & 0x01010101; }
};

using Codes = uint8_t[kTileRows][kBlockK];

inline void store_codes(Words codes, uint8_t* row, int s) { std::memcpy(row + s * 32, &codes, 32); }

// Of a codebook: row g's codes are the low half of a word, row g + 8's the high one.
struct CodebookField : Field<4> {
  Words codes(int s, int half) const {
    const Words codes = of[s] >> (16 * half);
    return (codes & 0x0F0F) | (codes & 0xF0F0) << 12;
  }
};

// Codes out of these fields, the low bits first.
template <class... Fields>
void unpack_of(const uint32_t* words, Codes& codes) {
  for (int g = 0; g < 8; ++g) {
    std::tuple<Fields...> fields;
    int first = 0;
    std::apply(
        [&](auto&... field) {
          ((field.load(words + first, g), first += 64 * std::decay_t<decltype(field)>::kBits), ...);
        },
        fields);
    for (int half = 0; half < 2; ++half) {
      for (int s = 0; s < 4; ++s) {
        Words code{};
        int low = 0;
        std::apply(
            [&](const auto&... field) {
              ((code |= field.codes(s, half) << low, low += std::decay_t<decltype(field)>::kBits), ...);
            },
            fields);
        store_codes(code, codes[g + 8 * half], s);
      }
    }
  }
}

template <int... kWidths>
void unpack_fields(const uint32_t* words, Codes& codes) {
  unpack_of<Field<kWidths>...>(words, codes);
}

// Pairs: a byte for two columns, 7 bits of value and which of both it stands in; the other one gets the code of zero.
constexpr uint32_t kZeroOfPairs = 64;

inline void unpack_pairs(const uint32_t* words, Codes& codes) {
  constexpr Words kUpper = {0, 16, 0, 16, 0, 16, 0, 16};
  constexpr uint32_t kZero = kZeroOfPairs * 0x0101;
  for (int g = 0; g < 8; ++g) {
    for (int c = 0; c < 2; ++c) {
      const uint32_t* at = words + c * 128 + g * 16;
      const auto a = load_vector<Words>(at), b = load_vector<Words>(at + 8);
      const Words of[4] = {
          OCTOFUSE_SHUFFLE(a, b, 0, 0, 4, 4, 8, 8, 12, 12), OCTOFUSE_SHUFFLE(a, b, 1, 1, 5, 5, 9, 9, 13, 13),
          OCTOFUSE_SHUFFLE(a, b, 2, 2, 6, 6, 10, 10, 14, 14), OCTOFUSE_SHUFFLE(a, b, 3, 3, 7, 7, 11, 11, 15, 15)};
      for (int i = 0; i < 4; ++i) {
        const Words pairs = of[i] >> kUpper & 0xFFFF;
        const Words second = (pairs >> 7 & 0x0101) * 0xFF;  // bytes of ones where the second column is kept
        const Words value = (pairs & 0x7F7F) ^ kZero;       // -64 to 63 becomes 0 to 127
        const Words even = (value & ~second) | (kZero & second), odd = (value & second) | (kZero & ~second & 0xFFFF);
        store_codes((even & 0xFFFF) | odd << 16, codes[g + 8 * (i % 2)], 2 * c + i / 2);
      }
    }
  }
}

inline void unpack_tile(LowbitFormat format, int bits, const uint32_t* words, Codes& codes) {
  if (format == LowbitFormat::kSparse12) return unpack_pairs(words, codes);
  if (format == LowbitFormat::kCodebook) return unpack_of<CodebookField>(words, codes);
  const bool planes = format == LowbitFormat::kPlanes;
  switch (bits) {
    case 1:
      return unpack_fields<1>(words, codes);
    case 2:
      return planes ? unpack_fields<1, 1>(words, codes) : unpack_fields<2>(words, codes);
    case 3:
      return planes ? unpack_fields<1, 1, 1>(words, codes) : unpack_fields<2, 1>(words, codes);
    case 4:
      return planes ? unpack_fields<1, 1, 1, 1>(words, codes) : unpack_fields<4>(words, codes);
    case 5:
      return planes ? unpack_fields<1, 1, 1, 1, 1>(words, codes) : unpack_fields<4, 1>(words, codes);
    case 6:
      return planes ? unpack_fields<1, 1, 1, 1, 1, 1>(words, codes) : unpack_fields<4, 2>(words, codes);
    case 7:
      return planes ? unpack_fields<1, 1, 1, 1, 1, 1, 1>(words, codes) : unpack_fields<4, 2, 1>(words, codes);
    default:
      return planes ? unpack_fields<1, 1, 1, 1, 1, 1, 1, 1>(words, codes) : unpack_fields<8>(words, codes);
  }
}

}  // namespace
}  // namespace octofuse::cpu
