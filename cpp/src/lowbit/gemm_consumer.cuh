// The consumer warps: they dequantise a k-block's codes in registers and multiply them by the tokens there.
#pragma once

#include "lowbit/gemm_ring.cuh"
#include "lowbit/integers.cuh"
#include "lowbit/shape.h"

namespace octofuse::lowbit {

constexpr int kProducts = kSteps;  // of 16 columns, of int8 of 32: those of a run

template <class Traits>
constexpr int kOperandWords = Traits::kOperandRuns * 4 * kProducts;

// ---- products ----

// d[64, kTokens] += a[64, 16] * b[kTokens, 16]^T, of int8 with 32 columns
template <DType kType, int kTokens>
struct Multiply;

// INSTRUCTION: CuTe's, a template in `...`.
#define OCTOFUSE_MULTIPLY_AS(TYPE, SUM, N, INSTRUCTION, ...)                                                 \
  template <>                                                                                                \
  struct Multiply<TYPE, N> {                                                                                 \
    template <size_t... i>                                                                                   \
    __device__ static void call(const uint32_t* a, uint64_t b, SUM (&d)[N / 2], std::index_sequence<i...>) { \
      using cute::SM90::GMMA::Major;                                                                         \
      cute::SM90::GMMA::INSTRUCTION __VA_ARGS__::fma(a[0], a[1], a[2], a[3], b, d[i]...);                    \
    }                                                                                                        \
    __device__ static void run(const uint32_t* a, uint64_t b, SUM (&d)[N / 2]) {                             \
      call(a, b, d, std::make_index_sequence<N / 2>());                                                      \
    }                                                                                                        \
  }
#define OCTOFUSE_MULTIPLY(N)                                                                              \
  OCTOFUSE_MULTIPLY_AS(DType::kFloat16, float, N, MMA_64x##N##x16_F32F16F16_RS, <Major::K, Major::K>);    \
  OCTOFUSE_MULTIPLY_AS(DType::kBFloat16, float, N, MMA_64x##N##x16_F32BF16BF16_RS, <Major::K, Major::K>); \
  OCTOFUSE_MULTIPLY_AS(DType::kInt8, uint32_t, N, MMA_64x##N##x32_S32S8S8_RS_TN)
OCTOFUSE_MULTIPLY(16);
OCTOFUSE_MULTIPLY(32);
OCTOFUSE_MULTIPLY(48);
OCTOFUSE_MULTIPLY(64);
OCTOFUSE_MULTIPLY(96);
OCTOFUSE_MULTIPLY(112);
OCTOFUSE_MULTIPLY(128);
OCTOFUSE_MULTIPLY(144);
OCTOFUSE_MULTIPLY(160);
OCTOFUSE_MULTIPLY(176);
OCTOFUSE_MULTIPLY(192);
OCTOFUSE_MULTIPLY(208);
OCTOFUSE_MULTIPLY(224);
OCTOFUSE_MULTIPLY(256);
#undef OCTOFUSE_MULTIPLY
#undef OCTOFUSE_MULTIPLY_AS

// Where a warp's share of a stage lies: its row tile's codes, and this lane's channels. Of the first part; from part to
// part of 64 channels there are so many bytes.
template <class Traits>
struct OperandPlace {
  static constexpr int kToNextScales = 64 * 2, kToNextZeros = 64;
  int lane, codes, scales, zeros;
  int to_next_codes;

  __device__ explicit OperandPlace(const StageLayout& layout)
      : lane(static_cast<int>(threadIdx.x) % 32), to_next_codes(64 / kTileRows * layout.tile) {
    const int warp = static_cast<int>(threadIdx.x) % Traits::kGroupThreads / 32;
    const int row_tile = warp / 4 * (4 * Traits::kChannelParts) + warp % 4;
    const int channel = row_tile * kTileRows + lane / 4;
    codes = layout.codes + row_tile * layout.tile;
    scales = layout.scales + channel * 2;
    zeros = layout.zeros + channel;
  }
};

// Makes the first operand of a warp's 16 channels of a part: kOperandRuns at a time, 4 products each. start() requests
// the codes of a stage that has some. kPlain: GemmArgs::plain.
template <class Traits, bool kPlain>
class FloatOperand {
  using Code = typename Traits::Code;
  const GemmArgs& args_;
  const OperandPlace<Traits> at_;
  static constexpr bool kByRun = Traits::kStagesOfBlock == 2 && Traits::kCodesByRun;
  uint32_t words_[Code::kPlanes ? 1 : Code::kWords];
  int part_ = 0;
  Dequantizer<Code, Traits::kType, kPlain> dequantizer_;

 public:
  // table: a codebook's, in shared memory.
  __device__ FloatOperand(const GemmArgs& args, const char* table)
      : args_(args), at_(args.layout), dequantizer_(own_copy(args.base), args.twice_zero, table) {}

  __device__ void start(const char* stage, int part = 0) {
    part_ = part;
    if constexpr (kByRun) {
      uint32_t half[Code::kWidth];
      read_words<Code::kWidth / 2>(stage + codes(), at_.lane, half);
#pragma unroll
      for (int i = 0; i < Code::kWidth; ++i) words_[i] = half[i];
    } else if constexpr (!Code::kPlanes) {
      read_words<Code::kWidth>(stage + codes(), at_.lane, words_);
    }
  }

  // From `run` on.
  __device__ void make(const char* stage, int run, uint32_t (&a)[kOperandWords<Traits>]) {
#pragma unroll
    for (int i = 0; i < Traits::kOperandRuns; ++i) make_run(stage, run + i, a + i * (4 * kProducts));
  }

  __device__ void make_run(const char* stage, int run, uint32_t* a) {
    if constexpr (Code::kPlanes) {
      make_planes<true>(stage, run, args_.planes - 1, a);
#pragma unroll 1
      for (int plane = args_.planes - 2; plane >= 0; --plane) make_planes<false>(stage, run, plane, a);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = run * 2 + i;
        if (step == 0 || (!kPlain && args_.groups.segments > 1)) set_scales(stage, step);
        make_step(kByRun ? i : step, a + i * 8);
      }
    }
  }

 private:
  __device__ int codes() const { return at_.codes + part_ * at_.to_next_codes; }

  // The 8 registers of a step of 32 columns, of those whose codes were read.
  __device__ void make_step(int step, uint32_t* a) {
    constexpr CodesAs kTakes = decltype(dequantizer_)::kTakes;
    if constexpr (kTakes == CodesAs::kNibbles) {
#pragma unroll
      for (int j = 0; j < 2; ++j) dequantizer_.of_nibbles(words_[step * 2 + j], a + j * 4);
    } else if constexpr (kTakes == CodesAs::kFields) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const FieldPlace place(Code::kWidth, step * 4 + j);
        dequantizer_.of_fields(j % 2, words_[place.word], place.shift, a + j / 2 * 4 + j % 2);
      }
    } else {
      uint32_t codes[4];
      codes_of_step<Traits::kFormat, Code::kWidth>(words_, step, codes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t* const to = a + j / 2 * 4 + j % 2;
        dequantizer_.weights(j % 2, codes[j], to[0], to[2]);
      }
    }
  }

  // Which of the k-block's groups a step lies in.
  __device__ int group_of(int step) const {
    return static_cast<int>(static_cast<unsigned>(step * args_.groups.segments) / kSteps);
  }

  // Of channel lane / 4 (0) or lane / 4 + 8 (1).
  __device__ uint16_t scale(const char* stage, int group, int plane, int channel) const {
    const char* const first = stage + at_.scales + part_ * OperandPlace<Traits>::kToNextScales +
                              (group * args_.planes + plane) * Traits::kChannels * 2;
    return *reinterpret_cast<const uint16_t*>(first + channel * 16);
  }

  __device__ void set_scales(const char* stage, int step) {
    const int group = step == 0 ? 0 : group_of(step);
    const char* const zeros =
        stage + at_.zeros + part_ * OperandPlace<Traits>::kToNextZeros + group * Traits::kChannels;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dequantizer_.set_scale(i, scale(stage, group, 0, i));
      if (!kPlain && args_.has_zeros) dequantizer_.set_zero(i, static_cast<uint8_t>(zeros[i * 8]));
    }
  }

