// Attention of one new token for each sequence, in one kernel: it normalises and rotates the token's queries and key,
// appends key and value to the cache, takes the softmax over the positions that the token sees, and weighs the values
// by it.
//
// The grid is [takers of splits, heads of the cache, sequences]; where more than 8 query heads share keys and values,
// several blocks have the same. A block reads the positions of a split once for all of its query heads and leaves their
// softmaxes of these: the highest score, the sum of the weights, and the weighted sums of the values. Then it goes on
// with another split, whose first tiles are on their way already. The block that finishes last combines the splits in
// their order. Splits depend on a sequence's length alone, so the result depends neither on which block takes which nor
// on which one is last.
//
// Inside a block each of the 8 warps takes every eighth tile of 16 positions (tile.cuh). All keys and values of its
// first tile are requested before the kernel that computes the new ones has finished (chain.cuh); only the queries and
// the new token's own key and value have to be waited for.
#include <cuda_runtime.h>

#include <algorithm>

#include "decode/block.cuh"
#include "device/align.h"
#include "device/chain.cuh"
#include "device/launch.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

using namespace decode;

constexpr int kLine = 128;  // bytes of memory that are copied to lines of shared memory

// Slots of a warp's ring in shared memory: as many as pay, or, where there is less of it, 2 or 1.
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
  // Aligned to lines: with lines of memory copied across lines of shared memory every sector is asked for twice, and
  // 8 sequences of 32,768 positions in fp16 took 320 us on an H200.
  extern __shared__ __align__(kLine) char dynamic[];
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
  char* const ring = dynamic + warp * args.slots * WarpSlot::kBytes;
  const int kept = work.newest + (work.has_new ? 0 : 1);  // positions in front of it are in the cache
  const Copier<T, kCache, kBlocks> copier(args.heads, work.row, work.first, kept);
  Walk ahead(work, warp);
  bool ahead_to_values = false;  // a tile's keys come first
  const auto request = [&](int slot) {
    if (!ahead.is_over()) {
      copier.copy({ring + slot * WarpSlot::kBytes}, ahead_to_values, ahead.position);
      if (ahead_to_values) ahead.advance();
      ahead_to_values = !ahead_to_values;
    }
    commit_copies();
  };
#pragma unroll 1
  for (int slot = 0; slot < args.slots && !ahead.is_over(); ++slot) request(slot);
  const bool fits = ahead.is_over();  // all into the ring: then they are waited for together
  if (args.reads_first) launch_dependents();
  auto* const sums = reinterpret_cast<float*>(dynamic + args.sums_at);
  Block<T, kCache, kBlocks> block(args, work, memory, sums);
  block.clear();
  wait_for_predecessors();
  block.prepare();
  __syncthreads();
  const bool alone = work.splits == 1;
  int slot = 0;
#pragma unroll 1
  for (int split = Work::split(); split < work.splits; split += Work::step()) {
    Softmax<T, kCache, kBlocks> softmax;
    float scores[4];
    bool values = false;
    const int end = work.end(split);
#pragma unroll 1
    for (int at = work.begin(split) + warp * kTile; at < end; at += values ? 0 : kPass) {
      const WarpSlot here{ring + slot * WarpSlot::kBytes};
      fits ? wait_for_copies<0>() : wait_for_slot<kMostSlots<T, kCache, kBlocks>>(args.slots);
      __syncwarp();
      if (work.has_new && work.newest - at < kTile && work.newest >= at) {
        here.replace(work.newest - at, memory.pair[values ? 1 : 0], values ? nullptr : memory.scales);
      }
      if (values) {
        add_values(here, scores, softmax.sums, softmax.of_weights);
      } else {
        block.score(here, at, scores);
        softmax.weigh(here, scores);
      }
      __syncwarp();
      if (!fits) request(slot);
      slot = slot + 1 == args.slots ? 0 : slot + 1;
      values = !values;
    }
    softmax.finish();
    __syncthreads();  // the warps' sums may lie where slots were, and those of a split before have been read
    block.leave(softmax);
    __syncthreads();
    block.for_each([&](int head, int channel) {
      const Partial partial = block.of_warps(head, channel);
      alone ? block.store(head, channel, partial) : block.leave_split(split, head, channel, partial);
    });
  }
  if (alone || !block.is_last()) return;
  block.for_each([&](int head, int channel) { block.store(head, channel, block.of_splits(head, channel)); });
}

