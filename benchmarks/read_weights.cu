// What a kernel that only reads a layer's weights takes: the floor of one that multiplies a few tokens by them.
//
//   nvcc -O3 -std=c++17 -arch=sm_90a benchmarks/read_weights.cu -o read_weights && ./read_weights
//
// One block an SM reads an even share of N x K bytes through a ring of 96 KB in shared memory: as rows (boxes of 64
// rows by 128 bytes, in the swizzle that wgmma takes) or as they would lie packed (16 KB in one piece). Microseconds of
// a call in a captured graph, weights from memory: each behind the one before it, and with programmatic dependent
// launch.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kStage = 16384, kStages = 6, kRows = 64, kRun = 128, kSms = 132;
constexpr int kRunsOfStage = kStage / kRows / kRun;
constexpr size_t kPool = 620 << 20;  // bytes of weights in rotation: more than L2 holds

#define CHECK(call)                                                \
  if (const auto error = (call)) {                                 \
    std::printf("%s: error %d\n", #call, static_cast<int>(error)); \
    std::exit(1);                                                  \
  }

struct Args {
  const uint8_t* packed;
  int stages, stages_of_row, by_rows;
};

__device__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W; }" ::"r"(address(barrier)),
      "r"(phase)
      : "memory");
}

__device__ void copy(const CUtensorMap& map, const Args& args, int stage, uint32_t to, uint32_t full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "n"(kStage) : "memory");
  if (!args.by_rows) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(args.packed + int64_t{stage} * kStage), "n"(kStage), "r"(full)
                 : "memory");
    return;
  }
  for (int i = 0; i < kRunsOfStage; ++i) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to + i * kRows * kRun),
        "l"(&map), "r"((stage % args.stages_of_row * kRunsOfStage + i) * kRun), "r"(stage / args.stages_of_row * kRows),
        "r"(full)
        : "memory");
  }
}

__global__ void __launch_bounds__(64) read(const __grid_constant__ CUtensorMap map, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int64_t block = blockIdx.x;
  const auto first = static_cast<int>(block * args.stages / gridDim.x);
  const auto count = static_cast<int>((block + 1) * args.stages / gridDim.x) - first;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&full[i])));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&empty[i])));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      if (i < count) copy(map, args, first + i, address(ring) + i * kStage, address(&full[i]));
    }
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (int i = 0; i < count; ++i) {
    const int at = i % kStages;
    const uint32_t phase = i / kStages % 2;
    if (threadIdx.x == 32) {
      wait(&full[at], phase);
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&empty[at])) : "memory");
    } else if (threadIdx.x == 0 && i + kStages < count) {
      wait(&empty[at], phase);
      copy(map, args, first + i + kStages, address(ring) + at * kStage, address(&full[at]));
    }
  }
  __syncthreads();
}

using Encode = decltype(&cuTensorMapEncodeTiled);

CUtensorMap rows_of(Encode encode, void* data, uint64_t n, uint64_t k) {
  CUtensorMap map;
  const cuuint64_t sizes[] = {k, n}, pitch[] = {k};
  const cuuint32_t box[] = {kRun, kRows}, step[] = {1, 1};
  CHECK(encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, data, sizes, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  return map;
}

float microseconds(Encode encode, uint8_t* pool, int n, int k, bool by_rows, bool chained, cudaStream_t stream) {
  const int64_t bytes = int64_t{n} * k;
  const auto sets = static_cast<int>(std::min<int64_t>(kPool / bytes, 48));
  constexpr int kCalls = 48;
  cudaGraph_t graph;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kCalls; ++i) {
    uint8_t* const data = pool + i % sets * bytes;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = kSms;
    config.blockDim = 64;
    config.dynamicSmemBytes = kStages * kStage;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = chained ? 1 : 0;
    const Args args{data, static_cast<int>(bytes / kStage), k / kRun / kRunsOfStage, by_rows ? 1 : 0};
    CHECK(cudaLaunchKernelEx(&config, read, rows_of(encode, data, n, k), args));
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t run;
  CHECK(cudaGraphInstantiate(&run, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 9; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(run, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    times.push_back(0);
    CHECK(cudaEventElapsedTime(&times.back(), begin, end));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3F / kCalls;
}

}  // namespace

int main() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
  const auto encode = reinterpret_cast<Encode>(entry);
  CHECK(cudaFuncSetAttribute(read, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kStage));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  uint8_t* pool = nullptr;
  CHECK(cudaMalloc(&pool, kPool));
  CHECK(cudaMemset(pool, 1, kPool));
  std::printf("N x K: rows alone, chained; packed alone, chained\n");
  for (const auto& [n, k] : {std::pair{4096, 4096},
                             {6144, 4096},
                             {4096, 14336},
                             {8192, 8192},
                             {28672, 4096},
                             {12288, 12288},
                             {4096, 2048},
                             {6144, 2048},
                             {28672, 2048},
                             {12288, 6144}}) {
    std::printf("%d x %d:", n, k);
    for (const bool by_rows : {true, false}) {
      for (const bool chained : {false, true}) {
        std::printf(" %.2f", static_cast<double>(microseconds(encode, pool, n, k, by_rows, chained, stream)));
      }
    }
    std::printf("\n");
  }
}
