// More than 4 tokens against low-bit weights on sm_90a: a warpgroup brings codes, tokens, scales and zeros of a chunk
// into a ring of stages (lowbit_bring.cuh); two others have 64 rows each, unpack their codes into registers and
// multiply them there by tokens in shared memory (wgmma).
#include <cutlass/arch/reg_reconfig.h>

#include "kernels/lowbit_bring.cuh"
#include "kernels/lowbit_kernels.h"

namespace octofuse::lowbit {
namespace {

template <class Kind>
struct Products {
  using Code = typename Kind::Code;
  static constexpr int kTiles = Kind::kTiles;
  static constexpr int kValues = Kind::kValues;
  const Weight& w;
  const Places<Kind>& places;
  int lane, strip;
  float y[kTiles][2] = {};

  __device__ Products(const Weight& w, const Places<Kind>& places)
      : w(w), places(places), lane(static_cast<int>(threadIdx.x) % 32), strip(static_cast<int>(threadIdx.x) / 32) {}

  __device__ int planes() const { return Code::kPlanes ? w.planes : 1; }

  __device__ void multiply(const char* stage) {
    float of_chunk[kTiles][2] = {};
    const uint64_t columns = wgmma::tile_descriptor(stage);
#pragma unroll 1
    for (int plane = 0; plane < planes(); ++plane) {
      uint32_t words[Code::kWords];
      read_words<Code::kWidth>(stage + places.codes + (strip * planes() + plane) * Code::kBytes, lane, words);
      uint32_t a[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        codes_of_step<Kind::kFormat, Code::kPlanes ? 1 : Code::kWidth>(words, step, a[step]);
      }
      uint32_t acc[kTiles * 4];
      constexpr int kOfSegment = kSteps / Kind::kSegments;
#pragma unroll
      for (int segment = 0; segment < Kind::kSegments; ++segment) {
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < kOfSegment; ++i) {
          const int step = segment * kOfSegment + i;
          Multiply<Kind::kTokens, Code::kSparse>::run(a[step], columns + 2 * step, acc, i > 0);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        add_segment(stage, segment, plane, acc, of_chunk);
      }
    }
    const TokenChunk* const of_tokens = facts(stage, 0);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float power = of_tokens[j * 4].power;
#pragma unroll
      for (int row = 0; row < 2; ++row) y[j][row] = __fmaf_rn(of_chunk[j][row], power, y[j][row]);
    }
  }

  // f(value, index) for all of this thread's sums.
  template <class F>
  __device__ void for_each(F f) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) f(y[i / 2][i % 2], i);
  }
  __device__ int row_of(int i) const { return strip * kStrip + lane / 4 + i % 2 * 8; }
  __device__ int token_of(int i) const { return i / 2 * 4 + lane % 4; }

 private:
  __device__ const TokenChunk* facts(const char* stage, int segment) const {
    return reinterpret_cast<const TokenChunk*>(stage + places.facts) + segment * Kind::kTokens + lane % 4;
  }

  __device__ void add_segment(const char* stage, int segment, int plane, const uint32_t (&acc)[kTiles * 4],
                              float (&of_chunk)[kTiles][2]) const {
    const auto* const scales = reinterpret_cast<const uint16_t*>(stage + places.scales);
    const auto* const zeros = reinterpret_cast<const uint8_t*>(stage + places.zeros);
    float scale[2];
    int zero[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = half_of(scales[(segment * planes() + plane) * kBlockRows + row_of(i)], w.type);
      zero[i] = w.zero == nullptr ? Code::kTwiceMiddle : 2 * zeros[segment * kBlockRows + row_of(i)];
    }
    const TokenChunk* const of_tokens = facts(stage, segment);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      int32_t c[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] = static_cast<int32_t>(acc[j * 4 + i]);
      add_products<Kind::kFormat>(c, scale, zero, of_tokens[j * 4].sum, of_chunk[j]);
    }
  }
};

// Every block of the cluster adds and writes a quarter of the tokens. All of its threads come here.
template <class Kind>
__device__ void finish_in_cluster(const GemmArgs& args, Products<Kind>& products, float* outputs) {
  constexpr int kRow = kBlockRows + 4;
  summers_meet();  // the ring is read
  products.for_each([&](float& value, int i) { outputs[products.token_of(i) * kRow + products.row_of(i)] = value; });
  cute::cluster_arrive();
  const int row = static_cast<int>(threadIdx.x) % kBlockRows;
  const int n = static_cast<int>(blockIdx.x) * kBlockRows + row;
  const int first = static_cast<int>(blockIdx.y) * 2 + static_cast<int>(threadIdx.x) / kBlockRows;
  constexpr int kStep = 2 * kQuarters;
  wait_for_earlier_kernels();  // nothing may have been brought
  Addends addends;
  if (first < args.m && n < args.w.n) addends = args.epilogue.load(first, n);
  cute::cluster_wait();
#pragma unroll 1
  for (int token = first; token < args.m && n < args.w.n; token += kStep) {
    float of_quarters[kQuarters];
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const uint32_t local = cute::cast_smem_ptr_to_uint(outputs + token * kRow + row);
      asm volatile("ld.shared::cluster.f32 %0, [%1];"
                   : "=f"(of_quarters[i])
                   : "r"(cute::set_block_rank(local, static_cast<uint32_t>(i)))
                   : "memory");
    }
    const float two = __fadd_rn(of_quarters[0], of_quarters[1]);
    const float sum = __fadd_rn(__fadd_rn(two, of_quarters[2]), of_quarters[3]);
    args.epilogue.store(sum, addends, token, n);
    if (token + kStep < args.m) addends = args.epilogue.load(token + kStep, n);
  }
}

