// More than 4 tokens against low-bit weights on sm_90a. A block has 64, 128 or 192 rows and 32, 64 or 128 tokens
// (lowbit_shape.h), a warpgroup 64 rows of it; where there are more warpgroups than rows need they share K, and where
// there are fewer than K's parts (their sums of 128 tokens take too many registers) they take two each. They make fp16
// or bf16 weights of a chunk's codes in registers and multiply them there by the tokens in shared memory (wgmma, fp32
// sums) while they make the next ones (lowbit_product.cuh); other warps bring codes, scales, zeros and tokens into
// rings of stages (lowbit_ring.cuh). At the end the parts' sums meet in shared memory and in that of a cluster, and
// each block writes some of the tokens.
//
// How K is shared depends on N and K alone, so a token's bits do not depend on the others.
//
// Measured on an H200 and left out: int8 products of both bytes of a token, as for few tokens (their sums have to be
// scaled for every chunk: twice as long at 64 tokens); two blocks an SM.
#include "cutlass/arch/reg_reconfig.h"
#include "kernels/launch.h"
#include "kernels/lowbit_kernels.h"
#include "kernels/lowbit_product.cuh"
#include "kernels/lowbit_shape.h"
#include "octofuse/device.h"

namespace octofuse::lowbit {
namespace {

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

// The sum of kCount numbers (but those from `count` on): of neighbours, of neighbouring sums, ... So parts give the
// same bits in whichever groups and blocks they are.
template <int kCount>
__device__ inline float4 sum_of(float4 (&v)[kCount], int count) {
#pragma unroll
  for (int apart = 1; apart < kCount; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * apart) {
      if (i + apart >= count) continue;
      const float4& other = v[i + apart];
      v[i] = make_float4(__fadd_rn(v[i].x, other.x), __fadd_rn(v[i].y, other.y), __fadd_rn(v[i].z, other.z),
                         __fadd_rn(v[i].w, other.w));
    }
  }
  return v[0];
}

// Outputs as a thread has them: 4 rows of a token, then of one some tokens further on.
template <class Kind>
struct Quad {
  static constexpr int kOfToken = Kind::kRows / 4;
  static constexpr int kStep = Kind::kSummers / kOfToken;
  int token, row;

  __device__ Quad()
      : token(static_cast<int>(threadIdx.x) / kOfToken), row(static_cast<int>(threadIdx.x) % kOfToken * 4) {}
  __device__ int at(int of_token) const { return of_token * Kind::kPitch + row; }
};

// The groups' sums become the first one's.
template <class Kind>
__device__ void add_groups(const GemmArgs& args, float* outputs) {
  if constexpr (Kind::kGroups > 1) {
    asm volatile("bar.sync 1, %0;" : : "n"(Kind::kSummers) : "memory");
    Quad<Kind> quad;
#pragma unroll 1
    for (int token = quad.token; token < min(Kind::kTokens, args.m); token += Quad<Kind>::kStep) {
      float4 v[Kind::kGroups];
#pragma unroll
      for (int i = 0; i < Kind::kGroups; ++i) {
        v[i] = *reinterpret_cast<const float4*>(outputs + i * Kind::kOutputs + quad.at(token));
      }
      *reinterpret_cast<float4*>(outputs + quad.at(token)) = sum_of(v, Kind::kGroups);
    }
  }
}

__device__ inline float4 load_from_block(uint32_t local, int block) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(cute::set_block_rank(local, static_cast<uint32_t>(block)))
               : "memory");
  return v;
}

// Every block of the cluster adds and writes a part of the tokens.
template <class Kind>
__device__ void finish(const GemmArgs& args, const float* outputs) {
  const uint32_t local = cute::cast_smem_ptr_to_uint(outputs);
  const int token0 = first_token<Kind>(args);
  Quad<Kind> quad;
  const int n = static_cast<int>(blockIdx.x) * Kind::kRows + quad.row;
  if (n >= args.n) return;
#pragma unroll 1
  for (int token = quad.token * args.split + static_cast<int>(blockIdx.y); token < min(Kind::kTokens, args.m);
       token += Quad<Kind>::kStep * args.split) {
    const Addends<4> addends = args.epilogue.load<4>(token0 + token, n);
    float4 v[kMostSplit];
#pragma unroll
    for (int block = 0; block < kMostSplit; ++block) {
      if (block < args.split) v[block] = load_from_block(local + quad.at(token) * 4, block);
    }
    const float4 sum = sum_of(v, args.split);
    float y[4] = {sum.x, sum.y, sum.z, sum.w};
    args.epilogue.store(y, addends, token0 + token, n);
  }
}

