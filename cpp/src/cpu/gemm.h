// The int8 product. Rows of x and w lie along K, and a step multiplies kStep columns of both; four channels' sums are
// added up together at the end of K.
//
// Few tokens read the weight as it lies, once. More tokens go through panels: 16 channels by kPanelK columns, widened
// once into the first-level cache, with which all tokens of the block are multiplied.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/dot.h"
#include "cpu/epilogue.h"
#include "cpu/kernels.h"

namespace octofuse::cpu {
namespace {

constexpr int kChannels = 4;  // that one step multiplies
constexpr int kPanelChannels = 16;
constexpr int kPanelK = 512;
static_assert(kPanelK % Dot::kStep == 0 && kGemmChannels % kPanelChannels == 0);

inline void prepare_row(const int8_t* x, int64_t k, int64_t ld, void* prepared, int32_t* sum) {
  auto* to = static_cast<Dot::X*>(prepared);
  for (int64_t i = 0; i < k; ++i) to[i] = static_cast<Dot::X>(x[i]);
  for (int64_t i = k; i < ld; ++i) to[i] = 0;
  if (Dot::kShifted) {
    int32_t total = 0;
    for (int64_t i = 0; i < k; ++i) total += x[i];
    *sum = total;
  }
}

// sums[i][j] of kTokens tokens by kChannels channels, added to what is there or written.
template <int kTokens, class LoadW>
inline void multiply_steps(int64_t steps, const Dot::X* x, int64_t ldx, const LoadW& load_w, int32_t* sums,
                           int64_t ld_sums, bool add) {
  Dot::Sum acc[kTokens][kChannels];
  OCTOFUSE_UNROLL
  for (int i = 0; i < kTokens; ++i) {
    OCTOFUSE_UNROLL
    for (int j = 0; j < kChannels; ++j) acc[i][j] = Dot::zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    decltype(Dot::load(x)) tokens[kTokens];
    OCTOFUSE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      tokens[i] = Dot::load(x + i * ldx + s * Dot::kStep);
      keep(tokens[i]);
    }
    OCTOFUSE_UNROLL
    for (int j = 0; j < kChannels; ++j) {
      const auto w = load_w(j, s);
      OCTOFUSE_UNROLL
      for (int i = 0; i < kTokens; ++i) acc[i][j] = Dot::multiply(acc[i][j], w, tokens[i]);
    }
  }
  OCTOFUSE_UNROLL
  for (int i = 0; i < kTokens; ++i) {
    int32_t found[kChannels];
    Dot::store_sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3], found);
    OCTOFUSE_UNROLL
    for (int j = 0; j < kChannels; ++j) {
      const uint32_t before = add ? static_cast<uint32_t>(sums[i * ld_sums + j]) : 0;
      sums[i * ld_sums + j] = static_cast<int32_t>(before + static_cast<uint32_t>(found[j]));
    }
  }
}

// A few tokens by `count` channels from n0 on, the weight read once, and in the order in which it lies: memory answers
// one stream three times as fast as four rows in turn.
template <int kTokens>
inline void multiply_few(const GemmArgs& args, const Dot::X* x, int64_t ldx, int64_t n0, int64_t count, int32_t* sums) {
  const int64_t steps = args.k / Dot::kStep, rest = args.k % Dot::kStep;
  for (int64_t j0 = 0; j0 < count; j0 += kChannels) {
    Dot::Sum acc[kTokens][kChannels];
    OCTOFUSE_UNROLL
    for (int j = 0; j < kChannels; ++j) {
      OCTOFUSE_UNROLL
      for (int i = 0; i < kTokens; ++i) acc[i][j] = Dot::zero();
      const auto add = [&](const int8_t* at, int64_t s) {
        const auto w = Dot::widen(at);
        OCTOFUSE_UNROLL
        for (int i = 0; i < kTokens; ++i)
          acc[i][j] = Dot::multiply(acc[i][j], w, Dot::load(x + i * ldx + s * Dot::kStep));
      };
      // Channels beyond the last are the last one again, and nobody reads their sums.
      const int8_t* w = args.w + least(n0 + j0 + j, args.n - 1) * args.ldw;
      for (int64_t s = 0; s < steps; ++s) add(w + s * Dot::kStep, s);
      if (rest != 0) {
        int8_t tail[Dot::kStep] = {};
        std::memcpy(tail, w + steps * Dot::kStep, static_cast<size_t>(rest));
        add(tail, steps);
      }
    }
    OCTOFUSE_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      Dot::store_sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3], sums + i * kGemmChannels + j0);
    }
  }
}

