// What the kernels for more than 4 tokens share. A first kernel converts the tokens; in the second a block has 128 rows
// and a quarter of the parts of K (lowbit_tile.cuh), and 256 of its threads hold sums. The last of a row's four blocks
// adds theirs and writes.
#pragma once

#include <algorithm>

#include "kernels/launch.h"
#include "kernels/lowbit_stage.cuh"
#include "octofuse/device.h"

namespace octofuse::lowbit {

constexpr int kSummers = 256;  // threads
constexpr int kBlockStrips = 8;
constexpr int kBlockRows = kBlockStrips * kStrip;
constexpr int kQuarters = 4;

struct GemmArgs {
  Weight w;
  int m, k;
  int tokens;  // m, rounded up to those of a kernel
  const void* x;
  int64_t ldx;
  bool wide_x;
  Epilogue epilogue;
  bool constant_weight;
  // scratch memory: tokens as integers [chunk], what there is to know of them [chunk][segment][token]; and, or null,
  // how many quarters of each 128 rows are done, and their sums [rows / 128][quarter][value][thread]
  char* columns;
  TokenChunk* facts;
  uint32_t* done;
  float* sums;
};

// ---- tokens ----

// Half a warp a chunk of a token; those that are missing behind the last are zero.
template <LowbitFormat kFormat, class Layout>
__global__ void __launch_bounds__(kSummers) convert_kernel(const __grid_constant__ GemmArgs args) {
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const int item = static_cast<int>(blockIdx.x * (kSummers / 16) + threadIdx.x / 16);
  const int rows = (args.w.n + kBlockRows - 1) / kBlockRows;
  for (int i = static_cast<int>(blockIdx.x * kSummers + threadIdx.x); args.done != nullptr && i < rows;
       i += gridDim.x * kSummers) {
    args.done[i] = 0;
  }
  const int tokens = args.tokens;
  const int chunk = item / tokens;
  const int token = item % tokens;
  RawColumns raw{};
  if (token < args.m && chunk < args.w.chunks) {
    const int k = chunk * kChunk + static_cast<int>(threadIdx.x) % 16 * 8;
    raw.load(args.x, token * args.ldx, k, args.k, args.wide_x);
  }
  float v[8];
  raw.widen(args.w.type, v);
  const int segments = args.w.groups.segments;
  convert_chunk<Layout>(v, chunk < args.w.chunks, args.columns + static_cast<int64_t>(chunk) * tokens * 2 * kChunk,
                        2 * tokens, 2 * token, args.facts + static_cast<int64_t>(chunk) * segments * tokens + token,
                        tokens, segments, kFactor<kFormat>);
}

// A block's way through its chunks: those of four parts, one part after the other.
struct Walk {
  int part, chunk;

  __device__ bool ended(int first) const { return part >= first + kParts / kQuarters; }
  // To a chunk that exists.
  __device__ void settle(int first, int chunks) {
    while (!ended(first) && chunk >= chunks) chunk = ++part;
  }
  __device__ void advance(int first, int chunks) {
    chunk += kParts;
    settle(first, chunks);
  }
};

__device__ inline void summers_meet() { asm volatile("bar.sync 1, %0;" : : "n"(kSummers) : "memory"); }

// The last of the four quarters adds them and writes.
template <class Products>
__device__ void finish(const GemmArgs& args, Products& products, float* outputs) {
  __shared__ uint32_t arrived;
  const int thread = static_cast<int>(threadIdx.x);
  float* const sums = args.sums + static_cast<int64_t>(blockIdx.x) * kQuarters * Products::kValues * kSummers + thread;
  constexpr int kPitch = Products::kValues * kSummers;
  products.for_each([&](float& value, int i) { __stcg(sums + blockIdx.y * kPitch + i * kSummers, value); });
  __threadfence();
  summers_meet();
  if (thread == 0) arrived = atomicAdd(args.done + blockIdx.x, 1U);
  summers_meet();
  if (arrived != kQuarters - 1) return;
  __threadfence();
  products.for_each([&](float& value, int i) {
    const float* const of_quarters = sums + i * kSummers;
    const float two = __fadd_rn(__ldcg(of_quarters), __ldcg(of_quarters + kPitch));
    value = __fadd_rn(__fadd_rn(two, __ldcg(of_quarters + 2 * kPitch)), __ldcg(of_quarters + 3 * kPitch));
  });
  // Through shared memory, so that neighbours write neighbours; and the epilogue's code is there once.
  constexpr int kRow = kBlockRows + 4;
  products.for_each([&](float& value, int i) { outputs[products.token_of(i) * kRow + products.row_of(i)] = value; });
  summers_meet();
  const int row = thread % kBlockRows;
  const int n = static_cast<int>(blockIdx.x) * kBlockRows + row;
#pragma unroll 1
  for (int token = thread / kBlockRows; token < args.m && n < args.w.n; token += kSummers / kBlockRows) {
    args.epilogue.store(outputs[token * kRow + row], args.epilogue.load(token, n), token, n);
  }
}

// ---- launch ----

// Where each of a launch's arrays starts in the scratch memory.
struct Scratch {
  size_t facts, done, sums, total;

  Scratch(const Weight& w, int tokens) {
    const auto up = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    const auto chunks = static_cast<size_t>(w.chunks);
    const auto rows = static_cast<size_t>((w.n + kBlockRows - 1) / kBlockRows);
    facts = up(chunks * static_cast<size_t>(tokens) * 2 * kChunk);
    done = facts + up(chunks * static_cast<size_t>(w.groups.segments * tokens) * sizeof(TokenChunk));
    sums = done + up(rows * sizeof(uint32_t));
    total = sums + rows * kQuarters * kBlockRows * static_cast<size_t>(tokens) * sizeof(float);
  }
};

// Everything but the second kernel. in_memory: its blocks meet in memory.
template <LowbitFormat kFormat, class Layout>
void convert_tokens(GemmArgs& args, int tokens, bool in_memory, void* scratch, int device, cudaStream_t stream) {
  const Scratch places(args.w, tokens);
  char* const memory = static_cast<char*>(scratch);
  args.tokens = tokens;
  args.columns = memory;
  args.facts = reinterpret_cast<TokenChunk*>(memory + places.facts);
  if (in_memory) {
    args.done = reinterpret_cast<uint32_t*>(memory + places.done);
    args.sums = reinterpret_cast<float*>(memory + places.sums);
  }
  const auto threads = static_cast<unsigned>(args.w.chunks * tokens * 16);
  launch_kernel("lowbit_convert", reinterpret_cast<const void*>(convert_kernel<kFormat, Layout>),
                dim3((threads + kSummers - 1) / kSummers), dim3(kSummers), 0, dim3(1), is_chained(stream, device),
                &args, stream);
}

// f(args) for up to kTokens tokens at a time.
template <int kTokens, class F>
void for_each_launch(const LowbitArgs& given, F f) {
  for (int m = 0; m < given.m; m += kTokens) {
    GemmArgs args{Weight(given),   std::min(kTokens, given.m - m), given.k, 0,       nullptr, given.ldx, false,
                  Epilogue(given), given.constant_weight,          nullptr, nullptr, nullptr, nullptr};
    args.x = static_cast<const uint16_t*>(given.x) + m * given.ldx;
    args.wide_x = given.k % 8 == 0 && given.ldx % 8 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
    args.epilogue.skip(m);
    f(args);
  }
}

}  // namespace octofuse::lowbit
