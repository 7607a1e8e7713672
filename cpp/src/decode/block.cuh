// A block of attention: which positions of which heads it reads, and what it does with them before and after its
// products.
#pragma once

#include "decode/tile.cuh"

namespace octofuse::decode {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kPass = kWarps * kTile;
constexpr int kSplitBits = 8;  // of positions, in shorter sequences; longer ones have longer splits
constexpr int kMostSplitsBits = 5;
constexpr float kLog2e = 1.44269504088896341F;

// Positions of a split, as a power of two, by the sequence's own length alone.
__device__ inline int split_bits_of(int newest) {
  const int bits_of_newest = 32 - __clz(newest);
  return max(kSplitBits, bits_of_newest - kMostSplitsBits);
}

// As exact as its use needs: scores are small.
__device__ inline float tanh_of(float x) { return 1.0F - __fdividef(2.0F, 1.0F + power_of_two(2.0F * kLog2e * x)); }

// The highest score, the weights' sum, and two channels' weighted sums.
struct Partial {
  float highest, weight;
  float2 value;
};

// The softmax over the positions of `count` partial ones, at most kMost, of which of(i) is the i-th. They are added up
// in this order whatever the thread that asks.
template <int kMost, class Of>
__device__ Partial combine(int count, Of of) {
  Partial partials[kMost];
  Partial all{kLowest, 0.0F, {0.0F, 0.0F}};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    partials[i] = i < count ? of(i) : Partial{kLowest, 0.0F, {0.0F, 0.0F}};
    all.highest = fmaxf(all.highest, partials[i].highest);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float factor = power_of_two(partials[i].highest - all.highest);
    all.value.x = fmaf(factor, partials[i].value.x, all.value.x);
    all.value.y = fmaf(factor, partials[i].value.y, all.value.y);
    all.weight = fmaf(factor, partials[i].weight, all.weight);
  }
  return all;
}

// The largest number of splits of a sequence.
__host__ __device__ inline int splits_of(int capacity) {
  const int splits = (capacity + (1 << kSplitBits) - 1) >> kSplitBits;
  return splits < 1 << kMostSplitsBits ? splits : 1 << kMostSplitsBits;
}

// Blocks that share a head of the cache.
__host__ __device__ inline int sharing_of(int group) { return (group + kMostHeads - 1) / kMostHeads; }

// What a block works on: every gridDim.x-th split of the positions that its token sees.
struct Work {
  int sequence, head, heads, pair;  // head: the first of `heads` query heads
  bool leads;                       // the first of the blocks that share a head of the cache
  bool has_new;                     // there are a key and a value to append
  int first, newest;                // positions that the token sees
  int bits;                         // of a split
  int splits;                       // that hold any of these positions
  int64_t row;                      // of position 0 in the cache

  __device__ Work(const AttendArgs& args, int64_t position) {
    const int sharing = args.sharing;
    pair = sharing == 1 ? static_cast<int>(blockIdx.y) : static_cast<int>(blockIdx.y) / sharing;
    const int block = static_cast<int>(blockIdx.y) - pair * sharing;
    sequence = static_cast<int>(blockIdx.z);
    leads = block == 0;
    head = pair * args.group + block * kMostHeads;
    heads = min(kMostHeads, args.group - block * kMostHeads);
    newest = static_cast<int>(position);
    const int start = args.starts != nullptr ? static_cast<int>(args.starts[sequence]) : 0;
    first = min(newest, max(start, args.window > 0 ? max(0, newest + 1 - args.window) : 0));
    has_new = args.heads.k.data != nullptr;
    bits = split_bits_of(newest);
    splits = (newest >> bits) - (first >> bits) + 1;
    row = (static_cast<int64_t>(sequence) * args.heads.pairs + pair) * args.heads.capacity;
  }
  __device__ static int split() { return static_cast<int>(blockIdx.x); }  // the block's first
  __device__ static int step() { return static_cast<int>(gridDim.x); }
  __device__ bool is_none() const { return split() >= splits; }
  __device__ bool appends() const { return has_new && (splits - 1) % step() == split(); }
  __device__ int begin(int split) const { return max(((first >> bits) + split) << bits, first & -kTile); }
  __device__ int end(int split) const { return min(((first >> bits) + split + 1) << bits, newest + 1); }
};

