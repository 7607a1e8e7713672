// Attention of one new token for each sequence, in one kernel: it normalises and rotates the token's queries and key,
// appends key and value to the cache, takes the softmax over the positions that the token sees, and weighs the values
// by it.
//
// The grid is [splits of positions, heads of the cache, sequences]; where more than 8 query heads share keys and
// values, several blocks have the same. A block reads the positions of a split once for all of its query heads and
// leaves their softmaxes of these: the highest score, the sum of the weights, and the weighted sums of the values. The
// block that finishes last combines the splits in their order, so that the result does not depend on which one that is.
//
// Inside a block each of the 8 warps takes every eighth tile of 16 positions (tile.cuh). All keys and values of its
// first tile are requested before the kernel that computes the new ones has finished (chain.cuh); only the queries and
// the new token's own key and value have to be waited for.
#include <cuda_runtime.h>

#include <algorithm>

#include "decode/block.cuh"
#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

using namespace decode;

template <class T, CacheType kCache, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 4 ? 1 : 2)
    attend_kernel(const __grid_constant__ AttendArgs args) {
  extern __shared__ float4 values[];
  __shared__ Shared<T, kCache, kBlocks> memory;
  // Two things are read before earlier kernels have finished: the cache, which earlier steps have written, and
  // `positions`. The kernel that writes these (argmax) is followed by embed, which lets its successors start only after
  // its own wait; so they are complete here.
  const int64_t position = args.positions[blockIdx.z];
  // Outside of the cache: the caller's mistake, which must neither write another head's keys nor leave `arrivals` half
  // counted. A kernel of a chain ends only after its own wait.
  if (position < 0 || position >= args.heads.capacity) return wait_for_predecessors();
  const Work work(args, position);
  if (work.is_none()) return;
  launch_dependents();  // they wait for this kernel's end, and have time to load what they can until then
  Block<T, kCache, kBlocks> block(args, work, memory, reinterpret_cast<float*>(values));
  const int start = work.begin + static_cast<int>(threadIdx.x) / 32 * kTile;
  Tile<T, kCache, kBlocks> tile;
  tile.load_keys(args.heads, work.row, start, work.first, work.newest);
  tile.load_values(args.heads, work.row, start, work.first, work.newest);
  block.prefetch();
  // Code that runs once in a block costs more in fetching instructions than in executing them. So while earlier kernels
  // run the loop goes through it once with a query out of the cache and stores nothing: the code is in the cache
  // afterwards.
#pragma unroll 1
  for (bool rehearses = args.rehearses && work.newest > 1;; rehearses = false) {
    const T* const rehearsal = rehearses ? static_cast<const T*>(args.heads.keys) +
                                               work.row * args.heads.head_size / (kCache == CacheType::kFloat ? 1 : 2)
                                         : nullptr;
    if (!rehearses) wait_for_predecessors();
    block.prepare(rehearsal, !rehearses);
    __syncthreads();
    Softmax<T, kCache, kBlocks> softmax;
#pragma unroll 1
    for (int at = start; at < work.end; at += kPass) {
      if (work.newest >= at && work.newest < at + kTile) {
        tile.replace(work.newest - at, memory.pair[0], memory.pair[1], memory.scales);
      }
      float scores[4] = {};
      block.score(tile, at, scores);
      softmax.take(tile, scores);
      if (rehearses) break;
      tile.load_keys(args.heads, work.row, at + kPass, work.first, min(work.newest, work.end));
      tile.load_values(args.heads, work.row, at + kPass, work.first, min(work.newest, work.end));
    }
    softmax.finish();
    block.leave(softmax);
    __syncthreads();
    const auto of_warps = [&](int head, int channel) { return block.of_warps(head, channel); };
    const auto store = [&](int head, int channel, const Partial& partial) {
      block.store(head, channel, partial, !rehearses);
    };
    if (work.splits == 1 || rehearses) {
      block.for_each(of_warps, store);
    } else {
      block.for_each(of_warps,
                     [&](int head, int channel, const Partial& partial) { block.leave_split(head, channel, partial); });
      if (block.is_last()) {
        block.for_each([&](int head, int channel) { return block.of_splits(head, channel); }, store);
      }
    }
    if (!rehearses) return;
    __syncthreads();
  }
}

template <class T, CacheType kCache, int kBlocks>
void launch(AttendArgs args, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const HeadsArgs& heads = args.heads;
  const int group = heads.queries / heads.pairs;
  const int together = std::min(group, kMostHeads);
  const int shared = kWarps * together * Block<T, kCache, kBlocks>::value_pitch(heads.head_size) * 4;
  const auto* const kernel = reinterpret_cast<const void*>(attend_kernel<T, kCache, kBlocks>);
  allow_shared_memory(kernel, kWarps * kMostHeads * (kBlocks * kBlockChannels + 4) * 4, device, raised);
  const int splits = std::min(kMostSplits, (heads.capacity + kSplit - 1) / kSplit);
  const dim3 grid(static_cast<unsigned>(splits),
                  static_cast<unsigned>(heads.pairs * ((group + kMostHeads - 1) / kMostHeads)),
                  static_cast<unsigned>(heads.batch));
  const bool chained = is_chained(stream, device);
  // Where more blocks share an SM, the first ones fetch the code for the others.
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  args.rehearses = chained && blocks <= 2 * device_capability(device).sm_count;
  launch_kernel("attend", kernel, grid, dim3(kThreads), shared, dim3(1), chained, &args, stream);
}

template <class T, CacheType kCache>
void launch(const AttendArgs& args, int device, cudaStream_t stream) {
  if (args.heads.head_size <= kBlockChannels) return launch<T, kCache, 1>(args, device, stream);
  if (args.heads.head_size <= 2 * kBlockChannels) return launch<T, kCache, 2>(args, device, stream);
  launch<T, kCache, 4>(args, device, stream);
}

template <class T>
void launch(const AttendArgs& args, int device, cudaStream_t stream) {
  if (args.heads.cache == CacheType::kInt8) return launch<T, CacheType::kInt8>(args, device, stream);
  if (args.heads.cache == CacheType::kFloat8) return launch<T, CacheType::kFloat8>(args, device, stream);
  launch<T, CacheType::kFloat>(args, device, stream);
}

}  // namespace

AttendScratch attend_scratch(int64_t batch, int64_t queries, int64_t pairs, int64_t head_size, int64_t capacity) {
  const int64_t splits = std::min<int64_t>(kMostSplits, (capacity + kSplit - 1) / kSplit);
  const int64_t blocks = pairs * ((queries / pairs + kMostHeads - 1) / kMostHeads);
  return {batch * queries * splits * (head_size + 2), batch * blocks};
}

void attend(const AttendArgs& args, int device, Stream stream) {
  if (args.heads.batch == 0 || args.heads.queries == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.heads.type == DType::kFloat16) return launch<__half>(args, device, cuda_stream);
  launch<__nv_bfloat16>(args, device, cuda_stream);
}

}  // namespace octofuse
