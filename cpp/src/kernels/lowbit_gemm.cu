// More than 4 tokens against low-bit weights on sm_90a. Four warpgroups share K, in two groups of 128 rows or four
// of 64. Each makes fp16 or bf16 weights of a chunk's codes in registers and multiplies them there by the tokens in
// shared memory (wgmma, fp32 sums) while it makes the next ones; other warps bring codes, scales, zeros and tokens into
// rings of stages (lowbit_ring.cuh). At the end the groups' sums meet in shared memory, with two blocks to the same
// rows in that of a cluster, and each block writes a part of the tokens.
//
// How K is shared depends on N and K alone, so a token's bits do not depend on the others.
//
// Measured on an H200 and left out: int8 products of both bytes of a token, as for few tokens (their sums have to be
// scaled for every chunk: twice as long at 64 tokens); clusters of 4 (they leave SMs empty); two blocks an SM.
#include "kernels/launch.h"
#include "kernels/lowbit_halves.cuh"
#include "kernels/lowbit_kernels.h"
#include "kernels/lowbit_ring.cuh"
#include "octofuse/device.h"

namespace octofuse::lowbit {
namespace {

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
#undef OCTOFUSE_MULTIPLY
#undef OCTOFUSE_MULTIPLY_AS

// ---- the warps that multiply ----

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
__device__ void multiply_chunks(const GemmArgs& args, int chunks, const char* ring, Barriers& barriers, Turn turn,
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
#pragma unroll 1
  for (int before = -1;;) {
    const uint32_t tokens = wgmma::low_descriptor(ring) + turn.slot * (static_cast<uint32_t>(args.places.stage) / 16);
    multiply<Kind>(tokens, 0, a[0], sums);
    cute::warpgroup_wait<1>();  // the chunk before this is done
    if (before >= 0) barriers.empty[before].arrive();
    operand.make(stage, 1, a[1]);
    multiply<Kind>(tokens, 1, a[1], sums);
    before = turn.slot;
    turn.next();
    if (--chunks == 0) break;
    stage = ring + turn.slot * args.places.stage;
    barriers.full[turn.slot].wait(turn.phase);
    operand.start(stage);
    cute::warpgroup_wait<1>();
    operand.make(stage, 0, a[0]);
  }
  cute::warpgroup_wait<0>();
#pragma unroll
  for (float& sum : sums) cute::warpgroup_fence_operand(sum);
}

// ---- the end ----

template <class Kind>
__device__ void store_sums(const float (&sums)[Kind::kValues], float* outputs) {
  const int thread = static_cast<int>(threadIdx.x) % Kind::kOfGroup;
#pragma unroll
  for (int i = 0; i < Kind::kValues; ++i) {
    const int token = i / 4 * 8 + thread % 4 * 2 + i % 2;
    outputs[token * Kind::kPitch + thread / 32 * kStrip + thread % 32 / 4 + i / 2 % 2 * 8] = sums[i];
  }
}

__device__ inline float load_from_block(uint32_t local, int block) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(value)
               : "r"(cute::set_block_rank(local, static_cast<uint32_t>(block)))
               : "memory");
  return value;
}

// The sum of an output's parts: of two neighbouring ones, of two such sums where there are four groups, of the blocks'.
// So two blocks of two groups give the bits of one with four.
template <class Kind>
__device__ float sum_of_parts(const GemmArgs& args, const float* outputs) {
  const uint32_t local = cute::cast_smem_ptr_to_uint(outputs);
  float sum = 0.0F;
  for (int block = 0; block < args.split; ++block) {
    float parts[Kind::kGroups];
#pragma unroll
    for (int i = 0; i < Kind::kGroups; ++i) parts[i] = load_from_block(local + i * Kind::kOutputs * 4, block);
#pragma unroll
    for (int apart = 1; apart < Kind::kGroups; apart *= 2) {
#pragma unroll
      for (int i = 0; i < Kind::kGroups; i += 2 * apart) parts[i] = __fadd_rn(parts[i], parts[i + apart]);
    }
    sum = block == 0 ? parts[0] : __fadd_rn(sum, parts[0]);
  }
  return sum;
}

// Every block of the cluster adds and writes a part of the tokens. Sums wait in the place of their first part, which
// nobody else reads, so that the loads of several overlap and the epilogue's code is there once.
template <class Kind>
__device__ void finish(const GemmArgs& args, float* outputs) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread % Kind::kRows;
  const int n = static_cast<int>(blockIdx.x) * Kind::kRows + row;
  const int token0 = first_token<Kind>(args);
  const int tokens = min(Kind::kTokens, args.m);
  if (n >= args.n) return;
  constexpr int kAtOnce = kSummers / Kind::kRows;
  const int step = kAtOnce * args.split;
  const int first = static_cast<int>(blockIdx.y) * kAtOnce + thread / Kind::kRows;
  float* const mine = outputs + row;
#pragma unroll 2
  for (int token = first; token < tokens; token += step) {
    float* const place = mine + token * Kind::kPitch;
    *place = sum_of_parts<Kind>(args, place);
  }
#pragma unroll 1
  for (int token = first; token < tokens; token += step) {
    const Addends addends = args.epilogue.load(token0 + token, n);
    args.epilogue.store(mine[token * Kind::kPitch], addends, token0 + token, n);
  }
}

template <class Kind>
__device__ void multiply_part(const GemmArgs& args, char* ring, Barriers& barriers) {
  constexpr int kWarpgroups = Kind::kOfGroup / 128;
  const int group = wgmma::warpgroup_of(static_cast<int>(threadIdx.x)) / kWarpgroups;
  const Part part(args, Kind::kGroups, static_cast<unsigned>(group));
  float sums[Kind::kValues];
  multiply_chunks<Kind>(args, part.end - part.first, ring, barriers, Turn(group, args.places.stages), sums);
  asm volatile("bar.sync 1, %0;" : : "n"(kSummers) : "memory");  // the ring is read
  store_sums<Kind>(sums, reinterpret_cast<float*>(ring) + group * Kind::kOutputs);
}