template <class Kind>
__device__ void multiply_part(const GemmArgs& args, char* ring, Barriers& barriers) {
  constexpr int kWarpgroups = Kind::kOfGroup / 128;
  const int group = wgmma::warpgroup_of(static_cast<int>(threadIdx.x)) / kWarpgroups;
  Turn turn(group, args.places.stages);
  float sums[Kind::kValues];
  float total[Kind::kValues];
#pragma unroll 1
  for (int i = 0; i < Kind::kTurns; ++i) {
    const Part<Kind> part(args, group, i, 1);
    multiply_chunks<Kind>(args, part.end - part.first, ring, barriers, turn, sums);
#pragma unroll
    for (int j = 0; j < Kind::kValues; ++j) total[j] = i == 0 ? sums[j] : __fadd_rn(total[j], sums[j]);
  }
  asm volatile("bar.sync 1, %0;" : : "n"(Kind::kSummers) : "memory");  // the ring is read
  store_sums<Kind>(total, reinterpret_cast<float*>(ring) + group * Kind::kOutputs);
  add_groups<Kind>(args, reinterpret_cast<float*>(ring));
}

template <class Kind>
__global__ void __launch_bounds__(Kind::kThreads, 1) gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(1024) char memory[];
  Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
  char* const ring = memory + kBarriers;
  const int thread = static_cast<int>(threadIdx.x);
  // The compiler knows this condition to be the same for a warp, and keeps descriptors in uniform registers.
  const bool brings = wgmma::warpgroup_of(thread) == Kind::kSummers / 128;
  const int warp = thread / 32 - Kind::kSummers / 32;
  // Of four warps: with four groups each brings all of one, with fewer either its weights or its tokens.
  const Feeder<Kind> feeder(args, barriers, ring, warp & (Kind::kGroups - 1));
  const bool of_weights = warp < Kind::kGroups;
  const bool of_tokens = Kind::kGroups == 4 || warp / Kind::kGroups == 1;
  if (brings) {
    if (thread % 32 == 0 && of_weights) feeder.init();
    __syncwarp();
    if constexpr (Kind::kGroups < 4) asm volatile("bar.sync 2, 128;" ::: "memory");  // other warps bring tokens
    if (thread % 32 == 0) feeder.start(of_weights, of_tokens);
    __syncwarp();
  }
  __syncthreads();
  let_later_kernels_start();
  // More registers where sums are written out than where a lane brings: behind the join ptxas keeps to the fewer.
  if (brings) {
    if constexpr (Kind::kTokens > 64) cutlass::arch::warpgroup_reg_dealloc<56>();
    if (thread % 32 == 0 && (of_weights || of_tokens)) feeder.run(of_weights, of_tokens);
  } else {
    if constexpr (Kind::kTokens > 64) cutlass::arch::warpgroup_reg_alloc<Kind::kSummers == 256 ? 224 : 152>();
    multiply_part<Kind>(args, ring, barriers);
    wait_for_earlier_kernels();  // nothing may have been brought
  }
  __syncwarp();
  // Every thread of these blocks, in one place: sums are where the others look for them.
  if (args.split == 1) {
    __syncthreads();
  } else {
    cute::cluster_arrive();
    cute::cluster_wait();
  }
  if (!brings) finish<Kind>(args, reinterpret_cast<float*>(ring));
  __syncwarp();
  if (args.split > 1) {  // until the others have read here
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
}

// ---- launch ----

// A kernel as the host sees it.
struct Block {
  const void* function;
  DeviceFlags* raised;
  int tokens, rows, threads, groups, parts;
  int code_bytes;  // of a strip, of a plane
  uint32_t base;   // Levels'
};

template <class Kind>
Block block_of() {
  static DeviceFlags raised;
  return {reinterpret_cast<const void*>(gemm_kernel<Kind>),
          &raised,
          Kind::kTokens,
          Kind::kRows,
          Kind::kThreads,
          Kind::kGroups,
          Kind::kParts,
          Kind::Code::kBytes,
          Levels<typename Kind::Code, Kind::kType>::kBase};
}

