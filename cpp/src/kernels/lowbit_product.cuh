// The warps of lowbit_gemm.cu that multiply: a chunk's weights made in registers, and the loop around them.
#pragma once

#include "kernels/lowbit_halves.cuh"
#include "kernels/lowbit_ring.cuh"

namespace octofuse::lowbit {

constexpr int kProducts = kSteps;  // of 16 columns, in half a chunk

// ---- products ----

// d[64, kTokens] += a[64, 16] * b[kTokens, 16]^T
template <DType kType, int kTokens>
struct Multiply;

#define OCTOFUSE_MULTIPLY_AS(TYPE, NAME, N)                                                                    \
  template <>                                                                                                  \
  struct Multiply<TYPE, N> {                                                                                   \
    template <size_t... i>                                                                                     \
    __device__ static void call(const uint32_t* a, uint64_t b, float (&d)[N / 2], std::index_sequence<i...>) { \
      using namespace cute::SM90::GMMA;                                                                        \
      MMA_64x##N##x16_F32##NAME##NAME##_RS<Major::K, Major::K>::fma(a[0], a[1], a[2], a[3], b, d[i]...);       \
    }                                                                                                          \
    __device__ static void run(const uint32_t* a, uint64_t b, float (&d)[N / 2]) {                             \
      call(a, b, d, std::make_index_sequence<N / 2>());                                                        \
    }                                                                                                          \
  }
#define OCTOFUSE_MULTIPLY(N)                     \
  OCTOFUSE_MULTIPLY_AS(DType::kFloat16, F16, N); \
  OCTOFUSE_MULTIPLY_AS(DType::kBFloat16, BF16, N)
OCTOFUSE_MULTIPLY(32);
OCTOFUSE_MULTIPLY(64);
OCTOFUSE_MULTIPLY(128);
#undef OCTOFUSE_MULTIPLY
#undef OCTOFUSE_MULTIPLY_AS

// The operand of a warp's 16 rows: half a chunk is 4 products of 16 columns.
template <class Kind>
class Operand {
  using Code = typename Kind::Code;
  const GemmArgs& args_;
  int lane_;
  int codes_, scales_, zeros_;  // where this lane's are in a stage: its strip's tile; its rows'
  uint32_t words_[Code::kPlanes ? 1 : Code::kWords];
  Levels<Code, Kind::kType> levels_;

 public:
  __device__ explicit Operand(const GemmArgs& args)
      : args_(args), lane_(static_cast<int>(threadIdx.x) % 32), levels_(args.base, args.has_zeros) {
    const int strip = static_cast<int>(threadIdx.x) % Kind::kOfGroup / 32;
    const int row = strip * kStrip + lane_ / 4;
    codes_ = args.places.codes + strip * args.places.tile;
    scales_ = args.places.scales + row * 2;
    zeros_ = args.places.zeros + row;
  }

  __device__ void start(const char* stage) {
    if constexpr (!Code::kPlanes) read_words<Code::kWidth>(stage + codes_, lane_, words_);
  }

