// The device side of decode_blocks.cu: one block of threads' part in all blocks of a GPT-2.
#pragma once

#include "kernels/attend.cuh"
#include "kernels/messages.cuh"
#include "kernels/row_pass.cuh"
#include "kernels/weight_ring.cuh"
#include "octofuse/decode.h"

namespace octofuse::decode {

using rows::Pack;
using rows::RowOp;

constexpr int kWarps = 15;             // that compute; one more copies weights
constexpr int kWorkers = 32 * kWarps;  // their threads
constexpr int kThreads = kWorkers + 32;
constexpr int kRowThreads = attention::kThreads;  // that normalise, quantise, attend: more would take turns
constexpr int kNormPacks = 1;                     // of a thread
constexpr int kCopyPacks = 4;                     // of a thread; a norm's row is a pack a thread
constexpr int kDepth = 128;                       // bytes of K that a warp takes at a time
constexpr int kRows = 16;                         // channels of a product
constexpr int kMostChannels = 64;
constexpr int kLanes = 8;  // that share a position of attention
constexpr int kMostHead = kLanes * rows::kPack;

enum Kind { kQkv, kProjection, kFc, kOut, kKinds };

// A linear layer, as the blocks of threads share it.
struct Shape {
  int n, k;
  int channels;  // of a block of threads
  int parts;     // warps that share K
  int vectors;   // where its scales and biases lie among those of a layer
};

struct KernelArgs {
  DecodeArgs model;
  Shape shapes[kKinds];
  int vectors;  // floats of a layer
  // Where messages lie: words from the start.
  int attended, middle, hidden, end, parts;
};

// Bytes of shared memory: the ring, then token(), wide() and x().
inline int shared_bytes(const DecodeArgs& model) {
  return weight_ring::kBytes + kDepth + 3 * model.inner + 2 * model.width;
}

__device__ inline void mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int32_t (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Barrier 1 is that of rows::row_barrier.
__device__ inline void workers_meet() { asm volatile("bar.sync 2, %0;" : : "n"(kWorkers) : "memory"); }

template <class T>
class Decode {
 public:
  __device__ Decode(const KernelArgs& args, char* memory)
      : args_(args), model_(args.model), thread_(static_cast<int>(threadIdx.x)), ring_(memory) {}

  __device__ void run() {
    if (thread_ == 0) {
      barriers().init();
      slice_place(0) = 0;
    }
    __syncthreads();
    if (warp() == kWarps) return produce();
    start();
#pragma unroll 1
    for (int layer = 0; layer < model_.layers; ++layer) {
      tag_ = first_tag_ + static_cast<uint32_t>(layer);
#pragma unroll 1
      for (int kind = 0; kind < kKinds; ++kind) {
        linear(layer, kind);
        if (kind == kQkv) attend(layer);
      }
    }
    if (blockIdx.x == 0) finish();
  }

 private:
  __device__ static weight_ring::Barriers& barriers() {
    __shared__ weight_ring::Barriers all;
    return all;
  }
  // Where a slice begins in the ring: written while the one before is multiplied.
  __device__ static int& slice_place(int slice) {
    __shared__ int places[2];
    return places[slice % 2];
  }
  __device__ static float& token_scale() {
    __shared__ float scale;
    return scale;
  }
  __device__ static int32_t* sums() {
    __shared__ int32_t all[kWarps * kMostChannels];
    return all;
  }

  // Of each linear layer: this warp's first channel, and its part of K. Not in registers, of which none is left.
  __device__ int2& warp_place(int kind) const {
    __shared__ int2 all[kWarps][kKinds];
    return all[warp()][kind];
  }

  __device__ int lane() const { return static_cast<int>(static_cast<uint32_t>(thread_) % 32); }
  __device__ int warp() const { return static_cast<int>(static_cast<uint32_t>(thread_) / 32); }

  // `value`, as if it had just been read: what follows from it is found again each time, instead of being kept in
  // registers from layer to layer, of which none is left.
  __device__ static int fresh(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ void forget() { thread_ = fresh(thread_); }

  __device__ int inner() const { return fresh(model_.inner); }
  // [inner + kDepth] int8
  __device__ char* token() const { return ring_ + weight_ring::kBytes; }
  // A norm's weight and bias, or a token to be quantised: 2 * inner bytes.
  __device__ uint4* wide() const { return reinterpret_cast<uint4*>(token() + inner() + kDepth); }
  // [width], in fp16 or bf16: what is added to the projections' outputs.
  __device__ uint4* x() const { return reinterpret_cast<uint4*>(token() + 3 * inner() + kDepth); }

  __device__ uint64_t* words(int at) const { return model_.messages + at; }
  __device__ int packs() const { return model_.width / rows::kPack; }
  __device__ int first_channel(const Shape& shape) const { return static_cast<int>(blockIdx.x) * shape.channels; }
  // This block's; none where the others have all of them.
  __device__ int channels_of(const Shape& shape) const {
    return max(0, min(shape.channels, shape.n - first_channel(shape)));
  }

  // The copying warp: nothing in flight writes weights.
  __device__ void produce() {
    if (lane() != 0) return;
    const auto bytes = [&](int slice) {
      const Shape& shape = args_.shapes[slice % kKinds];
      return channels_of(shape) * shape.k;
    };
    const auto source = [&](int slice) {
      const Shape& shape = args_.shapes[slice % kKinds];
      return model_.weights[slice] + static_cast<int64_t>(first_channel(shape)) * shape.k;
    };
    weight_ring::produce(model_.layers * kKinds, bytes, source, ring_, barriers());
  }

  // The token's embedding, and this launch's own tags.
  __device__ void start() {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const uint32_t launches = *static_cast<volatile uint32_t*>(model_.launches);
    first_tag_ = launches * static_cast<uint32_t>(model_.layers) + 1;
    place_ = static_cast<int>(*model_.places);
    if (lane() < kKinds) {
      const int parts = args_.shapes[lane()].parts;
      warp_place(lane()) = {warp() / parts * kRows, warp() % parts};
    }
    if (thread_ >= packs()) return;
    const int64_t id = *model_.ids;
    const auto* token = static_cast<const Pack<T>*>(model_.tokens) + id * packs();
    const auto* position = static_cast<const Pack<T>*>(model_.positions) + static_cast<int64_t>(place_) * packs();
    Pack<float> sum = rows::widen(token[thread_]);
    const Pack<float> other = rows::widen(position[thread_]);
#pragma unroll
    for (int j = 0; j < rows::kPack; ++j) sum.values[j] = __fadd_rn(sum.values[j], other.values[j]);
    reinterpret_cast<Pack<T>*>(x())[thread_] = rows::narrow<T>(sum);
  }

  // The last block's output to memory, as it is or normalised.
  __device__ void finish() {
    if (warp() * 32 >= kRowThreads) return;
    if (model_.final_norm) return take_normed(2 * model_.layers, args_.end, tag_, 0.0F, static_cast<T*>(model_.out));
    if (thread_ >= packs()) return;
    static_cast<uint4*>(model_.out)[thread_] = messages::receive(words(args_.end) + 4 * thread_, tag_);
  }

  __device__ void linear(int layer, int kind) {
    forget();
    layer = fresh(layer);
    const Shape& shape = args_.shapes[kind];
    const int n0 = first_channel(shape);
    const int channels = channels_of(shape);
    const bool inside = thread_ < channels;
    const bool is_norm = kind == kQkv || kind == kFc;
    // On their way, or found, before anything is waited for.
    const float* const vectors = model_.vectors + static_cast<int64_t>(layer) * args_.vectors + shape.vectors + n0;
    const float w_scale = inside ? vectors[thread_] : 0.0F;
    const float bias = inside ? vectors[shape.n + thread_] : 0.0F;
    const float residual = inside && !is_norm ? to_float(reinterpret_cast<const T*>(x())[n0 + thread_]) : -0.0F;
    const float* const scales = model_.scales + layer * kKinds;
    const float given = scales[kind];
    const float next = kind == kFc ? scales[kOut] : 0.0F;
    const float next_inverse = reciprocal(next);
    const int slice = layer * kKinds + kind;
    Product product(*this, shape, slice, channels);
    if (!is_norm) {
      take(kind == kProjection ? args_.attended : args_.hidden, shape.k, given);
    } else if (warp() * 32 < kRowThreads) {
      const bool first = kind == kQkv;
      take_normed(2 * layer + (first ? 0 : 1), first ? args_.end : args_.middle, first ? tag_ - 1 : tag_, given,
                  nullptr);
    }
    // Behind the token's end zeros: weights are read in whole steps.
    if (thread_ < kDepth / 16) reinterpret_cast<uint4*>(token() + shape.k)[thread_] = make_uint4(0, 0, 0, 0);
    weight_ring::wait(slice, barriers());
    workers_meet();
    if (thread_ == 0) slice_place(slice + 1) = weight_ring::wrapped(slice_place(slice) + channels * shape.k);
    product.run(*this, shape);
    workers_meet();
    if (thread_ == 0) weight_ring::release(slice, barriers());
    if (warp() * 32 >= channels) return;
    const int32_t total = total_of(shape);
    const Operands<1> operands{{w_scale}, {given > 0.0F ? given : token_scale()}, {bias}, {residual}, {0}, {0}};
    const int at = kind == kQkv ? 0 : kind == kProjection ? args_.middle : kind == kFc ? args_.hidden : args_.end;
    if (next > 0.0F) {
      const int8_t q = finished<int8_t>(total, operands, kind, next_inverse);
      return messages::send_joined<1>(words(at) + (n0 + thread_) / 4, static_cast<uint8_t>(q), tag_, inside);
    }
    const T y = finished<T>(total, operands, kind, 0.0F);
    messages::send_joined<2>(words(at) + (n0 + thread_) / 2, *reinterpret_cast<const uint16_t*>(&y), tag_, inside);
  }

  // The token in floating point, which lies at `at` (the first one is there), through a layer norm, and quantised or to
  // y: rows::pass_row for a row that fits a pack a thread, in half the instructions.
  __device__ void take_normed(int norm, int at, uint32_t tag, float given, T* y) {
    __shared__ float of_group[2][kRowThreads / 32];
    __shared__ uint32_t of_warp[kRowThreads / 32];
    const bool mine = thread_ < packs();
    const auto* const affine = static_cast<const Pack<T>*>(model_.norms) + static_cast<int64_t>(norm) * 2 * packs();
    const float eps = model_.eps[norm];
    const float cols = static_cast<float>(model_.width);
    float inverse = reciprocal(given);
    Pack<float> row = {};
    auto* const staged = reinterpret_cast<Pack<T>*>(wide()) + thread_;  // read by this thread alone
    if (mine) {
      const Pack<T> weight = affine[thread_];
      const Pack<T> bias = affine[packs() + thread_];
      if (norm != 0) x()[thread_] = messages::receive(words(at) + 4 * thread_, tag);
      staged[0] = weight;
      staged[packs()] = bias;
      row = rows::widen(reinterpret_cast<const Pack<T>*>(x())[thread_]);
    }
    __syncwarp();
    const float mean = __fdiv_rn(sum_of_row(row, of_group[0]), cols);
    Pack<float> squares = {};
    if (mine) {
#pragma unroll
      for (int j = 0; j < rows::kPack; ++j) {
        row.values[j] = __fsub_rn(row.values[j], mean);
        squares.values[j] = __fmul_rn(row.values[j], row.values[j]);
      }
    }
    const float root = rows::inverse_root(sum_of_row(squares, of_group[1]), model_.width, eps);
    Pack<T> normed = {};
    if (mine) {
      const Pack<float> factor = rows::widen(staged[0]);
      const Pack<float> term = rows::widen(staged[packs()]);
#pragma unroll
      for (int j = 0; j < rows::kPack; ++j) {
        row.values[j] = __fadd_rn(__fmul_rn(__fmul_rn(row.values[j], root), factor.values[j]), term.values[j]);
      }
      normed = rows::narrow<T>(row);
    }
    if (y != nullptr) {
      if (mine) reinterpret_cast<Pack<T>*>(y)[thread_] = normed;
      return;
    }
    if (given <= 0.0F) {
      rows::Largest<T> largest;
      largest.take(normed);
      const float scale = rows::scale_of(rows::row_max<kRowThreads>(largest.value(), thread_, of_warp));
      if (thread_ == 0) token_scale() = scale;
      inverse = reciprocal(scale);
    }
    if (!mine) return;
    Pack<int8_t> out;
    round_to(rows::widen(normed).values, -127, inverse, out.values);
    reinterpret_cast<Pack<int8_t>*>(token())[thread_] = out;
  }

  // The sum of a row of a pack a thread, in the order of rows.cuh.
  __device__ float sum_of_row(const Pack<float>& terms, float* of_group) const {
    const float group = rows::warp_sum(rows::tree_sum(terms.values));
    if (lane() == 0) of_group[warp()] = group;
    rows::row_barrier<kRowThreads>();
    return rows::few_groups_sum(of_group, (packs() + 31) / 32);
  }

  // The token that attention or c_fc has made: in int8 already, where there is a scale for it.
  __device__ void take(int at, int k, float given) {
    if (given > 0.0F) {
#pragma unroll 1
      for (int i = thread_; i < k / 16; i += kWorkers) {
        reinterpret_cast<uint4*>(token())[i] = messages::receive(words(at) + 4 * i, tag_);
      }
      return;
    }
    if (warp() * 32 >= kRowThreads) return;
#pragma unroll 1
    for (int i = thread_; i < k / rows::kPack; i += kRowThreads) {
      wide()[i] = messages::receive(words(at) + 4 * i, tag_);
    }
    __shared__ rows::Meeting<kRowThreads, rows::kMaxGroups<kRowThreads, kCopyPacks>> meeting;
    RowPassArgs row;
    row.cols = k;
    row.x = wide();
    row.q = reinterpret_cast<int8_t*>(token());
    row.scales = &token_scale();
    rows::pass_row<T, RowOp::kCopy, kRowThreads, kCopyPacks>(row, [] { return 0.0F; }, 0, thread_, meeting);
  }

  // Sums over a warp's part of K, to sums()[part][channel], by mma.sync (m16n8k32): channels are its 16 rows. A lane
  // reads 16 consecutive bytes of two rows and of the token, which is every column; the order of K inside a product
  // does not matter as long as they agree. So of odd rows and columns the halves of kDepth bytes are exchanged where
  // two rows would lie in the same banks, and an odd row's sum is that of an odd column.
  struct Product {
    int k;                       // where the warp's next step of K begins; behind the end if it has none
    int exchange, x, low, high;  // of this lane: places of the token and of two rows
    int part, row;

    __device__ Product(const Decode& of, const Shape& shape, int slice, int channels) {
      const int2 place = of.warp_place(slice % kKinds);
      const int quad = of.lane() / 4;
      part = place.y;
      row = place.x + quad;
      k = place.x < channels ? part * kDepth : shape.k;
      exchange = shape.k % kDepth == 0 ? quad % 2 * 64 : 0;
      x = k + of.lane() % 4 * 16;
      const int at = slice_place(slice) + x;
      low = at + min(row, channels - 1) * shape.k;
      high = at + min(row + 8, channels - 1) * shape.k;
    }

    __device__ void run(const Decode& of, const Shape& shape) {
      if (k >= shape.k) return;
      const int step = shape.parts * kDepth;
      int32_t acc[2][4] = {};
#pragma unroll 1
      for (; k < shape.k; k += step) {
        uint4 words[2][3];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int piece = half * 64 ^ exchange;
          words[half][0] = *reinterpret_cast<const uint4*>(of.token() + x + piece);
          words[half][1] = *reinterpret_cast<const uint4*>(of.ring_ + weight_ring::wrapped(low + piece));
          words[half][2] = *reinterpret_cast<const uint4*>(of.ring_ + weight_ring::wrapped(high + piece));
        }
#pragma unroll
        for (const auto& [token, even, odd] : words) {
          const uint32_t front[4] = {even.x, odd.x, even.y, odd.y};
          const uint32_t back[4] = {even.z, odd.z, even.w, odd.w};
          mma(front, token.x, token.y, acc[0]);
          mma(back, token.z, token.w, acc[1]);
        }
        x += step;
        low += step;
        high += step;
      }
      if (of.lane() % 4 != 0) return;
      int32_t* const to = sums() + part * kMostChannels + row;
      const bool odd = row % 2 != 0;
      to[0] = odd ? acc[0][1] + acc[1][1] : acc[0][0] + acc[1][0];
      to[8] = odd ? acc[0][3] + acc[1][3] : acc[0][2] + acc[1][2];
    }
  };

  __device__ int32_t total_of(const Shape& shape) const {
    const int32_t* const own = sums() + min(thread_, kMostChannels - 1);
    int32_t total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += i < shape.parts ? own[i * kMostChannels] : 0;
    return total;
  }

  template <class Out>
  __device__ Out finished(int32_t total, const Operands<1>& operands, int kind, float inverse) const {
    int32_t acc[1] = {total};
    Out values[1];
    const auto activate = [&](auto& t) {
      if (kind == kFc) activate_by<Out, false>(model_.activation, t);
    };
    epilogue<Out>(acc, operands, activate, -127, inverse, values);
    return values[0];
  }

  // Attention: eight warps take a head's chunk of positions. Those behind the first chunk come first: the first one's
  // threads wait for them.
  __device__ void attend(int layer) {
    forget();
    layer = fresh(layer);
    const float scale = model_.scales[layer * kKinds + kProjection];
    const int chunks = place_ / kAttendChunk + 1;
    if (warp() >= attention::kWarps) return;
#pragma unroll 1
    for (int item = static_cast<int>(blockIdx.x); item < model_.heads * chunks; item += static_cast<int>(gridDim.x)) {
      attend_chunk(layer, item % model_.heads, chunks - 1 - item / model_.heads, chunks, scale);
    }
  }

  __device__ void attend_chunk(int layer, int head, int chunk, int chunks, float scale) {
    __shared__ attention::Scratch<kLanes> scratch;
    const int size = model_.head_size;
    const int column = lane() % kLanes * rows::kPack;
    const int64_t of_layer = static_cast<int64_t>(model_.heads) * model_.capacity * size;
    AttendArgs cache;
    cache.head_size = size;
    cache.keys = static_cast<T*>(model_.pairs) + 2 * layer * of_layer;
    cache.values = static_cast<T*>(cache.keys) + of_layer;
    attention::Positions<T, kLanes> positions;
    positions.place = place_;
    positions.first = chunk * kAttendChunk + warp() * positions.kAtOnce + lane() / kLanes;
    positions.cache = static_cast<int64_t>(head) * model_.capacity * size + column;
    positions.inside = column < size;
    const int before = chunk * kAttendChunk + warp() * positions.kAtOnce;  // this warp's first position
    positions.passes = (place_ + positions.kPass - before) / positions.kPass;
    positions.load(cache);
    uint4 qkv[3] = {};
    if (positions.inside) {
      const uint64_t* const from = words(0) + (head * size + column) / 2;
      messages::receive_strided(from, model_.width / 2, positions.has_new() ? 3 : 1, tag_, qkv);
    }
    positions.append(cache, [&](int part) { return qkv[part]; });
    __syncwarp();
    attention::Part part =
        attention::attend_chunk(positions, qkv[0], size, thread_, scratch, [] { rows::row_barrier<kRowThreads>(); });
    if (warp() * 32 >= size) return;
    const int most = (model_.capacity + kAttendChunk - 1) / kAttendChunk;
    uint64_t* const parts = words(args_.parts) + head * most * (size + 2);
    if (chunk > 0) return send_part(parts + chunk * (size + 2), part, thread_);
    if (chunks > 1) {
      const attention::Part own = part;
      part = attention::combine_chunks(
          chunks, [&](int i) { return i == 0 ? own : receive_part(parts + i * (size + 2), thread_); });
    }
    const T rounded = attention::finished<T>(part);
    const int at = head * size + thread_;
    if (scale > 0.0F) {
      const int8_t q = requantize(to_float(rounded), reciprocal(scale), -127);
      messages::send_joined<1>(words(args_.attended) + at / 4, static_cast<uint8_t>(q), tag_, thread_ < size);
    } else {
      messages::send_joined<2>(words(args_.attended) + at / 2, *reinterpret_cast<const uint16_t*>(&rounded), tag_,
                               thread_ < size);
    }
  }

  __device__ void send_part(uint64_t* to, const attention::Part& part, int thread) const {
    if (thread < model_.head_size) messages::send(to + thread, __float_as_uint(part.value), tag_);
    if (thread != 0) return;
    messages::send(to + model_.head_size, __float_as_uint(part.highest), tag_);
    messages::send(to + model_.head_size + 1, __float_as_uint(part.weight), tag_);
  }

  __device__ attention::Part receive_part(const uint64_t* from, int thread) const {
    const auto one = [&](int at) { return __uint_as_float(messages::receive_one(from + at, tag_)); };
    return {one(model_.head_size), one(model_.head_size + 1), one(min(thread, model_.head_size - 1))};
  }

  const KernelArgs& args_;
  const DecodeArgs& model_;
  int thread_;
  char* const ring_;
  uint32_t first_tag_ = 0, tag_ = 0;  // of this launch's first layer, and of this layer
  int place_ = 0;                     // the token's
};

}  // namespace octofuse::decode