// A warp's way through its tiles of all of the block's splits.
struct Walk {
  const Work& work;
  int warp, split, position, end;

  __device__ Walk(const Work& work, int warp) : work(work), warp(warp) { enter(Work::split()); }
  __device__ bool is_over() const { return split >= work.splits; }
  __device__ void advance() {
    position += kPass;
    if (position >= end) enter(split + Work::step());
  }

 private:
  // The first split from `next` on that has a tile for this warp: short ones have not.
  __device__ void enter(int next) {
#pragma unroll 1
    for (split = next; split < work.splits; split += Work::step()) {
      position = work.begin(split) + warp * kTile;
      end = work.end(split);
      if (position < end) return;
    }
  }
};

template <class T, CacheType kCache, int kBlocks>
struct Shared {
  using M = Operand<T, kCache>;
  static constexpr int kChannels = kBlocks * kBlockChannels;
  alignas(16) M queries[kMostHeads][kQueryPitch<kBlocks>];
  alignas(16) Stored<T, kCache> pair[2][kChannels];  // the new key and value
  float scales[2];                                   // theirs
  float factors[kMostHeads];                         // of the queries
  float offsets[kMostHeads];                         // of their products with keys in int8
  float scratch[kWarps][kChannels];
  float highest[kWarps][kMostHeads];
  float weight[kWarps][kMostHeads];
  bool is_last;
};

template <class T, CacheType kCache, int kBlocks>
class Block {
  using M = Operand<T, kCache>;
  using Element = Stored<T, kCache>;
  using Memory = Shared<T, kCache, kBlocks>;

 public:
  // values: [warp, head, value_pitch()] in shared memory. What no earlier kernel writes is on its way from here on.
  __device__ Block(const AttendArgs& args, const Work& work, Memory& memory, float* values)
      : args_(args),
        heads_(args.heads),
        work_(work),
        memory_(memory),
        values_(values),
        preparation_(args.heads, work.newest, lane()),
        scale_(args.out_type == DType::kInt8 ? scale_at(args.scale, 0) : 0.0F) {}

  // Zeros where products read more than there is. (Heads that are missing may have any scores: nobody reads them.)
  __device__ void clear() {
    if (heads_.head_size == Memory::kChannels) return;
    auto* const queries = reinterpret_cast<uint32_t*>(memory_.queries);
#pragma unroll 1
    for (int i = thread(); i < static_cast<int>(sizeof(memory_.queries) / 4); i += kThreads) queries[i] = 0;
    auto* const pair = reinterpret_cast<uint32_t*>(memory_.pair);
#pragma unroll 1
    for (int i = thread(); i < static_cast<int>(sizeof(memory_.pair) / 4); i += kThreads) pair[i] = 0;
    __syncthreads();
  }

  // Queries, and the new key and value, into shared memory, the latter into the cache as well.
  __device__ void prepare() {
    const int rows = work_.heads + (work_.appends() ? 2 : 0);
#pragma unroll 1
    for (int row = warp(); row < rows; row += kWarps) {
      float v[kOfLane<kBlocks>];
      load_head<T, kBlocks>(source(row), heads_.head_size, lane(), v);
      prepare_row(row, v);
    }
  }

