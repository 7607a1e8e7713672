// What a warp of the gemv kernels streams: the tiles of its K slice with their scales and zero points, each into a
// stage of the warp's own ring in shared memory.
#pragma once

#include "device/ptx.cuh"
#include "lowbit/codes.cuh"

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
  if (args.format == LowbitFormat::kCodebook) return f(Format<LowbitFormat::kCodebook, 4>());
  if (args.format == LowbitFormat::kFloat8) return f(Format<LowbitFormat::kFloat8, 8>());
  if (args.bits == kBits) return f(Format<LowbitFormat::kUniform, kBits>());
  if constexpr (kBits > 1) with_format<kBits - 1>(args, f);
}

// The same for weights that are integers of 8 bits beside int8 tokens.
template <int kBits = 8, class F>
void with_integer_format(const LowbitArgs& args, F f) {
  if (args.format == LowbitFormat::kTwoLevel) return f(Format<LowbitFormat::kTwoLevel, 4>());
  if (args.bits == kBits) return f(Format<LowbitFormat::kUniform, kBits>());
  if constexpr (kBits > 2) with_integer_format<kBits - 1>(args, f);
}

// What every kernel knows of a weight.
struct Weight {
  const char* packed;
  const uint16_t* scale;  // [groups * planes, n]; two-level: a group's pair
  const uint8_t* zero;
  int n, k_blocks;
  int last;       // group
  int planes;     // 1 but for planes
  int apart = 1;  // row tiles from the first to the second one that a gemv kernel takes together
  Groups groups;
  DType type;
  int has_zeros;  // no bool: loops would have to unpack its byte
  int twice_zero;
  bool wide;  // 8 scales and 16 zero points can be copied at once

  explicit Weight(const LowbitArgs& args)
      : packed(reinterpret_cast<const char*>(args.packed)),
        scale(args.format == LowbitFormat::kTwoLevel ? args.group_scale : static_cast<const uint16_t*>(args.scale)),
        zero(args.zero),
        n(args.n),
        k_blocks(k_blocks_of(args.k)),
        last(args.group == 0 ? 0 : (args.k - 1) / args.group),
        planes(planes_of(args.format, args.bits)),
        groups(args.group),
        type(args.type),
        has_zeros(args.zero != nullptr),
        twice_zero(args.twice_zero),
        wide(args.n % 16 == 0 && is_aligned(scale) && is_aligned(zero)) {}

#ifdef __CUDACC__
  // The scales of a k-block's segment. The last k-block may have fewer groups than others: what stands in the place of
  // one that is missing meets codes of no column.
  __device__ const uint16_t* scale_row(int k_block, int segment, int plane) const {
    return scale + (static_cast<int64_t>(min(groups.of(k_block, segment), last)) * planes + plane) * n;
  }
  __device__ const uint8_t* zero_row(int k_block, int segment) const {
    return zero + static_cast<int64_t>(min(groups.of(k_block, segment), last)) * n;
  }
#endif
};

// How a k-block lies in a stage: the tiles of kRowTiles row tiles, then their scales [segment][plane][channel] and zero
// points [segment][channel]. kGroups: of a k-block, whose scales can be copied 16 bytes at a time; 0 serves all others.
// kHasScales: else whoever finishes a sum has them, and their room stays empty.
template <class Code_, int kGroups_, int kRowTiles_, bool kHasScales_ = true>
struct Stage {
  using Code = Code_;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kHasScales = kHasScales_;
  static constexpr bool kMayHaveZeros = Code::kFormat == LowbitFormat::kUniform;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kSegments = kGroups == 0 ? kSteps : kGroups;
  static constexpr int kTile = Code::kBytes * Code::kCount;
  static constexpr int kChannels = kRowTiles * kTileRows;
  static constexpr int kScalesAt = kTile * kRowTiles;
  static constexpr int kZerosAt = kScalesAt + kSegments * Code::kCount * kChannels * 2;
  static constexpr int kBytes = stage_bytes(Code::kFormat, Code::kBits, kSegments, kRowTiles);
  static_assert(kBytes >= kZerosAt + (kMayHaveZeros ? kSegments * kChannels : 0));

  __device__ static uint16_t* scales(char* stage) { return reinterpret_cast<uint16_t*>(stage + kScalesAt); }
  __device__ static uint8_t* zeros(char* stage) { return reinterpret_cast<uint8_t*>(stage + kZerosAt); }
  __device__ static bool has_zeros(const Weight& w) { return kMayHaveZeros && w.has_zeros != 0; }
};

// A warp's way through the k-blocks of its slice of kRowTiles row tiles, then of the block's next row tiles.
template <class Stage>
class StageProducer {
  using Code = typename Stage::Code;
  static constexpr int kTile = Stage::kTile;
  static constexpr int kRowTiles = Stage::kRowTiles;
  static constexpr int kLanes = 32 / kRowTiles;  // that copy a row tile's codes
  static constexpr int kCopies = kRowTiles * 2;  // of 16 bytes, of a row of scales
  const Weight& w_;
  int lane_, row_tile_, k_block_;
  int offset_, code_offset_;  // of what this lane copies in a stage: from the scales' and zero points' start; codes
  const char* tile_;          // this lane's first 16 bytes of codes
  const char* scale_;         // likewise, in the first row of scales
  const uint8_t* zero_;