template <class Kind>
__global__ void __launch_bounds__(kThreads, Kind::kBlocks) wgmma_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ int4 shared[];
  __shared__ alignas(Barriers) char of_barriers[sizeof(Barriers)];
  Barriers& barriers = *reinterpret_cast<Barriers*>(of_barriers);
  const uint32_t misaligned = cute::cast_smem_ptr_to_uint(shared) % 1024;
  char* const memory = reinterpret_cast<char*>(shared) + (misaligned == 0 ? 0 : 1024 - misaligned);
  const Places<Kind> places(args.w);
  const int stages = places.stages();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int i = 0; i < stages; ++i) {
      barriers.full[i].init(BlockBringer<Kind>::arrivals(args.w));
      barriers.empty[i].init(kSummers / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  let_later_kernels_start();
  if (wgmma::warpgroup_of(thread) == kSummers / 128) {
    cutlass::arch::warpgroup_reg_dealloc<Kind::kBringRegisters>();
    bring_all<Kind>(args, places, memory, barriers, stages);
    for (int i = 0; Kind::kClusters && i < 2; ++i) {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Kind::kSumRegisters>();
  float* const four = reinterpret_cast<float*>(memory + stages * places.stage) + thread;  // parts, added up
  const int first = static_cast<int>(blockIdx.y) * (kParts / kQuarters);
  const int chunks = args.w.chunks;
  Products<Kind> products(args.w, places);
  products.for_each([&](float&, int i) { four[i * kSummers] = 0.0F; });
  Walk walk{first, first};
  walk.settle(first, chunks);
  for (Turn turn; !walk.ended(first); turn.next(stages)) {
    barriers.full[turn.slot].wait(turn.phase);
    products.multiply(memory + turn.slot * places.stage);
    __syncwarp();
    if (thread % 32 == 0) barriers.empty[turn.slot].arrive();
    const int part = walk.part;
    walk.advance(first, chunks);
    if (walk.part == part) continue;
    products.for_each([&](float& value, int i) {
      four[i * kSummers] = __fadd_rn(four[i * kSummers], value);
      value = 0.0F;
    });
  }
  products.for_each([&](float& value, int i) { value = four[i * kSummers]; });
  if constexpr (Kind::kClusters) {
    finish_in_cluster(args, products, reinterpret_cast<float*>(memory));
    cute::cluster_arrive();
    cute::cluster_wait();  // until the others have read here
  } else {
    wait_for_earlier_kernels();  // nothing may have been brought
    finish(args, products, reinterpret_cast<float*>(memory));
  }
}

template <class Kind>
void launch(GemmArgs args, void* scratch, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const auto* function = reinterpret_cast<const void*>(wgmma_kernel<Kind>);
  allow_shared_memory(function, Kind::kShared, device, raised);
  convert_tokens<Kind::kFormat, InRows>(args, Kind::kTokens, !Kind::kClusters, scratch, device, stream);
  const Places<Kind> places(args.w);
  const auto rows = static_cast<unsigned>((args.w.n + kBlockRows - 1) / kBlockRows);
  // Behind this library's own kernel it may always start early.
  launch_kernel("lowbit_wgmma", function, dim3(rows, kQuarters), dim3(kThreads), places.total(places.stages()),
                dim3(1, Kind::kClusters ? kQuarters : 1), true, &args, stream);
}

template <LowbitFormat kFormat, int kBits>
void launch(const GemmArgs& args, void* scratch, int device, cudaStream_t stream) {
  if (args.w.groups.segments > 1) return launch<Kind<kFormat, kBits, 64, kSteps>>(args, scratch, device, stream);
  if (args.m <= 16) return launch<Kind<kFormat, kBits, 16, 1>>(args, scratch, device, stream);
  if (args.m <= 32) return launch<Kind<kFormat, kBits, 32, 1>>(args, scratch, device, stream);
  launch<Kind<kFormat, kBits, 64, 1>>(args, scratch, device, stream);
}

template <int kBits>
void launch_uniform(int bits, const GemmArgs& args, void* scratch, int device, cudaStream_t stream) {
  if (bits == kBits) return launch<LowbitFormat::kUniform, kBits>(args, scratch, device, stream);
  if constexpr (kBits > 1) launch_uniform<kBits - 1>(bits, args, scratch, device, stream);
}

}  // namespace

size_t wgmma_scratch(const LowbitArgs& args) { return Scratch(Weight(args), kMostTokens).total; }

void run_wgmma(const LowbitArgs& given, void* scratch, int device, cudaStream_t stream) {
  for_each_launch<kMostTokens>(given, [&](const GemmArgs& args) {
    if (given.format == LowbitFormat::kUniform) return launch_uniform<8>(given.bits, args, scratch, device, stream);
    if (given.format == LowbitFormat::kSparse12) {
      return launch<LowbitFormat::kSparse12, 0>(args, scratch, device, stream);
    }
    launch<LowbitFormat::kPlanes, 0>(args, scratch, device, stream);
  });
}

}  // namespace octofuse::lowbit