  // The scores of the positions of a tile, in powers of two.
  __device__ void score(const Slot<T, kCache, kBlocks>& keys, int position, float (&scores)[4]) const {
#pragma unroll
    for (float& score : scores) score = 0.0F;
    float offsets[2] = {};
    if constexpr (kCache == CacheType::kInt8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) offsets[i] = memory_.offsets[2 * keys.member() + i];
    }
    multiply_keys(keys, memory_.queries[0], offsets, scores);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] *= args_.factor;
      if constexpr (kCache != CacheType::kFloat) scores[i] *= memory_.factors[2 * keys.member() + i % 2];
    }
    if (args_.softcap != 0.0F) {
#pragma unroll
      for (float& score : scores) score = args_.softcap * kLog2e * tanh_of(score);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int p = position + keys.group() + i / 2 * 8;
      if (p < work_.first || p > work_.newest) scores[i] = -INFINITY;
    }
  }

  // This warp's softmax, for of_warps().
  __device__ void leave(const Softmax<T, kCache, kBlocks>& softmax) {
    const int group = lane() >> 2;
    const int member = lane() & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 2 * member + h;
      if (head >= work_.heads) continue;
      if (group == 0) {
        memory_.highest[warp()][head] = softmax.highest[h];
        memory_.weight[warp()][head] = softmax.weight[h];
      }
      float* const values = values_ + (warp() * work_.heads + head) * value_pitch(heads_.head_size);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const int channel = 64 * c + 8 * group;
        if (channel >= heads_.head_size) continue;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          *reinterpret_cast<float2*>(values + channel + 2 * r) =
              make_float2(softmax.sums[c][r][h], softmax.sums[c][r][2 + h]);
        }
      }
    }
  }

  // f(head, channel) for every second channel of the block's heads.
  template <class F>
  __device__ void for_each(F f) const {
    const int pairs = heads_.head_size / 2;
#pragma unroll 1
    for (int i = thread(); i < work_.heads * pairs; i += kThreads) {
      const int head = static_cast<int>((static_cast<float>(i) + 0.5F) * args_.inverse_pairs);
      f(head, 2 * (i - head * pairs));
    }
  }

  __device__ Partial of_warps(int head, int channel) const {
    const float* const values = values_ + head * value_pitch(heads_.head_size) + channel;
    const int pitch = work_.heads * value_pitch(heads_.head_size);
    return combine<kWarps>(kWarps, [&](int w) {
      return Partial{memory_.highest[w][head], memory_.weight[w][head],
                     *reinterpret_cast<const float2*>(values + w * pitch)};
    });
  }

  // 8 splits at a time, whose loads are in flight together.
  __device__ Partial of_splits(int head, int channel) const {
    const int pitch = heads_.head_size + 2;
    const float* const all = partials(head);  // other blocks have written them: from L2
    Partial softmax{kLowest, 0.0F, {0.0F, 0.0F}};
#pragma unroll 1
    for (int i = 0; i < work_.splits; i += 8) {
      const Partial more = combine<8>(work_.splits - i, [&](int j) {
        const float* const one = all + (i + j) * pitch;
        const float2 highest_and_weight = __ldcg(reinterpret_cast<const float2*>(one + heads_.head_size));
        return Partial{highest_and_weight.x, highest_and_weight.y,
                       __ldcg(reinterpret_cast<const float2*>(one + channel))};
      });
      softmax = combine<2>(2, [&](int j) { return j == 0 ? softmax : more; });
    }
    return softmax;
  }

  // Leaves a head's softmax of a split in memory.
  __device__ void leave_split(int split, int head, int channel, const Partial& softmax) const {
    float* const mine = partials(head) + split * (heads_.head_size + 2);
    *reinterpret_cast<float2*>(mine + channel) = softmax.value;
    if (channel != 0) return;
    *reinterpret_cast<float2*>(mine + heads_.head_size) = make_float2(softmax.highest, softmax.weight);
  }

  // True in the block that has left its splits last: all the others' are there for it to read. The fence before the
  // count makes them visible first.
  __device__ bool is_last() const {
    __threadfence();
    __syncthreads();
    if (thread() == 0) {
      uint32_t* const arrivals = args_.arrivals + work_.sequence * gridDim.y + blockIdx.y;
      memory_.is_last = atomicAdd(arrivals, 1U) == static_cast<uint32_t>(min(work_.splits, Work::step())) - 1;
      if (memory_.is_last) *arrivals = 0;
      __threadfence();
    }
    __syncthreads();
    return memory_.is_last;
  }

  __device__ void store(int head, int channel, const Partial& softmax) const {
    const int64_t row = static_cast<int64_t>(work_.sequence) * heads_.queries + work_.head + head;
    const int64_t at = row * heads_.head_size + channel;
    const float low = __fdividef(softmax.value.x, softmax.weight);
    const float high = __fdividef(softmax.value.y, softmax.weight);
    if (args_.out_type != DType::kInt8) {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(args_.out) + at) = pack<T>(low, high);
    } else {
      const auto quantized = [inverse = reciprocal(scale_)](float value) {
        return requantize(to_float(rows::from_float<T>(value)), inverse, -127);
      };
      *reinterpret_cast<char2*>(static_cast<int8_t*>(args_.out) + at) = make_char2(quantized(low), quantized(high));
    }
  }

  __host__ __device__ static constexpr int value_pitch(int head_size) { return head_size + 4; }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x & 31); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x >> 5); }

  // Rows are the query heads, then the new key and value.
  __device__ const T* source(int row) const {
    const bool query = row < work_.heads;
    const HeadView& view = query ? heads_.q : row == work_.heads ? heads_.k : heads_.v;
    const int head = query ? work_.head + row : work_.pair;
    return static_cast<const T*>(view.data) + work_.sequence * view.row + head * view.head;
  }

  __device__ void prepare_row(int row, float (&v)[kOfLane<kBlocks>]) {
    const bool query = row < work_.heads;
    const bool value = row == work_.heads + 1;
    const int size = heads_.head_size;
    if (!value) preparation_.apply(query, memory_.scratch[warp()], v);
    if (query) return keep_query(row, v);
    const int64_t at = work_.row + work_.newest;
    auto* const cache = static_cast<Element*>(value ? heads_.values : heads_.keys) + at * size;
    const float fixed = value ? heads_.value_scale : heads_.key_scale;
    const float scale = store_head<T, kCache, kBlocks>(v, size, lane(), fixed, memory_.pair[value ? 1 : 0],
                                                       work_.leads ? cache : nullptr);
    if (lane() != 0) return;
    memory_.scales[value ? 1 : 0] = scale;
    if (kCache != CacheType::kFloat && work_.leads) (value ? heads_.value_scales : heads_.key_scales)[at] = scale;
  }

  // fp16 has all that bf16 has only around 1: beside a cache in 8 bits the largest of a query's elements is moved
  // there.
  __device__ void keep_query(int row, const float (&v)[kOfLane<kBlocks>]) {
    float down = 1.0F;
    if constexpr (kCache != CacheType::kFloat) {
      const uint32_t exponent = __float_as_uint(largest_of_head<kBlocks>(v)) >> 23;
      const bool usual = exponent > 0 && exponent < 254;
      down = usual ? __uint_as_float((254 - exponent) << 23) : 1.0F;
      if (lane() == 0) memory_.factors[row] = usual ? __uint_as_float(exponent << 23) : 1.0F;
    }
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kOfLane<kBlocks>; ++i) {
      const int c = lane() + 32 * i;
      if (c >= heads_.head_size) continue;
      const M query = rows::from_float<M>(v[i] * down);
      memory_.queries[row][c] = query;
      sum += to_float(query);
    }
    if constexpr (kCache == CacheType::kInt8) {
      sum = rows::warp_sum(sum);
      if (lane() == 0) memory_.offsets[row] = kOffset * sum;
    }
  }

  __device__ float* partials(int head) const {
    const int most = splits_of(heads_.capacity);
    const int64_t of_head = static_cast<int64_t>(work_.sequence) * heads_.queries + work_.head + head;
    return args_.partials + of_head * most * (heads_.head_size + 2);
  }

  const AttendArgs& args_;
  const HeadsArgs& heads_;
  const Work& work_;
  Memory& memory_;
  float* const values_;
  const Preparation<T, kBlocks> preparation_;
  const float scale_;
};

}  // namespace octofuse::decode
