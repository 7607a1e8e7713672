// Linears with weights of few bits, a row tile of 16 channels at a time. Codes are unpacked into the first-level cache
// and become floats in registers, for one token, or in the cache, for more:
//   uniform, sparse12: code - zero, exactly; a group's sum is multiplied by its scale
//   codebook, float8: the level, or the number, likewise
//   planes: a table of the sums of up to three planes' scales, which a code's bits look up
// A token's sums run along K in one order, whatever the other tokens are.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/dot.h"
#include "cpu/epilogue.h"
#include "cpu/floats.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/lowbit_codes.h"

namespace octofuse::cpu {
namespace {

constexpr int kTables = 3;  // of 8 sums: up to 8 planes
// Tiles are asked for before they are needed: the caches' own prefetching stops at every page.
constexpr int64_t kTilesAhead = 2;

// What a row of a tile needs of its group: uniform codes scale and zero, planes their tables.
struct Group {
  float scale[kTileRows];
  float zero[kTileRows];
  float tables[kTileRows][kTables][8];
  const float* levels;  // of a codebook
};

constexpr int64_t words_of_tile(LowbitFormat format, int bits) {
  return (format == LowbitFormat::kSparse12 ? 4 : bits) * kTileRows * kBlockK / 32;
}

// Values of 16 channels from n0 on, of a row of [.., n]; beyond n zeros.
inline void load_channels(const void* array, DType type, int64_t row, int64_t n, int64_t n0, float* to) {
  const int64_t count = least(kTileRows, n - n0);
  load_floats(array, type, row * n + n0, count, to);
  for (int64_t i = count; i < kTileRows; ++i) to[i] = 0.0F;
}

inline void load_planes(const LowbitArgs& args, int64_t group, int64_t n0, Group& found) {
  for (int table = 0; table * 3 < args.bits; ++table) {
    const int planes = static_cast<int>(least(3, args.bits - table * 3));
    float alpha[3][kTileRows] = {};
    for (int p = 0; p < planes; ++p) {
      load_channels(args.scale, args.type, group * args.bits + table * 3 + p, args.n, n0, alpha[p]);
    }
    for (int r = 0; r < kTileRows; ++r) {
      for (int code = 0; code < 8; ++code) {
        const float a = (code & 1) != 0 ? alpha[0][r] : -alpha[0][r];
        const float b = (code & 2) != 0 ? alpha[1][r] : -alpha[1][r];
        const float c = (code & 4) != 0 ? alpha[2][r] : -alpha[2][r];
        found.tables[r][table][code] = (a + b) + c;
      }
    }
  }
}

inline void load_group(const LowbitArgs& args, int64_t group, int64_t n0, Group& found) {
  if (args.format == LowbitFormat::kPlanes) return load_planes(args, group, n0, found);
  load_channels(args.scale, args.type, group, args.n, n0, found.scale);
  found.levels = args.levels.data();
  if (args.zero != nullptr) {
    const int64_t count = least(kTileRows, args.n - n0);
    for (int64_t i = 0; i < count; ++i) found.zero[i] = static_cast<float>(args.zero[group * args.n + n0 + i]);
    for (int64_t i = count; i < kTileRows; ++i) found.zero[i] = 0.0F;
    return;
  }
  const bool pairs = args.format == LowbitFormat::kSparse12;
  const float of_all = static_cast<float>(pairs ? 2 * kZeroOfPairs : args.twice_zero) / 2.0F;
  for (float& zero : found.zero) zero = of_all;
}

constexpr int kOfCodebook = -1;
constexpr int kOfFloat8 = -2;

// Eight weights of row r; kPlaneTables of planes. Those of codes on a grid (0), of a codebook and of float8 get their
// scale later.
template <int kPlaneTables>
inline Lanes weights(const Group& group, int r, const uint8_t* codes) {
  if constexpr (kPlaneTables == kOfCodebook) {
    return Lanes::look_up_16(group.levels, codes);
  } else if constexpr (kPlaneTables == kOfFloat8) {
    return Lanes::load_e4m3(codes);
  } else if constexpr (kPlaneTables == 0) {
    return Lanes::load_bytes(codes) - Lanes::all(group.zero[r]);
  } else {
    Lanes sum = Lanes::look_up(group.tables[r][0], codes, 0);
    if constexpr (kPlaneTables > 1) sum = sum + Lanes::look_up(group.tables[r][1], codes, 3);
    if constexpr (kPlaneTables > 2) sum = sum + Lanes::look_up(group.tables[r][2], codes, 6);
    return sum;
  }
}

// Sums of kRows rows by kTokens tokens over the columns of a segment, each with its row's scale onto `sums`.
// load(r, i): eight weights of row r, from column 8 * i of the segment on.
template <int kRows, int kTokens, bool kScaled, class Load>
inline void multiply_segment(int columns, const float* x, int64_t ldx, const float* scale, const Load& load,
                             float (*sums)[kTileRows][8], int r0) {
  Lanes acc[kTokens][kRows];
  OCTOFUSE_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    OCTOFUSE_UNROLL
    for (int r = 0; r < kRows; ++r) acc[t][r] = Lanes::all(0.0F);
  }
  for (int i = 0; i < columns / 8; ++i) {
    Lanes tokens[kTokens];
    OCTOFUSE_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      tokens[t] = Lanes::load(x + t * ldx + i * 8);
      keep(tokens[t]);
    }
    OCTOFUSE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      Lanes w = load(r0 + r, i);
      keep(w);
      OCTOFUSE_UNROLL
      for (int t = 0; t < kTokens; ++t) acc[t][r] = Lanes::multiply_add(w, tokens[t], acc[t][r]);
    }
  }
  OCTOFUSE_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    OCTOFUSE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float* at = sums[t][r0 + r];
      const Lanes before = Lanes::load(at);
      const Lanes after =
          kScaled ? Lanes::multiply_add(acc[t][r], Lanes::all(scale[r0 + r]), before) : acc[t][r] + before;
      after.store(at);
    }
  }
}