  template <bool kFirst>
  __device__ void make_planes(const char* stage, int run, int plane, uint32_t* a) const {
    const char* const tile = stage + codes() + plane * Code::kBytes;
    const uint2 words = *reinterpret_cast<const uint2*>(tile + at_.lane * 8);
    uint32_t minus_alpha[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || args_.groups.segments > 1) {
        const int group = group_of(run * 2 + i);
#pragma unroll
        for (int j = 0; j < 2; ++j) minus_alpha[j] = twice(scale(stage, group, plane, j)) ^ 0x80008000U;
      }
      add_plane<Traits::kType, kFirst>(words, run * 2 + i, minus_alpha, a + i * 8);
    }
  }
};

// The same of integers: a k-block has one run.
template <class Traits>
class IntegerOperand {
  using Code = typename Traits::Code;
  const int segments_;
  const OperandPlace<Traits> at_;
  WordsInOrder<Code::kWidth> words_;
  int part_ = 0;
  IntegerMaker<Code> maker_;

 public:
  __device__ IntegerOperand(const GemmArgs& args, const char* /*table*/)
      : segments_(args.groups.segments), at_(args.layout) {}

  __device__ void start(const char* stage, int part = 0) {
    part_ = part;
    words_.read(stage + at_.codes + part * at_.to_next_codes, at_.lane);
  }

