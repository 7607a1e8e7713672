// A stage of a warp's ring: one tile of codes with its scales and zero points, on its way to shared memory.
#pragma once

#include "kernels/launch.h"
#include "kernels/lowbit_tile.cuh"
#include "kernels/rows.cuh"

namespace octofuse::lowbit {

// f(Format()) for what a weight's codes are at compile time; how many planes they have is known at run time alone.
template <LowbitFormat kFormat_, int kBits_>
struct Format {
  static constexpr LowbitFormat kFormat = kFormat_;
  static constexpr int kBits = kBits_;
};

template <int kBits = 8, class F>
void with_format(const LowbitArgs& args, F f) {
  if (args.format == LowbitFormat::kPlanes) return f(Format<LowbitFormat::kPlanes, 0>());
  if (args.format == LowbitFormat::kSparse12) return f(Format<LowbitFormat::kSparse12, 0>());
  if (args.bits == kBits) return f(Format<LowbitFormat::kUniform, kBits>());
  if constexpr (kBits > 1) with_format<kBits - 1>(args, f);
}

// What every kernel knows of a weight.
struct Weight {
  const char* packed;
  const uint16_t* scale;  // [groups * planes, n]
  const uint8_t* zero;
  int n, chunks;
  int last;    // group
  int planes;  // 1 but for planes
  Groups groups;
  DType type;
  int has_zeros;        // not a bool: loops would have to unpack its byte
  bool wide;            // 8 scales and 16 zero points can be copied at once
  int64_t scale_pitch;  // bytes from group to group

  explicit Weight(const LowbitArgs& args)
      : packed(reinterpret_cast<const char*>(args.packed)),
        scale(static_cast<const uint16_t*>(args.scale)),
        zero(args.zero),
        n(args.n),
        chunks((args.k + kChunk - 1) / kChunk),
        last(args.group == 0 ? 0 : (args.k - 1) / args.group),
        planes(args.format == LowbitFormat::kPlanes ? args.bits : 1),
        groups(args.group),
        type(args.type),
        has_zeros(args.zero != nullptr) {
    const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
    wide = args.n % 16 == 0 && aligned(scale) && aligned(zero);
    scale_pitch = int64_t{2} * args.n * planes;
  }

#ifdef __CUDACC__
  // Of a chunk's segment. The last chunk may have fewer groups than others: what stands for one that is missing meets
  // codes of no column.
  __device__ const uint16_t* scale_row(int chunk, int segment, int plane) const {
    return scale + (static_cast<int64_t>(min(groups.of(chunk, segment), last)) * planes + plane) * n;
  }
  __device__ const uint8_t* zero_row(int chunk, int segment) const {
    return zero + static_cast<int64_t>(min(groups.of(chunk, segment), last)) * n;
  }
#endif
};

__device__ inline void copy_to_stage(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}

// Without a branch.
__device__ inline void copy_to_stage_if(bool copies, uint32_t to, const void* from) {
  asm volatile("{\n.reg .pred copies;\nsetp.ne.b32 copies, %2, 0;\n@copies cp.async.cg.shared.global [%0], [%1], 16;\n}"
               :
               : "r"(to), "l"(from), "r"(static_cast<int>(copies))
               : "memory");
}

// How a chunk lies in a stage: tiles of kStrips strips, then their scales [segment][plane][row] and zero points
// [segment][row]. A stage starts at a multiple of 128 bytes: with lines of memory copied across lines of shared memory,
// 8 bits at 12288 squared took 41 us instead of 36.
// kGroups: how many a chunk has, whose rows can be copied 16 bytes at a time; 0 serves everything.
template <class Code_, int kGroups_, int kStrips_>
struct Stage {
  using Code = Code_;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kMayHaveZeros = !Code::kPlanes && !Code::kSparse;
  static constexpr int kStrips = kStrips_;
  static constexpr int kSegments = kGroups == 0 ? kSteps : kGroups;
  static constexpr int kTile = Code::kBytes * Code::kCount;
  static constexpr int kRows = kStrips * kStrip;
  static constexpr int kScalesAt = kTile * kStrips;
  static constexpr int kZerosAt = kScalesAt + kSegments * Code::kCount * kRows * 2;
  static constexpr int kBytes = (kZerosAt + (kMayHaveZeros ? kSegments * kRows : 0) + 127) / 128 * 128;

  __device__ static uint16_t* scales(char* stage) { return reinterpret_cast<uint16_t*>(stage + kScalesAt); }
  __device__ static uint8_t* zeros(char* stage) { return reinterpret_cast<uint8_t*>(stage + kZerosAt); }
  __device__ static bool has_zeros(const Weight& w) { return kMayHaveZeros && w.has_zeros != 0; }
};

// A warp's way through the chunks of kStrips strips, then of the next ones, each into a stage of its ring.
template <class Stage>
struct Bringer {
  using Code = typename Stage::Code;
  static constexpr int kTile = Stage::kTile;
  static constexpr int kStrips = Stage::kStrips;
  static constexpr int kLanes = 32 / kStrips;  // which bring a strip's tile
  static constexpr int kCopies = kStrips * 2;  // of 16 bytes, of a row of scales
  const Weight& w;
  int lane, strip, chunk;
  int place, code_place;  // of what this lane copies, in a stage: scales and zero points; codes
  const char* tile;       // this lane's first 16 bytes
  const char* scale;      // likewise, in the first row
  const uint8_t* zero;