template <class Kind>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) char memory[];
  Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
  char* const ring = memory + kBarriers;
  const int thread = static_cast<int>(threadIdx.x);
  // The compiler knows this condition to be the same for a warp, and keeps descriptors in uniform registers.
  const bool brings = wgmma::warpgroup_of(thread) == kSummers / 128;
  const int warp = thread / 32 - kSummers / 32;
  // Of four warps: with four groups each brings all of one, with two either its weights or its tokens.
  const Feeder<Kind> feeder(args, barriers, ring, warp & (Kind::kGroups - 1));
  const bool of_weights = warp < Kind::kGroups;
  if (brings) {
    if (thread % 32 == 0 && of_weights) feeder.start();
    __syncwarp();
  }
  __syncthreads();
  let_later_kernels_start();
  if (brings) {
    if (thread % 32 == 0) feeder.run(of_weights, !of_weights || Kind::kGroups == 4);
    __syncwarp();
  } else {
    multiply_part<Kind>(args, ring, barriers);
    wait_for_earlier_kernels();  // nothing may have been brought
  }
  cute::cluster_arrive();
  cute::cluster_wait();
  if (!brings) finish<Kind>(args, reinterpret_cast<float*>(ring));
  __syncwarp();
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();  // until the others have read here
}

// ---- launch ----

template <class Kind>
void launch(const LowbitArgs& given, const Weight& w, int split, int device, cudaStream_t stream) {
  using wgmma::tensor_map;
  static DeviceFlags raised;
  const auto* function = reinterpret_cast<const void*>(gemm_kernel<Kind>);
  allow_shared_memory(function, kShared, device, raised);
  GemmArgs args{Epilogue(given), w.groups};
  args.m = given.m;
  args.n = given.n;
  args.chunks = w.chunks;
  args.planes = w.planes;
  args.split = split;
  args.tokens_read = std::min(given.m, Kind::kTokens);
  args.base = Levels<typename Kind::Code, Kind::kType>::kBase;
  args.has_zeros = w.zero != nullptr;
  args.constant_weight = given.constant_weight;
  args.places = places_of<Kind>(args);
  const Places& places = args.places;
  const int strips = (given.n + kStrip - 1) / kStrip;
  args.x = tensor_map({given.x, given.m, given.k, given.ldx * 2, 2, args.tokens_read, kChunk / kHalves, true});
  const int64_t strip = int64_t{w.chunks} * places.tile;
  args.codes = tensor_map({w.packed, strips, strip / 8, strip, 8, Kind::kStrips, places.tile / 8, false});
  const auto of_groups = [&](const void* data, int64_t rows, int bytes, int box_rows) {
    const int64_t pitch = (int64_t{bytes} * given.n + 15) / 16 * 16;  // of a single row it is never used
    return tensor_map({data, rows, given.n, pitch, bytes, box_rows, Kind::kRows, false});
  };
  const int64_t groups = w.last + 1;
  args.scales = of_groups(w.scale, groups * w.planes, 2, w.groups.segments * w.planes);
  if (args.has_zeros) args.zeros = of_groups(w.zero, groups, 1, w.groups.segments);
  const int shared = kBarriers + Kind::kGroups * std::max(places.stages * places.stage, Kind::kOutputs * 4);
  const auto rows = static_cast<unsigned>((given.n + Kind::kRows - 1) / Kind::kRows);
  const auto tiles = static_cast<unsigned>((given.m + Kind::kTokens - 1) / Kind::kTokens);
  const auto blocks = static_cast<unsigned>(split);
  launch_kernel("lowbit_gemm", function, dim3(rows, blocks, tiles), dim3(kThreads), shared, dim3(1, blocks),
                is_chained(stream, device), &args, stream);
}

// K's parts follow from N and K alone: 4, or 8 where that makes more blocks.
template <LowbitFormat kFormat, int kBits, DType kType>
void launch_tokens(const LowbitArgs& args, const Weight& w, int device, cudaStream_t stream) {
  const int split = args.n <= kFewRows && w.chunks >= 8 ? 2 : 1;
  if (args.m <= 32) return launch<Kind<kFormat, kBits, kType, 32, 64>>(args, w, split, device, stream);
  if (split == 2) return launch<Kind<kFormat, kBits, kType, 64, 64>>(args, w, split, device, stream);
  launch<Kind<kFormat, kBits, kType, 64, 128>>(args, w, 2, device, stream);
}

}  // namespace

bool takes_gemm(const LowbitArgs& args) {
  if (args.x_is_int8) return false;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  const Weight w(args);
  const bool one_row = w.last == 0 && w.planes == 1;
  const int apart = one_row ? 1 : args.zero != nullptr ? 16 : 8;  // TMA's rows start at multiples of 16 bytes
  return args.ldx % 8 == 0 && aligned(args.x) && aligned(args.scale) && aligned(args.zero) && args.n % apart == 0;
}

void run_gemm(const LowbitArgs& args, int device, cudaStream_t stream) {
  const Weight w(args);
  with_format(args, [&](auto format) {
    using Format = decltype(format);
    if (args.type == DType::kFloat16) {
      launch_tokens<Format::kFormat, Format::kBits, DType::kFloat16>(args, w, device, stream);
    } else {
      launch_tokens<Format::kFormat, Format::kBits, DType::kBFloat16>(args, w, device, stream);
    }
  });
}

}  // namespace octofuse::lowbit
