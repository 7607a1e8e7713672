// What the kernels for up to 4 tokens share: one block an SM or two, whose 16 warps share K and bring their codes
// through rings in shared memory; tokens lie beside them, converted once while the first codes are on their way; the
// warps' sums meet at the end of each unit of rows.
#pragma once

#include <algorithm>

#include "kernels/launch.h"
#include "kernels/lowbit_stage.cuh"
#include "kernels/lowbit_tokens.cuh"
#include "octofuse/device.h"

namespace octofuse::lowbit {

constexpr int kThreads = 32 * kParts;

// Shared memory: tokens, what there is to know of them, two sets of the parts' sums, rings.
struct Places {
  int facts, parts, ring;
};

// What comes first in a kernel comes first here: constants are cold when it starts.
struct GemvArgs {
  const void* x;
  int64_t ldx;
  int m, k;
  int log_tokens;  // slots for tokens: 1, 2 or 4
  int strips, stages;
  int sm_count, room;  // bytes of shared memory of a block
  bool few_strips;     // no more than SMs
  bool x_is_int8;
  bool wide_x;  // 16 bytes can be copied at once
  bool constant_weight, chained;
  Places places;
  Weight w;
  Epilogue epilogue;

  GemvArgs(const LowbitArgs& args, bool chained, int device)
      : x(args.x),
        ldx(args.ldx),
        m(args.m),
        k(args.k),
        log_tokens(args.m > 2 ? 2 : args.m - 1),
        strips((args.n + kStrip - 1) / kStrip),
        stages(0),
        sm_count(device_capability(device).sm_count),
        room(device_capability(device).shared_memory),
        few_strips(strips <= sm_count),
        x_is_int8(args.x_is_int8),
        wide_x((args.ldx % (x_is_int8 ? 16 : 8) == 0 || args.m == 1) && reinterpret_cast<uintptr_t>(args.x) % 16 == 0),
        constant_weight(args.constant_weight),
        chained(chained),
        places{},
        w(args),
        epilogue(args) {}
};

// A kernel as the host sees it.
struct Gemv {
  const void* function;
  DeviceFlags* raised;
  int strips, stage_bytes;
  int deep, shallow;  // stages of a warp where they fit, and where they do not

  bool fits(GemvArgs args) const { return lay_out(args, shallow) <= args.room; }

  void launch(const char* name, GemvArgs args, int device, cudaStream_t stream) const {
    allow_shared_memory(function, args.room, device, *raised);
    const bool has_room = lay_out(args, deep) <= args.room;
    const int shared = lay_out(args, has_room ? deep : shallow);
    const int blocks = std::min((args.strips + strips - 1) / strips, args.sm_count);
    launch_kernel(name, function, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared, dim3(1), args.chained,
                  &args, stream);
  }

 private:
  // The block's shared memory, with so many stages a warp.
  int lay_out(GemvArgs& args, int stages) const {
    const int tokens = 1 << args.log_tokens;
    Places& places = args.places;
    args.stages = stages;
    places.facts = args.w.chunks * tokens * 2 * kChunk;
    places.parts = (places.facts + args.w.chunks * args.w.groups.segments * tokens * 8 + 15) / 16 * 16;
    places.ring = (places.parts + 2 * kParts * strips * kStrip * tokens * 4 + 127) / 128 * 128;
    return places.ring + kParts * stages * stage_bytes;
  }
};

// Kind has kBytes of a stage, and these numbers.
template <class Kind>
Gemv gemv_of(void (*kernel)(GemvArgs)) {
  static DeviceFlags raised;
  return {reinterpret_cast<const void*>(kernel), &raised, Kind::kStrips, Kind::kBytes, Kind::kDeep, Kind::kShallow};
}

#ifdef __CUDACC__

// This thread's warp in a form that the compiler knows to be the same for all of it: places in the ring stay in uniform
// registers, and loops are 4 to 8 % shorter.
__device__ inline int this_warp() { return __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x / 32), 0); }

// All copies but the youngest, as many groups of them as there are stages but for `kBut`: an immediate.
template <class Kind, int kBut>
__device__ inline void wait_for_copies(int stages) {
  if (Kind::kDeep == Kind::kShallow || stages != Kind::kDeep) {
    asm volatile("cp.async.wait_group %0;" : : "n"(Kind::kShallow - kBut) : "memory");
  } else {
    asm volatile("cp.async.wait_group %0;" : : "n"(Kind::kDeep - kBut) : "memory");
  }
}

