// Low-bit weights to fp16 or bf16 in memory, for products of many tokens: a warp a tile, 8 columns of a channel at
// once.
#include "device/launch.h"
#include "lowbit/integers.cuh"
#include "lowbit/stage.cuh"
#include "octofuse/device.h"
#include "octofuse/lowbit.h"

namespace octofuse {
namespace lowbit {
namespace {

constexpr int kWarps = 8;

struct DequantizeArgs {
  Weight w;
  int k;
  uint16_t* out;              // [n, k]
  bool wide;                  // 8 columns can be stored at once
  uint16_t levels[16];        // of a codebook, in the weight's type
  const uint16_t* row_scale;  // two-level: [n]
};

// Code `column` of the 8 that this lane has of channel lane / 4 + 8 * row, as a number that scales multiply.
template <LowbitFormat kFormat>
__device__ inline float unscaled(const uint32_t (&a)[4], int row, int column, float zero, float level) {
  const uint32_t byte = a[row + column / 4 * 2] >> (column % 2 * 16 + column / 2 % 2 * 8) & 0xFFU;
  if constexpr (kFormat == LowbitFormat::kSparse12) return static_cast<float>(static_cast<int8_t>(byte) / 2);
  if constexpr (kFormat == LowbitFormat::kFloat8) {
    constexpr float kUnit = 1U << kFloat8Shift<DType::kFloat16>;
    return half_of(static_cast<uint16_t>(float8_pair<DType::kFloat16>(byte, 0)), DType::kFloat16) * kUnit;
  }
  // Lane i of 16 has level i.
  if constexpr (kFormat == LowbitFormat::kCodebook) return __shfl_sync(kFullWarp, level, static_cast<int>(byte));
  return static_cast<float>(byte) - zero;
}

template <LowbitFormat kFormat, int kBits>
__device__ void values_of_step(const DequantizeArgs& args, const char* tile, int row_tile, int group, int step,
                               int lane, float (&values)[2][8]) {
  using Code = Codes<kFormat, kBits>;
  const Weight& w = args.w;
  const int planes = w.planes;
  const float level = half_of(args.levels[lane % 16], w.type);
#pragma unroll 1
  for (int plane = 0; plane < planes; ++plane) {
    uint32_t words[Code::kWords];
    read_words<Code::kWidth>(tile + plane * Code::kBytes, lane, words);
    uint32_t a[4];
    // With a step that is known at compile time shifts are, too.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i == step) codes_of_step<kFormat, Code::kPlanes ? 1 : Code::kWidth>(words, i, a);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int n = min(row_tile * kTileRows + lane / 4 + row * 8, w.n - 1);
      const int64_t at = static_cast<int64_t>(group) * w.n + n;
      const uint16_t stored = w.scale[(static_cast<int64_t>(group) * planes + plane) * w.n + n];
      float scale = half_of(stored, w.type);
      float zero = 0.5F * static_cast<float>(w.has_zeros != 0 ? 2 * w.zero[at] : Code::kPlanes ? 1 : w.twice_zero);
      float factor = Code::kPlanes ? 2.0F : 1.0F;
      if constexpr (kFormat == LowbitFormat::kTwoLevel) {
        scale = half_of(args.row_scale[n], w.type);
        zero = static_cast<float>(zero_of_pair(stored));
        factor = static_cast<float>(scale_of_pair(stored));
      }
#pragma unroll
      for (int column = 0; column < 8; ++column) {
        const float value = unscaled<kFormat>(a, row, column, zero, level);
        values[row][column] = __fadd_rn(values[row][column], __fmul_rn(factor * value, scale));
      }
    }
  }
}

// Lane t's word i becomes lane i's word t: two columns of every 8 become 8 neighbours.
__device__ inline void transpose_in_quads(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; ++step) {
    const bool second = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const uint32_t got = __shfl_xor_sync(kFullWarp, second ? words[i] : words[i + step], step);
      if (second) {
        words[i] = got;
      } else {
        words[i + step] = got;
      }
    }
  }
}

template <LowbitFormat kFormat, int kBits>
__global__ void __launch_bounds__(32 * kWarps) dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  const Weight& w = args.w;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int row_tile = static_cast<int>(tile / w.k_blocks);
  const int k_block = static_cast<int>(tile % w.k_blocks);
  if (row_tile * kTileRows >= w.n) return;
  const int bytes = Codes<kFormat, kBits>::kBytes * w.planes;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    const int group = min(w.groups.of(k_block, step * w.groups.segments / kSteps), w.last);
    float values[2][8] = {};
    values_of_step<kFormat, kBits>(args, w.packed + tile * bytes, row_tile, group, step, lane, values);
    const int k = k_block * kBlockK + step * 32 + lane % 4 * 8;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = half_bits(values[row][2 * i], w.type) | half_bits(values[row][2 * i + 1], w.type) << 16;
      }
      transpose_in_quads(pairs, lane);
      const int n = row_tile * kTileRows + lane / 4 + row * 8;
      if (n >= w.n || k >= args.k) continue;
      uint16_t* const out = args.out + static_cast<int64_t>(n) * args.k + k;
      if (args.wide) {
        *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (k + i < args.k) out[i] = static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16));
      }
    }
  }
}

template <LowbitFormat kFormat, int kBits>
void launch(const DequantizeArgs& args, cudaStream_t stream) {
  const int64_t tiles = static_cast<int64_t>((args.w.n + kTileRows - 1) / kTileRows) * args.w.k_blocks;
  const auto blocks = static_cast<unsigned>((tiles + kWarps - 1) / kWarps);
  dequantize_kernel<kFormat, kBits><<<blocks, 32 * kWarps, 0, stream>>>(args);
  check_launch("lowbit_dequantize");
}

}  // namespace
}  // namespace lowbit

void lowbit_dequantize(const LowbitArgs& given, void* w, int device, Stream stream) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  lowbit::DequantizeArgs args{lowbit::Weight(given), given.k, static_cast<uint16_t*>(w),
                              given.k % 8 == 0,      {},      static_cast<const uint16_t*>(given.scale)};
  for (size_t i = 0; i < given.levels.size(); ++i) args.levels[i] = lowbit::level_bits(given.levels[i], given.type);
  if (given.format == LowbitFormat::kTwoLevel) return lowbit::launch<LowbitFormat::kTwoLevel, 4>(args, cuda_stream);
  lowbit::with_format(given, [&](auto format) {
    using Format = decltype(format);
    lowbit::launch<Format::kFormat, Format::kBits>(args, cuda_stream);
  });
}

}  // namespace octofuse