// Other widths do without: the wheel has to stay small.
constexpr bool has_every_block(LowbitFormat format, int bits) {
  const bool common = bits == 8 || (bits >= 2 && bits <= 4);
  return format == LowbitFormat::kPlanes || (format == LowbitFormat::kUniform && common);
}

Block block_for(const LowbitArgs& args, const Shape& shape) {
  Block block{};
  with_format(args, [&](auto format) {
    using Format = decltype(format);
    constexpr auto kFormat = Format::kFormat;
    constexpr int kBits = Format::kBits;
    with_shape<has_every_block(kFormat, kBits)>(shape, [&](auto tokens, auto rows) {
      block = args.type == DType::kFloat16
                  ? block_of<Kind<kFormat, kBits, DType::kFloat16, tokens.value, rows.value>>()
                  : block_of<Kind<kFormat, kBits, DType::kBFloat16, tokens.value, rows.value>>();
    });
  });
  return block;
}

Places places_of(const GemmArgs& args, const Block& block) {
  Places places{};
  const int rows = args.groups.segments * block.rows;
  places.tile = block.code_bytes * args.planes;
  places.codes = block.tokens * kChunk * 2;
  places.scales = places.codes + block.rows / kStrip * places.tile;
  places.zeros = places.scales + args.planes * rows * 2;
  const int end = places.zeros + (args.has_zeros ? rows : 0);
  places.stage = (end + 1023) / 1024 * 1024;  // the swizzle's unit
  // At least 2: a stage comes free when the next one is being multiplied.
  places.stages = std::min((kShared - kBarriers) / places.stage, kMostStages) / block.groups;
  return places;
}

void describe(const LowbitArgs& given, const Weight& w, const Block& block, GemmArgs& args) {
  using wgmma::tensor_map;
  const Places& places = args.places;
  args.x = tensor_map({given.x, given.m, given.k, given.ldx * 2, 2, args.tokens_read, kChunk / kHalves, true});
  const int64_t strips = (given.n + kStrip - 1) / kStrip;
  const int64_t strip = int64_t{w.chunks} * places.tile;
  args.codes = tensor_map({w.packed, strips, strip / 8, strip, 8, block.rows / kStrip, places.tile / 8, false});
  const auto of_groups = [&](const void* data, int64_t rows, int bytes, int box_rows) {
    const int64_t pitch = (int64_t{bytes} * given.n + 15) / 16 * 16;  // of a single row it is never used
    return tensor_map({data, rows, given.n, pitch, bytes, box_rows, block.rows, false});
  };
  const int64_t groups = w.last + 1;
  args.scales = of_groups(w.scale, groups * w.planes, 2, w.groups.segments * w.planes);
  if (args.has_zeros) args.zeros = of_groups(w.zero, groups, 1, w.groups.segments);
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

void run_gemm(const LowbitArgs& given, int device, cudaStream_t stream) {
  const Weight w(given);
  const Shape shape(given.m, given.n, w.chunks, has_every_block(given.format, given.bits));
  const Block block = block_for(given, shape);
  allow_shared_memory(block.function, kShared, device, *block.raised);
  GemmArgs args{Epilogue(given), w.groups};
  args.m = given.m;
  args.n = given.n;
  args.planes = w.planes;
  args.split = shape.split;
  args.part_chunks = w.chunks / (shape.split * block.parts);
  args.longer_parts = w.chunks % (shape.split * block.parts);
  args.tokens_read = std::min(given.m, block.tokens);
  args.base = block.base;
  args.has_zeros = w.zero != nullptr;
  args.constant_weight = given.constant_weight;
  args.chained = is_chained(stream, device);
  args.places = places_of(args, block);
  describe(given, w, block, args);
  const int outputs = block.tokens * pitch_of(block.rows) * 4;
  const int shared = kBarriers + block.groups * std::max(args.places.stages * args.places.stage, outputs);
  const auto rows = static_cast<unsigned>((given.n + block.rows - 1) / block.rows);
  const auto tiles = static_cast<unsigned>((given.m + block.tokens - 1) / block.tokens);
  const auto split = static_cast<unsigned>(shape.split);
  launch_kernel("lowbit_gemm", block.function, dim3(rows, split, tiles), dim3(static_cast<unsigned>(block.threads)),
                shared, dim3(1, split), args.chained, &args, stream);
}

}  // namespace octofuse::lowbit