  // strip: past the last one where there is nothing to bring.
  __device__ Bringer(const Weight& w, int lane)
      : w(w), lane(lane), place(lane * 16), code_place(place + lane / kLanes * (kTile - kLanes * 16)) {
    asm volatile("" : "+r"(place), "+r"(code_place));  // kept, not made again for every stage
  }

  __device__ void begin(int at_strip, int at_chunk) {
    strip = at_strip;
    chunk = at_chunk;
    const int last = (w.n - 1) / kStrip;  // which stands for one that is missing behind it
    const int64_t first = static_cast<int64_t>(min(strip + lane / kLanes, last)) * w.chunks + chunk;
    tile = w.packed + first * kTile + lane % kLanes * 16;
    scale = reinterpret_cast<const char*>(w.scale + min(strip * kStrip + lane % kCopies * 8, last * kStrip + 8));
    zero = w.zero + min(strip + lane % kStrips, last) * kStrip;
  }

  __device__ void advance(int chunks) {
    chunk += chunks;
    tile += static_cast<int64_t>(chunks) * kTile;
  }

  // Asynchronously where it can be; whoever reads waits for the copies, then for the warp.
  __device__ void bring(char* stage) const {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage)) + place;
    const auto codes = static_cast<uint32_t>(__cvta_generic_to_shared(stage)) + code_place;
#pragma unroll
    for (int at = 0; at < kTile; at += kLanes * 16) {
      if (at + kLanes * 16 <= kTile) {
        copy_to_stage(codes + at, tile + at);
      } else {
        copy_to_stage_if(lane * 16 < kTile - at, codes + at, tile + at);
      }
    }
    if constexpr (Stage::kGroups == 0) {
      bring_ragged(stage);
    } else {
      bring_rows(to);
    }
  }

 private:
  __device__ void bring_rows(uint32_t to) const {
    constexpr int kGroups = Stage::kGroups;
    constexpr int kRows = kGroups * Code::kCount;
    const int group = kGroups == 1 ? static_cast<int>(static_cast<uint32_t>(chunk) >> w.groups.log) : chunk * kGroups;
#pragma unroll
    for (int at = 0; at < kRows * kCopies; at += 32) {
      const uint32_t row = existing(group * Code::kCount + (lane + at) / kCopies, Code::kCount);
      copy_to_stage_if(lane + at < kRows * kCopies, to + Stage::kScalesAt + at * 16,
                       scale + uint64_t{row} * (2U * w.n));
    }
    if (!Stage::has_zeros(w)) return;
    const uint32_t row = existing(group + lane / kStrips, 1);
    copy_to_stage_if(lane < kGroups * kStrips, to + Stage::kZerosAt, zero + uint64_t{row} * w.n);
  }

  // The last chunk may have fewer groups than others: what stands for one that is missing meets codes of no column.
  __device__ uint32_t existing(int row, int of_group) const {
    return static_cast<uint32_t>(Stage::kGroups == 1 ? row : min(row, (w.last + 1) * of_group - 1));
  }

  // Several groups, or places that are not aligned.
  __device__ void bring_ragged(char* stage) const {
    const int segments = w.groups.segments;
    const int rows = segments * Code::kCount;
    for (int i = lane; i < rows * kCopies; i += 32) {
      const int row = i / kCopies;
      const uint16_t* const from = w.scale_row(chunk, row / Code::kCount, row % Code::kCount);
      const int n = strip * kStrip + i % kCopies * 8;
      uint16_t* const to = Stage::scales(stage) + i * 8;
      if (w.wide && n < w.n) {
        copy_to_stage(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from + n);
      } else {
        for (int j = 0; j < 8; ++j) to[j] = from[min(n + j, w.n - 1)];
      }
    }
    for (int i = lane; w.zero != nullptr && i < segments * Stage::kRows; i += 32) {
      const int n = min(strip * kStrip + i % Stage::kRows, w.n - 1);
      Stage::zeros(stage)[i] = w.zero_row(chunk, i / Stage::kRows)[n];
    }
  }
};

// A plane's scales of a segment for rows lane / 4 and lane / 4 + 8 of a strip.
template <class Stage>
__device__ inline void read_scales(DType type, char* stage, int segment, int plane, int strip, int lane,
                                   float (&scale)[2]) {
  const int at = (segment * Stage::Code::kCount + plane) * Stage::kRows + strip * kStrip + lane / 4;
#pragma unroll
  for (int row = 0; row < 2; ++row) scale[row] = half_of(Stage::scales(stage)[at + row * 8], type);
}

// Twice their zeros.
template <class Stage>
__device__ inline void read_zeros(const Weight& w, char* stage, int segment, int strip, int lane, int (&twice)[2]) {
  const int at = segment * Stage::kRows + strip * kStrip + lane / 4;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    twice[row] = Stage::Code::kTwiceMiddle;
    if (Stage::has_zeros(w)) twice[row] = 2 * Stage::zeros(stage)[at + row * 8];
  }
}

}  // namespace octofuse::lowbit
