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
        type(args.type) {
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

// How a stage lies: tiles of kStrips strips, then their scales and zero points.
// kPlain: a chunk has one group or a part of one, and what belongs to it can be copied 16 bytes at a time; kZeros:
// there are zero points. !kPlain serves everything.
template <class Code_, bool kPlain_, bool kZeros_, int kStrips_>
struct Stage {
  using Code = Code_;
  static constexpr bool kPlain = kPlain_;
  static constexpr bool kZeros = kZeros_;
  static constexpr int kStrips = kStrips_;
  static constexpr int kSegments = kPlain ? 1 : kSteps;
  static constexpr int kTile = Code::kBytes * Code::kCount;
  static constexpr int kRows = kStrips * kStrip;
  static constexpr int kScalesAt = kTile * kStrips;  // [segment][plane][row]
  static constexpr int kZerosAt = kScalesAt + kSegments * Code::kCount * kRows * 2;
  static constexpr int kBytes = kZerosAt + (kZeros ? kSegments * kRows : 0);

  __device__ static uint16_t* scales(char* stage) { return reinterpret_cast<uint16_t*>(stage + kScalesAt); }
  __device__ static uint8_t* zeros(char* stage) { return reinterpret_cast<uint8_t*>(stage + kZerosAt); }
};

// A warp's way through the chunks of kStrips strips, then of the next ones, each into a stage of its ring.
template <class Stage>
struct Bringer {
  using Code = typename Stage::Code;
  static constexpr int kTile = Stage::kTile;
  static constexpr int kStrips = Stage::kStrips;
  static constexpr int kScaleCopies = kStrips * 2;  // of 16 bytes, of a segment and plane
  const Weight& w;
  int lane, strip, chunk;
  const char* tiles[kStrips];  // this lane's first 16 bytes
  const char* scale;           // likewise, in group 0
  const char* zero;

  // strip: past the last one where there is nothing to bring.
  __device__ Bringer(const Weight& w, int lane) : w(w), lane(lane) {}

  __device__ void begin(int at_strip, int at_chunk) {
    strip = at_strip;
    chunk = at_chunk;
    const int last = (w.n - 1) / kStrip;  // which stands for one that is missing behind it
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const int64_t tile = static_cast<int64_t>(min(strip + i, last)) * w.chunks + chunk;
      tiles[i] = w.packed + tile * kTile + lane * 16;
    }
    const int of_scale = min(strip * kStrip + lane % kScaleCopies * 8, last * kStrip + 8);
    scale = reinterpret_cast<const char*>(w.scale + of_scale) + lane / kScaleCopies * w.n * int64_t{2};
    if (Stage::kZeros) zero = reinterpret_cast<const char*>(w.zero) + min(strip + lane, last) * kStrip;
  }

  __device__ void advance(int chunks) {
    chunk += chunks;
#pragma unroll
    for (const char*& tile : tiles) tile += static_cast<int64_t>(chunks) * kTile;
  }

  // Asynchronously where it can be; whoever reads waits for the copies, then for the warp.
  __device__ void bring(char* stage) const {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage)) + lane * 16;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int at = 0; at + 512 <= kTile; at += 512) copy_to_stage(to + i * kTile + at, tiles[i] + at);
      if (kTile % 512 != 0) {
        constexpr int kWhole = kTile / 512 * 512;
        copy_to_stage_if(lane < 16, to + i * kTile + kWhole, tiles[i] + kWhole);
      }
    }
    if constexpr (Stage::kPlain) {
      constexpr int kCopies = Code::kCount * kScaleCopies;
      const int group = static_cast<int>(static_cast<uint32_t>(chunk) >> w.groups.log);
      copy_to_stage_if(lane < kCopies, to + Stage::kScalesAt, scale + group * w.scale_pitch);
      if (Stage::kZeros) {
        copy_to_stage_if(lane < kStrips, to + Stage::kZerosAt, zero + static_cast<int64_t>(group) * w.n);
      }
    } else {
      bring_ragged(stage);
    }
  }

 private:
  // Several groups, or places that are not aligned.
  __device__ void bring_ragged(char* stage) const {
    const int segments = w.groups.segments;
    const int rows = segments * Code::kCount;
    if (Code::kCount * kSteps * kScaleCopies <= 32 && w.wide) {  // a copy a lane
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage)) + lane * 16;
      const int first = static_cast<int>(static_cast<uint32_t>(chunk * segments) >> w.groups.log);
      const int behind = min(lane / kScaleCopies, (w.last + 1 - first) * Code::kCount - 1) - lane / kScaleCopies;
      const char* const from = scale + first * w.scale_pitch + behind * w.n * int64_t{2};
      copy_to_stage_if(lane < rows * kScaleCopies, to + Stage::kScalesAt, from);
      const bool has_zero = w.zero != nullptr && lane < segments * kStrips;
      const uint8_t* const zeros = w.zero_row(chunk, min(lane / kStrips, segments - 1)) + zero_column();
      copy_to_stage_if(has_zero, to + Stage::kZerosAt, zeros);
      return;
    }
    for (int i = lane; i < rows * kScaleCopies; i += 32) {
      const int row = i / kScaleCopies;
      const uint16_t* const from = w.scale_row(chunk, row / Code::kCount, row % Code::kCount);
      const int n = strip * kStrip + i % kScaleCopies * 8;
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

  // Of this lane's copy of zero points.
  __device__ int zero_column() const { return min(strip + lane % kStrips, (w.n - 1) / kStrip) * kStrip; }
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
    if (Stage::kZeros && (Stage::kPlain || w.zero != nullptr)) twice[row] = 2 * Stage::zeros(stage)[at + row * 8];
  }
}

}  // namespace octofuse::lowbit