// Columns [k0, k0 + columns) of 16 channels from n0 on, as the product reads them, with zeros behind.
inline void widen_panel(const GemmArgs& args, int64_t n0, int64_t k0, int64_t columns, int64_t ld, Dot::W* panel) {
  constexpr int kShift = Dot::kShifted ? 128 : 0;
  for (int j = 0; j < kPanelChannels; ++j) {
    const int8_t* w = args.w + least(n0 + j, args.n - 1) * args.ldw + k0;
    Dot::W* to = panel + j * ld;
    for (int64_t i = 0; i < columns; ++i) to[i] = static_cast<Dot::W>(w[i] + kShift);
    for (int64_t i = columns; i < ld; ++i) to[i] = 0;
  }
}

template <int kTokens>
inline void multiply_panel(const Dot::W* panel, int64_t ld, const Dot::X* x, int64_t ldx, int64_t channels,
                           int32_t* sums, bool add) {
  for (int64_t j0 = 0; j0 < channels; j0 += kChannels) {
    const Dot::W* w = panel + j0 * ld;
    const auto load = [&](int j, int64_t s) { return Dot::load(w + j * ld + s * Dot::kStep); };
    multiply_steps<kTokens>(ld / Dot::kStep, x, ldx, load, sums + j0, kGemmChannels, add);
  }
}

inline void multiply_many(const GemmArgs& args, const Dot::X* x, int64_t ldx, int64_t tokens, int64_t n0, int64_t count,
                          int32_t* sums) {
  alignas(64) Dot::W panel[kPanelChannels * kPanelK];
  for (int64_t j0 = 0; j0 < count; j0 += kPanelChannels) {
    const int64_t channels = least(kPanelChannels, count - j0);
    for (int64_t k0 = 0; k0 < args.k; k0 += kPanelK) {
      const int64_t columns = least(kPanelK, args.k - k0);
      const int64_t ld = (columns + Dot::kStep - 1) / Dot::kStep * Dot::kStep;
      widen_panel(args, n0 + j0, k0, columns, ld, panel);
      int64_t i = 0;
      for (; i + Dot::kTokens <= tokens; i += Dot::kTokens) {
        multiply_panel<Dot::kTokens>(panel, ld, x + i * ldx + k0, ldx, channels, sums + i * kGemmChannels + j0, k0 > 0);
      }
      for (; i < tokens; ++i) {
        multiply_panel<1>(panel, ld, x + i * ldx + k0, ldx, channels, sums + i * kGemmChannels + j0, k0 > 0);
      }
    }
  }
}

inline void gemm_block(const GemmArgs& args, const PreparedX& prepared, int64_t m0, int64_t m1, int64_t n0,
                       int64_t n1) {
  alignas(64) int32_t sums[kGemmTokens * kGemmChannels];
  const Dot::X* x = static_cast<const Dot::X*>(prepared.data) + m0 * prepared.ld;
  const int64_t tokens = m1 - m0, count = n1 - n0;
  switch (tokens) {
    case 1:
      multiply_few<1>(args, x, prepared.ld, n0, count, sums);
      break;
    case 2:
      multiply_few<2>(args, x, prepared.ld, n0, count, sums);
      break;
    case 3:
      multiply_few<3>(args, x, prepared.ld, n0, count, sums);
      break;
    default:
      multiply_many(args, x, prepared.ld, tokens, n0, count, sums);
  }
  const Output out{args.out, args.ldo, args.out_type};
  for (int64_t i = 0; i < tokens; ++i) {
    int32_t* row = sums + i * kGemmChannels;
    if (Dot::kShifted) {
      const uint32_t shift = 128U * static_cast<uint32_t>(prepared.sums[m0 + i]);
      for (int64_t j = 0; j < count; ++j) row[j] = static_cast<int32_t>(static_cast<uint32_t>(row[j]) - shift);
    }
    finish_sums(args.epilogue, out, m0 + i, n0, count, row);
  }
}

}  // namespace
}  // namespace octofuse::cpu