// How a launch divides its work among blocks and their shared memory.
template <class T, CacheType kCache, int kBlocks>
class Division {
  static constexpr int kMost = kMostSlots<T, kCache, kBlocks>;
  static constexpr int kOfSlots = kWarps * Slot<T, kCache, kBlocks>::kBytes;  // of a slot of all warps
  static constexpr int kOnSm = kBlocks == 4 ? 1 : 2;                          // blocks at once
  static constexpr int kReserved = 1024;  // bytes of shared memory of a block that are not its own

 public:
  static constexpr int kOwn = static_cast<int>(round_up(sizeof(Shared<T, kCache, kBlocks>), kLine));
  int takers;   // blocks that take turns with the splits of a head
  int slots;    // of a warp's ring
  int sums_at;  // the warps' sums: behind the rings if a block's next split is on its way meanwhile
  int bytes;    // of dynamic shared memory

  Division(const AttendArgs& args, const Capability& capability) : takers(splits_of(args.heads.capacity)) {
    const HeadsArgs& heads = args.heads;
    const int sums =
        kWarps * std::min(args.group, kMostHeads) * Block<T, kCache, kBlocks>::value_pitch(heads.head_size) * 4;
    const int64_t rows = int64_t{heads.batch} * heads.pairs * args.sharing;
    const int fewer = takers_of(heads.capacity, rows, capability.sm_count * kOnSm);
    const int room = capability.shared_memory;
    const int beside = slots_in(room / kOnSm - kReserved - kOwn - sums);
    if (fewer < takers && beside >= 2) {
      takers = fewer;
      slots = beside;
      sums_at = slots * kOfSlots;
      bytes = sums_at + sums;
      return;
    }
    slots = slots_in(room - kOwn);
    if (heads.capacity <= kPass && slots > 2) slots = 2;  // every warp has one tile
    sums_at = 0;
    bytes = std::max(slots * kOfSlots, sums);
  }

 private:
  // kMost, 2 or 1.
  static int slots_in(int bytes) {
    const int fit = bytes / kOfSlots;
    return fit >= kMost ? kMost : std::min(fit, 2);
  }

  // A wave of blocks takes as long as one's splits, and a start, which takes about as long as so many positions. That
  // holds for sequences as long as the cache; one that is alone in its length must not wait for few blocks.
  static int takers_of(int capacity, int64_t rows, int at_once) {
    constexpr int64_t kStart = 128;
    constexpr int kMostInTurn = 8;  // splits of a block
    const int splits = splits_of(capacity);
    const int64_t positions = ceil_div(capacity, splits);
    const auto time = [&](int takers) {
      return ceil_div(rows * takers, at_once) * (ceil_div(splits, takers) * positions + kStart);
    };
    int best = splits;
    for (int takers = splits - 1; takers * kMostInTurn >= splits; --takers) {
      if (time(takers) < time(best)) best = takers;
    }
    return best;
  }
};

template <class T, CacheType kCache, int kBlocks>
void launch(AttendArgs args, int device, cudaStream_t stream) {
  static DeviceFlags raised;
  const HeadsArgs& heads = args.heads;
  const Capability& capability = device_capability(device);
  const bool capped = args.softcap != 0.0F;
  args.group = heads.queries / heads.pairs;
  args.sharing = sharing_of(args.group);
  args.factor = capped ? args.scaling / args.softcap : args.scaling * kLog2e;
  args.inverse_pairs = 2.0F / static_cast<float>(heads.head_size);
  // What successors load before their wait would queue in front of keys and values. On an H200 a step of the Qwen3 4B
  // takes 2.5 % less, of the Llama 8B with 4 bits 1.3 % less and with 8 bits 1 % more; but one of the GPT-2 XL, whose
  // next kernels have much to load, 4 % more.
  args.reads_first = args.group > 1;
  const Division<T, kCache, kBlocks> division(args, capability);
  args.slots = division.slots;
  args.sums_at = division.sums_at;
  const auto* const kernel = reinterpret_cast<const void*>(attend_kernel<T, kCache, kBlocks>);
  allow_shared_memory(kernel, capability.whole_shared_memory - division.kOwn, device, raised);
  const dim3 grid(static_cast<unsigned>(division.takers), static_cast<unsigned>(heads.pairs * args.sharing),
                  static_cast<unsigned>(heads.batch));
  const bool chained = is_chained(stream, device);
  launch_kernel("attend", kernel, grid, dim3(kThreads), division.bytes, dim3(1), chained, &args, stream);
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