  __device__ void make(const char* stage, int /*run*/, uint32_t (&a)[kOperandWords<Traits>]) {
    uint32_t words[Code::kWords];
    words_.put_in_order(at_.lane, words);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (Traits::kFormat == LowbitFormat::kTwoLevel) {
        if (step == 0 || segments_ > 1) set_groups(stage, step * segments_ / kSteps);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step * 4 + i] = maker_.integers(words, step * 4 + i);
    }
  }

 private:
  __device__ void set_groups(const char* stage, int group) {
    const char* const first =
        stage + at_.scales + part_ * OperandPlace<Traits>::kToNextScales + group * Traits::kChannels * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) maker_.set_group(i, *reinterpret_cast<const uint16_t*>(first + i * 16));
  }
};

template <class Traits, bool kPlain>
using Operand = std::conditional_t<Traits::kIntegers, IntegerOperand<Traits>, FloatOperand<Traits, kPlain>>;

// f(whether the weight is plain, an integral constant). A loop of their own is for those that have instructions to save
// in it, of common widths: 161 instead of 184 for a k-block of 4 bits.
template <class Traits, class F>
__device__ void with_plain(const GemmArgs& args, F f) {
  constexpr bool kGains = !Traits::kIntegers && Traits::kFormat != LowbitFormat::kPlanes &&
                          has_every_block(Traits::kFormat, Traits::Code::kWidth);
  if constexpr (kGains) {
    if (args.plain) return f(std::true_type());
  }
  f(std::false_type());
}

// f(each sum)
template <class Sum, int kSums, class F>
__device__ void for_each_sum(Sum (&sums)[kSums], F f) {
#pragma unroll
  for (Sum& sum : sums) f(sum);
}

// Starts the products of an operand, from `run` on, which add to `sums`. tokens: the descriptor of the stage's, to
// which 64 bits are added: for halves that are put together for each product ptxas takes an instruction more.
template <class Traits>
__device__ void multiply(uint64_t tokens, int run, uint32_t (&a)[kOperandWords<Traits>],
                         typename Traits::Sum (&sums)[Traits::kSums]) {
#pragma unroll
  for (uint32_t& pair : a) cute::warpgroup_fence_operand(pair);  // all are there before the first product
  cute::warpgroup_arrive();
  tokens += run * (Traits::kTokenBytes / 16);
#pragma unroll
  for (int i = 0; i < Traits::kOperandRuns * kProducts; ++i) {
    const int descriptor = i / kProducts * (Traits::kTokenBytes / 16) + i % kProducts * 2;
    Multiply<Traits::kType, Traits::kTokens>::run(a + 4 * i, tokens + descriptor, sums);
  }
  cute::warpgroup_commit_batch();
}

// Every warp fences its sums before products and behind them.
template <class... Sums>
__device__ void fence(Sums&... sums) {
  (for_each_sum(sums, [](auto& sum) { cute::warpgroup_fence_operand(sum); }), ...);
}

