// The output head in floating point: up to 64 tokens against a vocabulary of weights, each of which is read once.
// Tokens lie in shared memory, and every warp has a ring there through which its weights stream, 16 of them at a time:
// whole lines of memory, many on their way at once. In mma.sync weights are the 16 rows and tokens the 8 columns,
// always with the same order of sums: a token's logits do not depend on the others.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/chain.cuh"
#include "device/launch.h"
#include "device/mma.cuh"
#include "octofuse/decode.h"
#include "octofuse/device.h"
#include "rows/reduce.cuh"

namespace octofuse {
namespace {

constexpr int kWarps = 16;       // one block an SM
constexpr int kRows = 16;        // of weights, a warp's at a time
constexpr int kStep = 64;        // elements of each in a stage of the ring: a line of memory
constexpr int kColumns = 8;      // tokens of a product
constexpr int kMostColumns = 8;  // of these in a launch
constexpr int kMostShared = 224 << 10;

template <int kMost>
constexpr int kStages = kMost == 1 ? 6 : 3;

template <int kMost>
constexpr int kRingBytes = kWarps * kStages<kMost> * kRows * kStep * 2;

// Elements of a token's row in shared memory: whole stages, and what two rows' quads read lies in different banks.
__host__ __device__ constexpr int pitch_of(int k) { return (k + kStep - 1) / kStep * kStep + 32; }

// Where 16 bytes of a stage lie: of odd rows the halves are exchanged, so that two rows' quads hit different banks.
__device__ inline int offset_in_stage(int row, int piece) { return row * kStep + (piece ^ (row % 2 * 4)) * 8; }

// A warp's way through its tiles of weights, a step of K at a time.
struct Walk {
  int tile, k = 0;

  __device__ void advance(const LogitsArgs& args) {
    k += kStep;
    if (k < args.k) return;
    k = 0;
    tile += static_cast<int>(gridDim.x) * kWarps;
  }
};

// A stage of the ring on its way; nothing behind the last tile.
template <class T>
__device__ void copy_stage(const LogitsArgs& args, const Walk& walk, T* stage, int lane) {
  if (walk.tile * kRows < args.n) {
    const int piece = lane % 8;
    const bool inside = walk.k + piece * 8 < args.k;
    const T* const w = static_cast<const T*>(args.w) + (inside ? walk.k + piece * 8 : 0);
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const int row = i + lane / 8;
      const int64_t n = min(walk.tile * kRows + row, args.n - 1);
      copy_async_or_zero(stage + offset_in_stage(row, piece), w + n * args.k, inside ? 16 : 0);
    }
  }
  commit_copies();
}

// Tokens to shared memory, zeros around them.
template <class T>
__device__ void copy_tokens(const LogitsArgs& args, int tokens, T* to) {
  const int pitch = pitch_of(args.k);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int m = static_cast<int>(threadIdx.x) / 32; m < tokens; m += kWarps) {
    const T* const x = static_cast<const T*>(args.x) + static_cast<int64_t>(m) * args.k;
    for (int k = lane * 8; k < pitch; k += 256) {
      const bool inside = m < args.m && k < args.k;
      *reinterpret_cast<uint4*>(to + m * pitch + k) =
          inside ? *reinterpret_cast<const uint4*>(x + k) : make_uint4(0, 0, 0, 0);
    }
  }
}

template <class T, int kMost>
__device__ void store(const LogitsArgs& args, int tile, int lane, const float (&acc)[kMost][4]) {
#pragma unroll
  for (int c = 0; c < kMost; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = c * kColumns + lane % 4 * 2 + i % 2;
      const int n = tile * kRows + lane / 4 + i / 2 * 8;
      if (m < args.m && n < args.n) static_cast<T*>(args.out)[m * args.ldo + n] = rows::from_float<T>(acc[c][i]);
    }
  }
}