  __device__ void make(const char* stage, int half, uint32_t (&a)[4 * kProducts]) {
    if constexpr (Code::kPlanes) {
      make_planes<true>(stage, half, args_.planes - 1, a);
#pragma unroll 1
      for (int plane = args_.planes - 2; plane >= 0; --plane) make_planes<false>(stage, half, plane, a);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = half * 2 + i;
        if (step == 0 || args_.groups.segments > 1) set_levels(stage, step);
        if constexpr (decltype(levels_)::kNibbles) {
#pragma unroll
          for (int j = 0; j < 2; ++j) levels_.of_nibbles(words_[step * 2 + j], a + i * 8 + j * 4);
          continue;
        }
        uint32_t codes[4];
        codes_of_step<Kind::kFormat, Code::kWidth>(words_, step, codes);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t* const to = a + i * 8 + j / 2 * 4 + j % 2;
          levels_.weights(j % 2, codes[j], to[0], to[2]);
        }
      }
    }
  }

 private:
  // Which of the chunk's.
  __device__ int group_of(int step) const {
    return static_cast<int>(static_cast<unsigned>(step * args_.groups.segments) / kSteps);
  }

  __device__ uint16_t scale(const char* stage, int group, int plane, int row) const {
    const char* const first = stage + scales_ + (group * args_.planes + plane) * Kind::kRows * 2;
    return *reinterpret_cast<const uint16_t*>(first + row * 16);
  }

  __device__ void set_levels(const char* stage, int step) {
    const int group = step == 0 ? 0 : group_of(step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      levels_.set_scale(i, scale(stage, group, 0, i));
      if (args_.has_zeros) levels_.set_zero(i, static_cast<uint8_t>(stage[zeros_ + group * Kind::kRows + i * 8]));
    }
  }

  template <bool kFirst>
  __device__ void make_planes(const char* stage, int half, int plane, uint32_t (&a)[4 * kProducts]) const {
    const char* const tile = stage + codes_ + plane * Code::kBytes;
    const uint2 words = *reinterpret_cast<const uint2*>(tile + lane_ * 8);
    uint32_t minus_alpha[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 || args_.groups.segments > 1) {
        const int group = group_of(half * 2 + i);
#pragma unroll
        for (int j = 0; j < 2; ++j) minus_alpha[j] = twice(scale(stage, group, plane, j)) ^ 0x80008000U;
      }
      add_plane<Kind::kType, kFirst>(words, half * 2 + i, minus_alpha, a + i * 8);
    }
  }
};

// Adds half a chunk's products to `sums`; they are under way afterwards. tokens: the chunk's, the descriptor's low
// half.
template <class Kind>
__device__ void multiply(uint32_t tokens, int half, uint32_t (&a)[4 * kProducts], float (&sums)[Kind::kValues]) {
#pragma unroll
  for (uint32_t& pair : a) cute::warpgroup_fence_operand(pair);  // all are there before the first product
  cute::warpgroup_arrive();
  tokens += half * (Kind::kTokenBytes / 16);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    Multiply<Kind::kType, Kind::kTokens>::run(a + 4 * i, wgmma::descriptor_of(tokens + 2 * i), sums);
  }
  cute::warpgroup_commit_batch();
}

// The sums of `chunks` chunks. One half of a chunk is multiplied while the next is made: the compiler lets them overlap
// in this form of the loop, where an operand for the next turn is made at the end of this one and nothing else touches
// sums.
template <class Kind>
__device__ void multiply_chunks(const GemmArgs& args, int chunks, const char* ring, Barriers& barriers, Turn& turn,
                                float (&sums)[Kind::kValues]) {
  Operand<Kind> operand(args);
  uint32_t a[kHalves][4 * kProducts];
#pragma unroll
  for (float& sum : sums) sum = 0.0F;
  if (chunks == 0) return;
#pragma unroll
  for (float& sum : sums) cute::warpgroup_fence_operand(sum);
  const char* stage = ring + turn.slot * args.places.stage;
  barriers.full[turn.slot].wait(turn.phase);
  operand.start(stage);
  operand.make(stage, 0, a[0]);
  int last = -1;  // slot before this one
#pragma unroll 1
  while (true) {
    const uint32_t tokens = wgmma::low_descriptor(ring) + turn.slot * (static_cast<uint32_t>(args.places.stage) / 16);
    multiply<Kind>(tokens, 0, a[0], sums);
    cute::warpgroup_wait<1>();  // the chunk before this is done
    if (last >= 0) barriers.empty[last].arrive();
    operand.make(stage, 1, a[1]);
    multiply<Kind>(tokens, 1, a[1], sums);
    last = turn.slot;
    turn.next();
    if (--chunks == 0) break;
    stage = ring + turn.slot * args.places.stage;
    barriers.full[turn.slot].wait(turn.phase);
    operand.start(stage);
    cute::warpgroup_wait<1>();
    operand.make(stage, 0, a[0]);
  }
  cute::warpgroup_wait<0>();
  if constexpr (Kind::kTurns > 1) barriers.empty[last].arrive();
#pragma unroll
  for (float& sum : sums) cute::warpgroup_fence_operand(sum);
}

}  // namespace octofuse::lowbit