// Two stages a turn, each multiplied as one operand. stage: the first one, whose operand is made.
template <class Traits, bool kPlain>
__device__ void multiply_pairs(Operand<Traits, kPlain>& operand, OneRing<Traits>& ring, int turns, int stage,
                               uint32_t (&a)[2][kOperandWords<Traits>], typename Traits::Sum (&sums)[Traits::kSums]) {
  constexpr bool kAllHaveCodes = Traits::kStagesOfBlock == 1 || Traits::kCodesByRun;
  const auto take = [&](bool has_codes) {
    const int taken = ring.take();
    if (has_codes) operand.start(ring.memory(taken));
    return taken;
  };
  int second = -1;
#pragma unroll 1
  while (true) {
    const int last = second;  // the stage before
    if constexpr (Traits::kAsksAhead) second = take(kAllHaveCodes);
    multiply<Traits>(ring.tokens(stage), 0, a[0], sums);
    if constexpr (!Traits::kAsksAhead) second = take(kAllHaveCodes);
    cute::warpgroup_wait<1>();
    ring.release(last);
    operand.make(ring.memory(second), Traits::kStagesOfBlock - 1, a[1]);
    int next = -1;
    if (Traits::kAsksAhead && turns > 1) next = take(true);
    multiply<Traits>(ring.tokens(second), 0, a[1], sums);
    if (--turns == 0) break;
    if constexpr (!Traits::kAsksAhead) next = take(true);
    cute::warpgroup_wait<1>();
    ring.release(stage);
    stage = next;
    operand.make(ring.memory(stage), 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  ring.release(stage);
  ring.release(second);
}

// Two runs of a k-block a turn. stage: the first one's, of which the first run's operand is made.
template <class Traits, bool kPlain>
__device__ void multiply_runs(Operand<Traits, kPlain>& operand, OneRing<Traits>& ring, int k_blocks, int stage,
                              uint32_t (&a)[2][kOperandWords<Traits>], typename Traits::Sum (&sums)[Traits::kSums]) {
  int last = -1;  // the stage before
#pragma unroll 1
  while (true) {
    const uint64_t tokens = ring.tokens(stage);
    multiply<Traits>(tokens, 0, a[0], sums);
    cute::warpgroup_wait<1>();
    ring.release(last);
    operand.make(ring.memory(stage), 1, a[1]);
    multiply<Traits>(tokens, 1, a[1], sums);
    last = stage;
    if (--k_blocks == 0) break;
    stage = ring.take();
    operand.start(ring.memory(stage));
    cute::warpgroup_wait<1>();
    operand.make(ring.memory(stage), 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  ring.release(last);
}

// Adds the products of so many k-blocks to the sums. While the tensor cores multiply one run the warp makes the operand
// of the next: ptxas lets these overlap in this form of the loop alone, where the operand for the next turn is made at
// the end of this one and nothing else touches the sums (C7513 to C7515 otherwise). Where a turn has two k-blocks an
// odd one goes first.
template <class Traits, bool kPlain>
__device__ void multiply_tile(const GemmArgs& args, const char* table, OneRing<Traits>& ring, int k_blocks,
                              typename Traits::Sum (&sums)[Traits::kSums]) {
  if (k_blocks == 0) return;
  Operand<Traits, kPlain> operand(args, table);
  uint32_t a[2][kOperandWords<Traits>];
  fence(sums);
  const auto take = [&] {
    const int stage = ring.take();
    operand.start(ring.memory(stage));
    operand.make(ring.memory(stage), 0, a[0]);
    return stage;
  };
  int stage = take();
  if constexpr (Traits::kPairs && Traits::kStagesOfBlock == 1) {
    if (k_blocks % 2 == 1) {
      multiply<Traits>(ring.tokens(stage), 0, a[0], sums);
      cute::warpgroup_wait<0>();
      ring.release(stage);
      if (k_blocks == 1) return fence(sums);  // not a branch around the loop: in it ptxas would move descriptors again
      stage = take();
    }
    multiply_pairs<Traits, kPlain>(operand, ring, k_blocks / 2, stage, a, sums);
  } else if constexpr (Traits::kStagesOfBlock == 2) {
    multiply_pairs<Traits, kPlain>(operand, ring, k_blocks, stage, a, sums);
  } else {
    multiply_runs<Traits, kPlain>(operand, ring, k_blocks, stage, a, sums);
  }
  fence(sums);
}

}  // namespace octofuse::lowbit