// One segment, a part of a k-block with one scale a row, for all tokens.
template <int kPlaneTables>
inline void multiply_tokens(const Group& group, const Codes& codes, int first, int columns, const float* x, int64_t ldx,
                            int64_t tokens, float (*sums)[kTileRows][8]) {
  constexpr bool kScaled = kPlaneTables <= 0;
  if (tokens == 1) {
    const auto load = [&](int r, int i) { return weights<kPlaneTables>(group, r, codes[r] + first + i * 8); };
    for (int r = 0; r < kTileRows; r += 4) {
      multiply_segment<4, 1, kScaled>(columns, x + first, ldx, group.scale, load, sums, r);
    }
    return;
  }
  alignas(32) float values[kTileRows][kBlockK];
  for (int r = 0; r < kTileRows; ++r) {
    for (int i = 0; i < columns; i += 8) weights<kPlaneTables>(group, r, codes[r] + first + i).store(values[r] + i);
  }
  const auto load = [&](int r, int i) { return Lanes::load(values[r] + i * 8); };
  int64_t t = 0;
  for (; t + 3 <= tokens; t += 3) {
    for (int r = 0; r < kTileRows; r += 4) {
      multiply_segment<4, 3, kScaled>(columns, x + t * ldx + first, ldx, group.scale, load, sums + t, r);
    }
  }
  for (; t < tokens; ++t) {
    for (int r = 0; r < kTileRows; r += 4) {
      multiply_segment<4, 1, kScaled>(columns, x + t * ldx + first, ldx, group.scale, load, sums + t, r);
    }
  }
}

// A row tile of a weight that is integers (has_integers()), [16][ld]; ld: whole k-blocks. Behind the last column stand
// what the packing's zeros stand for: no token has anything there.
inline void integers_of_tile(const LowbitArgs& args, int64_t tile, int8_t* to, int64_t ld) {
  const int64_t blocks = ld / kBlockK, words = words_of_tile(args.format, args.bits);
  const bool two_levels = args.format == LowbitFormat::kTwoLevel;
  const int64_t width = args.group == 0 ? args.k : args.group, last = (args.k - 1) / width;
  alignas(64) Codes codes;
  for (int64_t block = 0; block < blocks; ++block) {
    unpack_tile(args.format, args.bits, args.packed + (tile * blocks + block) * words, codes);
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t n = least(tile * kTileRows + r, args.n - 1);
      for (int s = 0; s < kBlockK / 32; ++s) {
        const int64_t k = block * kBlockK + s * 32;
        uint32_t scale = 1, zero = static_cast<uint32_t>(args.twice_zero) / 2;
        if (two_levels) {
          const uint16_t pair = args.group_scale[least(k / width, last) * args.n + n];
          scale = pair & 0xFF;
          zero = pair >> 8;
        }
        const Bytes integers = (in_order(load_vector<Bytes>(codes[r] + s * 32)) - static_cast<uint8_t>(zero)) *
                               static_cast<uint8_t>(scale);
        std::memcpy(to + r * ld + k, &integers, sizeof(integers));
      }
    }
  }
}