// The tokens' way into shared memory, a chunk of one of them by a warp: as they are, then as integers in the same 256
// bytes.
template <class Form>
class Tokens {
  const GemvArgs& args_;
  char* memory_;
  TokenChunk* facts_;
  int log_tokens_, segments_, count_, lane_, first_;

 public:
  // log_tokens, segments: those of the arguments, perhaps known to the compiler.
  __device__ Tokens(const GemvArgs& args, int log_tokens, int segments, char* memory)
      : args_(args),
        memory_(memory),
        facts_(reinterpret_cast<TokenChunk*>(memory + args.places.facts)),
        log_tokens_(log_tokens),
        segments_(segments),
        count_(args.w.chunks << log_tokens),
        lane_(static_cast<int>(threadIdx.x % 32)),
        first_(static_cast<int>(threadIdx.x / 32)) {}

  // A group of asynchronous copies: half a warp a chunk, of int8 half of that.
  __device__ void load() const {
    const int bytes = args_.x_is_int8 ? 1 : 2;  // of a column
    const int at = lane_ % 16 * 16;
    const int first = at < bytes * kChunk ? first_ + lane_ / 16 * kParts : count_;
#pragma unroll 1
    for (int item = first; item < count_; item += 2 * kParts) {
      const int token = min(item & ((1 << log_tokens_) - 1), args_.m - 1);
      const int k = (item >> log_tokens_) * kChunk * bytes + at;
      const int left = args_.k * bytes - k;  // and zeros behind the last column
      const char* const from = static_cast<const char*>(args_.x) + token * args_.ldx * bytes + k;
      char* const to = memory_ + item * 2 * kChunk + at;
      if (args_.wide_x && left >= 16) {
        copy_to_stage(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from);
      } else if (left <= 0) {
        *reinterpret_cast<uint4*>(to) = uint4{};
      } else {
#pragma unroll 1
        for (int i = 0; i < 16; i += bytes) copy_column(from + i, to + i, i < left);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // When this thread's copies have arrived.
  __device__ void convert(float factor) const {
    const Columns columns(lane_);
    __syncwarp();  // and the others'
#pragma unroll 1
    for (int item = first_; item < count_; item += 2 * kParts) {
      const bool second = item + kParts < count_;
      char* const places[2] = {memory_ + item * 2 * kChunk, second ? memory_ + (item + kParts) * 2 * kChunk : nullptr};
      const char* const others = second ? places[1] : places[0];
      Integers integers[2];
      if (args_.x_is_int8) {
        integers[0] = Integers(columns.load_int8(places[0]));
        integers[1] = Integers(columns.load_int8(others));
      } else {
        float v[2][4];
        columns.load(places[0], args_.w.type, v[0]);
        columns.load(others, args_.w.type, v[1]);
        Integers::make(v, integers);
      }
      __syncwarp();  // all have read
      Form::store(integers, places, columns);
      store_facts(integers[0], item, columns, factor);
      if (second) store_facts(integers[1], item + kParts, columns, factor);
    }
  }

 private:
  __device__ void copy_column(const char* from, char* to, bool exists) const {
    if (args_.x_is_int8) {
      *to = exists ? *from : 0;
    } else {
      *reinterpret_cast<uint16_t*>(to) = exists ? *reinterpret_cast<const uint16_t*>(from) : 0;
    }
  }

  __device__ void store_facts(const Integers& of, int item, const Columns& columns, float factor) const {
    const int tokens = 1 << log_tokens_;
    TokenChunk* const facts = facts_ + (item >> log_tokens_) * segments_ * tokens + (item & (tokens - 1));
#pragma unroll 1
    for (int i = 0; i < segments_; ++i) {
      const int sum = __reduce_add_sync(0xFFFFFFFFU, columns.step * segments_ / kSteps == i ? of.sum : 0);
      if (lane_ == 0) facts[i * tokens] = {of.stands_for * factor, sum};
    }
  }
};

// This thread's output of the rows that are summed together.
template <int kRows>
struct Place {
  int token, n;
  bool exists;

  __device__ Place(const GemvArgs& args, int strip)
      : token(static_cast<int>(threadIdx.x / kRows)),
        n(strip * kStrip + static_cast<int>(threadIdx.x % kRows)),
        exists(token < args.m && n < args.w.n) {}
};

#endif

}  // namespace octofuse::lowbit