 public:
  __device__ StageProducer(const Weight& w, int lane)
      : w_(w), lane_(lane), offset_(lane * 16), code_offset_(offset_ + lane / kLanes * (kTile - kLanes * 16)) {
    asm volatile("" : "+r"(offset_), "+r"(code_offset_));  // kept in registers, not computed for every stage
  }

  __device__ int row_tile() const { return row_tile_; }
  __device__ int k_block() const { return k_block_; }

  // row_tile: behind the last one where there is nothing to copy.
  __device__ void seek(int row_tile, int k_block) {
    row_tile_ = row_tile;
    k_block_ = k_block;
    const int last = (w_.n - 1) / kTileRows;  // stands in the place of one that is missing behind it
    const int64_t first =
        static_cast<int64_t>(min(row_tile_ + lane_ / kLanes * w_.apart, last)) * w_.k_blocks + k_block_;
    tile_ = w_.packed + first * kTile + lane_ % kLanes * 16;
    const int of_scales = row_tile_ + lane_ % kCopies / 2 * w_.apart;
    scale_ = reinterpret_cast<const char*>(w_.scale + min(of_scales, last) * kTileRows + lane_ % 2 * 8);
    zero_ = w_.zero + min(row_tile_ + lane_ % kRowTiles * w_.apart, last) * kTileRows;
  }

  __device__ void advance(int k_blocks) {
    k_block_ += k_blocks;
    tile_ += static_cast<int64_t>(k_blocks) * kTile;
  }

  // Asynchronously where it can be: whoever reads the stage waits for the copies, then for the warp.
  __device__ void copy(char* stage) const {
    const uint32_t to = shared_address(stage) + offset_;
    const uint32_t codes = shared_address(stage) + code_offset_;
#pragma unroll
    for (int at = 0; at < kTile; at += kLanes * 16) {
      if (at + kLanes * 16 <= kTile) {
        copy_async(codes + at, tile_ + at);
      } else {
        copy_async_if(lane_ * 16 < kTile - at, codes + at, tile_ + at);
      }
    }
    if constexpr (!Stage::kHasScales) return;
    if constexpr (Stage::kGroups == 0) {
      copy_unaligned(stage);
    } else {
      copy_scales(to);
    }
  }

 private:
  __device__ void copy_scales(uint32_t to) const {
    constexpr int kGroups = Stage::kGroups;
    constexpr int kRows = kGroups * Code::kCount;
    const int group =
        kGroups == 1 ? static_cast<int>(static_cast<uint32_t>(k_block_) >> w_.groups.log) : k_block_ * kGroups;
#pragma unroll
    for (int at = 0; at < kRows * kCopies; at += 32) {
      const uint32_t row = existing(group * Code::kCount + (lane_ + at) / kCopies, Code::kCount);
      copy_async_near_if(lane_ + at < kRows * kCopies, to + Stage::kScalesAt + at * 16,
                         scale_ + uint64_t{row} * (2U * w_.n));
    }
    if (!Stage::has_zeros(w_)) return;
    const uint32_t row = existing(group + lane_ / kRowTiles, 1);
    copy_async_near_if(lane_ < kGroups * kRowTiles, to + Stage::kZerosAt, zero_ + uint64_t{row} * w_.n);
  }

  // The last k-block may have fewer groups than others (see Weight::scale_row).
  __device__ uint32_t existing(int row, int of_group) const {
    return static_cast<uint32_t>(Stage::kGroups == 1 ? row : min(row, (w_.last + 1) * of_group - 1));
  }

  // Scales and zero points of several groups, or at addresses that are no multiples of 16 bytes.
  __device__ void copy_unaligned(char* stage) const {
    const int segments = w_.groups.segments;
    const int rows = segments * Code::kCount;
    for (int i = lane_; i < rows * kCopies; i += 32) {
      const int row = i / kCopies;
      const uint16_t* const from = w_.scale_row(k_block_, row / Code::kCount, row % Code::kCount);
      const int n = row_tile_ * kTileRows + i % kCopies * 8;
      uint16_t* const to = Stage::scales(stage) + i * 8;
      if (w_.wide && n < w_.n) {
        copy_async(shared_address(to), from + n);
      } else {
        for (int j = 0; j < 8; ++j) to[j] = from[min(n + j, w_.n - 1)];
      }
    }
    for (int i = lane_; w_.has_zeros != 0 && i < segments * Stage::kChannels; i += 32) {
      const int n = min(row_tile_ * kTileRows + i % Stage::kChannels, w_.n - 1);
      Stage::zeros(stage)[i] = w_.zero_row(k_block_, i / Stage::kChannels)[n];
    }
  }
};

// A plane's scales of a segment for channels lane / 4 and lane / 4 + 8 of a row tile.
template <class Stage>
__device__ inline void read_scales(DType type, char* stage, int segment, int plane, int row_tile, int lane,
                                   float (&scale)[2]) {
  const int at = (segment * Stage::Code::kCount + plane) * Stage::kChannels + row_tile * kTileRows + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) scale[i] = half_of(Stage::scales(stage)[at + i * 8], type);
}

// Twice their zero points.
template <class Stage>
__device__ inline void read_zeros(const Weight& w, char* stage, int segment, int row_tile, int lane, int (&twice)[2]) {
  const int at = segment * Stage::kChannels + row_tile * kTileRows + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    twice[i] = Stage::Code::kPlanes ? 1 : w.twice_zero;
    if (Stage::has_zeros(w)) twice[i] = 2 * Stage::zeros(stage)[at + i * 8];
  }
}

}  // namespace octofuse::lowbit