template <class T, int kMost>
__global__ void __launch_bounds__(32 * kWarps, 1) logits_kernel(const __grid_constant__ LogitsArgs args) {
  extern __shared__ __align__(128) int4 memory[];
  constexpr int kAhead = kStages<kMost> - 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int columns = (args.m + kColumns - 1) / kColumns;
  T* const ring = reinterpret_cast<T*>(memory) + warp * kStages<kMost> * kRows * kStep;
  T* const tokens = reinterpret_cast<T*>(memory) + kRingBytes<kMost> / 2;
  launch_dependents();
  Walk walk{warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)};
  Walk ahead = walk;
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {  // before earlier kernels have to be finished
    copy_stage(args, ahead, ring + i * kRows * kStep, lane);
    ahead.advance(args);
  }
  wait_for_predecessors();
  copy_tokens(args, columns * kColumns, tokens);
  __syncthreads();
  const int pitch = pitch_of(args.k);
  const T* const x = tokens + lane / 4 * pitch + lane % 4 * 8;
  float acc[kMost][4] = {};
  int slot = 0;
#pragma unroll 1
  while (walk.tile * kRows < args.n) {
    wait_for_copies<kAhead - 1>();
    __syncwarp();  // this stage has arrived, and the one before has been read
    copy_stage(args, ahead, ring + (slot == 0 ? kAhead : slot - 1) * kRows * kStep, lane);
    ahead.advance(args);
    const T* const stage = ring + slot * kRows * kStep;
    uint4 low[2];
    uint4 high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] = *reinterpret_cast<const uint4*>(stage + offset_in_stage(lane / 4, lane % 4 + 4 * i));
      high[i] = *reinterpret_cast<const uint4*>(stage + offset_in_stage(lane / 4 + 8, lane % 4 + 4 * i));
    }
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c >= columns) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 token = *reinterpret_cast<const uint4*>(x + c * kColumns * pitch + walk.k + i * 32);
        mma_quads<T>(low[i], high[i], token, acc[c]);
      }
    }
    slot = slot == kAhead ? 0 : slot + 1;
    const int tile = walk.tile;
    walk.advance(args);
    if (walk.k != 0) continue;
    store<T>(args, tile, lane, acc);
#pragma unroll
    for (auto& of_columns : acc) {
#pragma unroll
      for (float& sum : of_columns) sum = 0.0F;
    }
  }
}

template <class T, int kMost>
void launch(const LogitsArgs& given, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const auto* function = reinterpret_cast<const void*>(logits_kernel<T, kMost>);
  allow_shared_memory(function, kMostShared, device, raised);
  const int of_columns = kColumns * pitch_of(given.k) * 2;
  const int most = std::min(kMost, (kMostShared - kRingBytes<kMost>) / of_columns) * kColumns;
  for (int m = 0; m < given.m; m += most) {
    LogitsArgs args = given;
    args.m = std::min(most, given.m - m);
    args.x = static_cast<const T*>(given.x) + static_cast<int64_t>(m) * given.k;
    args.out = static_cast<T*>(given.out) + m * given.ldo;
    const int columns = (args.m + kColumns - 1) / kColumns;
    launch_kernel("logits", function, dim3(static_cast<unsigned>(device_capability(device).sm_count)),
                  dim3(32 * kWarps), kRingBytes<kMost> + columns * of_columns, dim3(1), is_chained(stream, device),
                  &args, stream, {args.w, int64_t{args.n} * args.k * 2});
  }
}

template <class T>
void launch(const LogitsArgs& args, int device, cudaStream_t stream) {
  // The shorter ring serves rows too long for the other.
  const bool few = args.m <= kColumns && kRingBytes<1> + kColumns * pitch_of(args.k) * 2 <= kMostShared;
  if (few) return launch<T, 1>(args, device, stream);
  launch<T, kMostColumns>(args, device, stream);
}

}  // namespace

bool takes_logits(int64_t k, int device) {
  const Capability& capability = device_capability(device);
  if (capability.compute_capability != 90 || !capability.kernels_sm90a) return false;
  return k % 8 == 0 && k <= 4096 &&
         kRingBytes<kMostColumns> + kColumns * pitch_of(static_cast<int>(k)) * 2 <= kMostShared;
}

void logits(const LogitsArgs& args, int device, Stream stream) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.type == DType::kFloat16) return launch<__half>(args, device, cuda_stream);
  launch<__nv_bfloat16>(args, device, cuda_stream);
}

}  // namespace octofuse