inline int64_t columns_of_group(const LowbitArgs& args) { return args.group == 0 ? args.k : args.group; }

// segment(group, codes, k, first, columns): every part of a row tile whose weights share a group; its columns are
// `first` and those behind it of the k-block at k.
template <class Segment>
inline void walk_tile(const LowbitArgs& args, int64_t tile, const Segment& segment) {
  const int64_t blocks = (args.k + kBlockK - 1) / kBlockK, words = words_of_tile(args.format, args.bits);
  const int64_t width = columns_of_group(args);
  alignas(64) Codes codes;
  Group group;
  int64_t loaded = -1;
  for (int64_t block = 0; block < blocks; ++block) {
    const uint32_t* at = args.packed + (tile * blocks + block) * words;
    for (int64_t i = 0; i < words; i += 16) __builtin_prefetch(at + kTilesAhead * words + i);
    unpack_tile(args.format, args.bits, at, codes);
    const int64_t k = block * kBlockK, end = least(kBlockK, (args.k - k + 31) / 32 * 32);
    for (int64_t first = 0; first < end;) {
      const int64_t here = (k + first) / width;
      if (here != loaded) load_group(args, loaded = here, tile * kTileRows, group);
      const int64_t columns = least(end - first, args.group == 0 ? end : (here + 1) * width - (k + first));
      segment(group, codes, k, static_cast<int>(first), static_cast<int>(columns));
      first += columns;
    }
  }
}

template <int kPlaneTables>
inline void lowbit_by(const LowbitArgs& args, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t tile) {
  alignas(32) float sums[kLowbitTokens][kTileRows][8];
  const int64_t tokens = m1 - m0;
  std::memset(sums, 0, static_cast<size_t>(tokens) * sizeof(sums[0]));
  walk_tile(args, tile, [&](const Group& group, const Codes& codes, int64_t k, int first, int columns) {
    multiply_tokens<kPlaneTables>(group, codes, first, columns, x + m0 * ldx + k, ldx, tokens, sums);
  });
  const int64_t n0 = tile * kTileRows, count = least(kTileRows, args.n - n0);
  const Output out{args.out, args.n, args.out_type};
  for (int64_t t = 0; t < tokens; ++t) {
    float values[kTileRows];
    for (int r = 0; r < kTileRows; ++r) values[r] = sum_of(Lanes::load(sums[t][r]));
    if (args.x_is_int8) {
      const float x_scale = scale_at(args.epilogue.x_scale, m0 + t);
      for (float& value : values) value = value * x_scale;
    }
    finish_floats(args.epilogue, out, m0 + t, n0, count, values);
  }
}

inline int plane_tables(const LowbitArgs& args) {
  if (args.format == LowbitFormat::kCodebook) return kOfCodebook;
  if (args.format == LowbitFormat::kFloat8) return kOfFloat8;
  return args.format == LowbitFormat::kPlanes ? (args.bits + 2) / 3 : 0;
}

inline void lowbit_tile(const LowbitArgs& args, const float* x, int64_t ldx, int64_t m0, int64_t m1, int64_t tile) {
  switch (plane_tables(args)) {
    case kOfFloat8:
      return lowbit_by<kOfFloat8>(args, x, ldx, m0, m1, tile);
    case kOfCodebook:
      return lowbit_by<kOfCodebook>(args, x, ldx, m0, m1, tile);
    case 0:
      return lowbit_by<0>(args, x, ldx, m0, m1, tile);
    case 1:
      return lowbit_by<1>(args, x, ldx, m0, m1, tile);
    case 2:
      return lowbit_by<2>(args, x, ldx, m0, m1, tile);
    default:
      return lowbit_by<3>(args, x, ldx, m0, m1, tile);
  }
}

inline void permute_row(const void* x, DType type, int64_t k, float* permuted, int64_t ld) {
  int order[32];
  column_order(order);
  for (int64_t block = 0; block < ld; block += 32) {
    float values[32] = {};
    const int64_t count = least(32, k - block);
    if (count > 0) load_floats(x, type, block, count, values);
    for (int i = 0; i < 32; ++i) permuted[block + i] = values[order[i]];
  }
}

}  // namespace
}  // namespace octofuse::cpu
