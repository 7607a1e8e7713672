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

// Slots of a warp's ring in shared memory: as many as pay, or, on a device with less of it, 2 or 1.
template <class T, CacheType kCache, int kBlocks>
constexpr int kMostSlots = kBlocks == 4 && kCache == CacheType::kFloat ? 3 : 12288 / Slot<T, kCache, kBlocks>::kBytes;

// Waits until the warp's oldest slot is there, of `slots` that are on their way.
template <int kMost>
__device__ inline void wait_for_slot(int slots) {
  if (slots == kMost) return wait_for_copies<kMost - 1>();
  slots == 2 ? wait_for_copies<1>() : wait_for_copies<0>();
}

template <class T, CacheType kCache, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 4 ? 1 : 2)
    attend_kernel(const __grid_constant__ AttendArgs args) {
  using WarpSlot = Slot<T, kCache, kBlocks>;
  extern __shared__ float4 dynamic[];
  __shared__ Shared<T, kCache, kBlocks> memory;
  // Things are read before earlier kernels have finished: what none writes, the cache, which earlier steps have
  // written, and `positions`. The kernel that writes these (argmax) is followed by embed, which lets its successors
  // start only after its own wait; so they are complete here.
  const int64_t position = args.positions[blockIdx.z];
  // Outside of the cache: the caller's mistake, which must neither write another head's keys nor leave `arrivals` half
  // counted. A kernel of a chain ends only after its own wait.
  if (position < 0 || position >= args.heads.capacity) return wait_for_predecessors();
  const Work work(args, position);
  if (work.is_none()) return;
  // They wait for this kernel's end, and have time to load what they can until then.
  if (!args.reads_first) launch_dependents();
  const int warp = static_cast<int>(threadIdx.x >> 5);
  char* const ring = reinterpret_cast<char*>(dynamic) + warp * args.slots * WarpSlot::kBytes;
  const int start = work.begin + warp * kTile;
  const int kept = min(work.newest + (work.has_new ? 0 : 1), work.end);  // positions in front of it are in the cache
  // Item 2 * i of a warp are the keys, item 2 * i + 1 the values of its i-th tile.
  const int items = work.end <= start ? 0 : 2 * ((work.end - start - 1) / kPass + 1);
  const auto request = [&](int item, int slot) {
    if (item < items) {
      const WarpSlot to{ring + slot * WarpSlot::kBytes};
      to.copy(args.heads, (item & 1) != 0, work.row, start + (item >> 1) * kPass, work.first, kept);
    }
    commit_copies();
  };
  // Where all fit into the ring they are waited for together.
  const int ahead = min(args.slots, items);
#pragma unroll 1
  for (int item = 0; item < ahead; ++item) request(item, item);
  if (args.reads_first) launch_dependents();
  Block<T, kCache, kBlocks> block(args, work, memory, reinterpret_cast<float*>(dynamic));
  block.clear();
  wait_for_predecessors();
  block.prepare();
  __syncthreads();
  Softmax<T, kCache, kBlocks> softmax;
  float scores[4];
  int slot = 0;
#pragma unroll 1
  for (int item = 0; item < items; ++item) {
    const WarpSlot here{ring + slot * WarpSlot::kBytes};
    ahead == items ? wait_for_copies<0>() : wait_for_slot<kMostSlots<T, kCache, kBlocks>>(args.slots);
    __syncwarp();
    const int at = start + (item >> 1) * kPass;
    const bool values = (item & 1) != 0;
    if (work.has_new && work.newest - at < kTile && work.newest >= at) {
      here.replace(work.newest - at, memory.pair[values ? 1 : 0], values ? nullptr : memory.scales);
    }
    if (values) {
      add_values(here, scores, softmax.sums);
    } else {
      block.score(here, at, scores);
      softmax.weigh(here, scores);
    }
    __syncwarp();
    if (ahead != items) request(item + args.slots, slot);
    slot = slot + 1 == args.slots ? 0 : slot + 1;
  }
  softmax.finish();
  __syncthreads();  // slots become the place of the warps' sums
  block.leave(softmax);
  __syncthreads();
  const bool alone = work.splits == 1;
  block.for_each([&](int head, int channel) {
    const Partial partial = block.of_warps(head, channel);
    alone ? block.store(head, channel, partial) : block.leave_split(head, channel, partial);
  });
  if (alone || !block.is_last()) return;
  block.for_each([&](int head, int channel) { block.store(head, channel, block.of_splits(head, channel)); });
}

// The slots of a warp that leave room for `own` bytes of the block.
template <class T, CacheType kCache, int kBlocks>
int slots_of(const HeadsArgs& heads, int own, int room) {
  constexpr int kMost = kMostSlots<T, kCache, kBlocks>;
  const int fit = (room - own) / (kWarps * Slot<T, kCache, kBlocks>::kBytes);
  if (heads.capacity <= kPass && fit >= 2) return 2;  // every warp has one tile
  return fit >= kMost ? kMost : std::min(fit, 2);
}

template <class T, CacheType kCache, int kBlocks>
void launch(AttendArgs args, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const HeadsArgs& heads = args.heads;
  const int room = device_capability(device).shared_memory;
  const int own = static_cast<int>(sizeof(Shared<T, kCache, kBlocks>));
  const bool capped = args.softcap != 0.0F;
  args.group = heads.queries / heads.pairs;
  args.sharing = sharing_of(args.group);
  args.factor = capped ? args.scaling / args.softcap : args.scaling * kLog2e;
  args.inverse_pairs = 2.0F / static_cast<float>(heads.head_size);
  // What successors load before their wait would queue in front of keys and values. On an H200 a step of the Qwen3 4B
  // takes 2.5 % less, of the Llama 8B with 4 bits 1.3 % less and with 8 bits 1 % more; but one of the GPT-2 XL, whose
  // next kernels have much to load, 4 % more.
  args.reads_first = args.group > 1;
  args.slots = slots_of<T, kCache, kBlocks>(heads, own, room);
  const int pitch = Block<T, kCache, kBlocks>::value_pitch(heads.head_size);
  const int of_slots = kWarps * args.slots * Slot<T, kCache, kBlocks>::kBytes;
  const int shared = std::max(of_slots, kWarps * std::min(args.group, kMostHeads) * pitch * 4);
  const auto* const kernel = reinterpret_cast<const void*>(attend_kernel<T, kCache, kBlocks>);
  allow_shared_memory(kernel, room - own, device, raised);
  const dim3 grid(static_cast<unsigned>(splits_of(heads.capacity)), static_cast<unsigned>(heads.pairs * args.sharing),
                  static_cast<unsigned>(heads.batch));
  const bool chained = is_chained(stream, device);
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
  const int64_t splits = splits_of(static_cast<int>(capacity));
  return {batch * queries * splits * (head_size + 2), batch * pairs * sharing_of(static_cast<int>(queries / pairs))};
}

void attend(const AttendArgs& args, int device, Stream stream) {
  if (args.heads.batch == 0 || args.heads.queries == 0) return;
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.heads.type == DType::kFloat16) return launch<__half>(args, device, cuda_stream);
  launch<__nv_bfloat16>(args, device, cuda_stream);
}

}  // namespace octofuse
