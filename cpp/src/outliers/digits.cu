// Few tokens: outliers as digits of 8 bits, further rows of the int8 x. Of one token every block looks at all of it and
// writes a part; of more a block has a part of a row, behind measure.cu.
#include "device/chain.cuh"
#include "octofuse/device.h"
#include "outliers/measure.cuh"

namespace octofuse {
namespace outliers {
namespace {

constexpr int kRowThreads = 512;   // of a block of one token
constexpr int kPartThreads = 256;  // of more

// By which the largest magnitude of a row becomes an integer below 2^22, and back. Beside an infinity all else is zero;
// two of them whose products have opposite signs give an infinity, where floating point gives NaN.
struct FixedPoint {
  float to = 0x1p-129F;
  float back;

  __device__ explicit FixedPoint(float most) : back(most) {
    if (!(most < INFINITY)) return;
    constexpr uint32_t kBits = 21;
    const uint32_t exponent = max(__float_as_uint(most) >> 23, 30U);  // both powers are normal numbers
    to = __uint_as_float((254 + kBits - exponent) << 23);
    back = __uint_as_float((exponent - kBits) << 23);
  }

  // An infinity becomes the largest number of three digits, about.
  __device__ int of(float value) const { return max(-0x7F0000, min(__float2int_rn(value * to), 0x7F0000)); }
};

// Digit `place`, -128 to 127, of every number of a pack: each number's bytes once 128 is added to each digit, less
// these.
__device__ inline Pack<int8_t> digits_of(const int (&numbers)[kPack], int place) {
  Pack<int8_t> digits;
  const auto selector = static_cast<uint32_t>(place | (4 + place) << 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pair = [&](int first) {
      return __byte_perm(static_cast<uint32_t>(numbers[4 * half + first] + 0x808080),
                         static_cast<uint32_t>(numbers[4 * half + first + 1] + 0x808080), selector);
    };
    reinterpret_cast<uint32_t*>(digits.values)[half] = __byte_perm(pair(0), pair(2), 0x5410) ^ 0x80808080U;
  }
  return digits;
}

// Of one token.
struct DigitArgs {
  OutlierArgs of;
  float* factors;  // OutlierColumns::factors
};

// Of more.
struct DigitPartArgs : MeasureArgs {
  float* factors;
};

// The largest of non-negative floats, given as their bits.
__device__ inline float warp_max(uint32_t bits) { return __uint_as_float(__reduce_max_sync(kFullWarp, bits)); }

// What is written of a row: below and most are its largest magnitudes below the threshold and of all.
template <class T, bool kWide, class Args>
struct DigitRow {
  const Args& args;
  int row, k;
  float scale, inverse;
  FixedPoint fixed;

  __device__ DigitRow(const Args& args, int row, float below, float most)
      : args(args),
        row(row),
        k(static_cast<int>(args.of.k)),
        scale(rows::scale_of(below, DType::kInt8)),
        inverse(reciprocal(scale)),
        fixed(most) {}

  // any: some token has an outlier.
  __device__ void write_scales(bool any) const {
    args.of.scales[row] = any ? 1.0F : scale;
    args.factors[2 * row] = any ? scale : 1.0F;
    args.factors[2 * row + 1] = any ? fixed.back : 0.0F;
  }

  // columns: a bit for each of the pack that holds an outlier.
  __device__ void write(Pack<T> pack, uint32_t columns, int index) const {
    int8_t* const q = args.of.q + static_cast<int64_t>(row) * kDigitRows * k;
    int numbers[kPack] = {};
    if (columns != 0) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if ((columns >> j & 1U) == 0) continue;
        numbers[j] = fixed.of(to_float(pack.values[j]));
        pack.values[j] = rows::from_float<T>(0.0F);
      }
    }
    store_pack<T, kWide>(pack, inverse, q, index, k);
#pragma unroll
    for (int row_of_digits = 1; row_of_digits < kDigitRows; ++row_of_digits) {
      store_bytes<kWide>(digits_of(numbers, kDigitRows - 1 - row_of_digits), q + row_of_digits * k, index, k);
    }
  }
};

// One token: every block looks at all of it, and writes a pack a thread.
template <class T, bool kWide>
__global__ void __launch_bounds__(kRowThreads) digits_row_kernel(const __grid_constant__ DigitArgs args) {
  constexpr int kAhead = 4;  // packs of a thread that are on their way at once
  __shared__ uint32_t below_of_warp[kRowThreads / 32], most_of_warp[kRowThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int k = static_cast<int>(args.of.k);
  const int packs = (k + kPack - 1) / kPack;
  const auto load = [&](int index) { return load_pack<T, kWide>(static_cast<const T*>(args.of.x), index, k); };
  Magnitudes<T> magnitudes(args.of.threshold);
  bool any = false;
  wait_for_predecessors();
#pragma unroll 1
  for (int first = thread; first < packs; first += kAhead * kRowThreads) {
    Pack<T> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kRowThreads < packs) ahead[i] = load(first + i * kRowThreads);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kRowThreads < packs) any |= magnitudes.take(ahead[i]).any();
    }
  }
  launch_dependents();  // not before: its reads would wait for the next kernel's weights
  const float warp_below = warp_max(__float_as_uint(magnitudes.below.value()));
  const float warp_most = warp_max(__float_as_uint(magnitudes.most.value()));
  if (thread % 32 == 0) {
    below_of_warp[thread / 32] = __float_as_uint(warp_below);
    most_of_warp[thread / 32] = __float_as_uint(warp_most);
  }
  any = __syncthreads_or(any) != 0;
  const int warp = thread % (kRowThreads / 32);
  const DigitRow<T, kWide, DigitArgs> out(args, 0, warp_max(below_of_warp[warp]), warp_max(most_of_warp[warp]));
  const int index = static_cast<int>(blockIdx.x) * kRowThreads + thread;
  if (index == 0) out.write_scales(any);
  auto* const columns = reinterpret_cast<uint8_t*>(args.factors + 2);
  if (index == packs) columns[index] = 0;  // they are read in pairs: an odd number of them leaves a thread free
  if (index >= packs) return;
  const Pack<T> pack = load(index);
  const uint32_t outliers = magnitudes.take(pack).bits();
  columns[index] = static_cast<uint8_t>(outliers);
  out.write(pack, outliers, index);
}

// A thread has a pack.
template <class T, bool kWide>
__global__ void __launch_bounds__(kPartThreads) digits_part_kernel(const __grid_constant__ DigitPartArgs args) {
  const int k = static_cast<int>(args.of.k);
  const int index = static_cast<int>(blockIdx.x) * kPartThreads + static_cast<int>(threadIdx.x);
  const bool inside = index * kPack < k;
  const int64_t row = blockIdx.y;
  wait_for_predecessors();
  Pack<T> pack = {};
  uint32_t columns = 0;
  if (inside) {
    pack = load_pack<T, kWide>(static_cast<const T*>(args.of.x) + row * args.of.ldx, index, k);
    columns = args.mask(index / 4) >> index % 4 * kPack & 0xFFU;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t below = 0;
  uint32_t most = 0;
  for (int part = lane; part < args.parts; part += 32) {
    below = max(below, args.below[part * args.of.m + row]);
    most = max(most, args.most[part * args.of.m + row]);
  }
  launch_dependents();  // not before: these reads would wait for the next kernel's weights
  const DigitRow<T, kWide, DigitPartArgs> out(args, static_cast<int>(row), warp_max(below), warp_max(most));
  if (inside) out.write(pack, columns, index);
  if (blockIdx.x != 0 || threadIdx.x >= 32) return;
  uint32_t any = 0;
  for (int i = lane; i < args.parts * args.groups; i += 32) any |= args.any[i];
  any = __reduce_or_sync(kFullWarp, any);
  if (lane == 0) out.write_scales(any != 0);
}

template <class T>
void run(DigitArgs args, int device, cudaStream_t stream, const Allocator& allocate) {
  const bool chained = is_chained(stream, device);
  const bool wide = is_wide(args.of);
  const auto blocks = [&](int64_t threads) { return static_cast<unsigned>(ceil_div(args.of.k, threads * kPack)); };
  if (args.of.m == 1) {
    const void* const kernel = wide ? reinterpret_cast<const void*>(digits_row_kernel<T, true>)
                                    : reinterpret_cast<const void*>(digits_row_kernel<T, false>);
    return launch_kernel("outliers_digits", kernel, dim3(blocks(kRowThreads)), dim3(kRowThreads), 0, dim3(1), chained,
                         &args, stream);
  }
  DigitPartArgs parts{MeasureArgs(args.of, allocate), args.factors};
  measure(parts, wide, chained, stream);
  const void* const kernel = wide ? reinterpret_cast<const void*>(digits_part_kernel<T, true>)
                                  : reinterpret_cast<const void*>(digits_part_kernel<T, false>);
  const dim3 grid(blocks(kPartThreads), static_cast<unsigned>(args.of.m));
  launch_kernel("outliers_digits", kernel, grid, dim3(kPartThreads), 0, dim3(1), chained, &parts, stream);
}

}  // namespace
}  // namespace outliers

OutlierColumns outlier_digits(const OutlierArgs& args, int device, Stream stream, const Allocator& allocate) {
  const DeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  OutlierColumns result;
  result.type = args.type;
  const auto columns = static_cast<size_t>(args.m == 1 ? ceil_div(args.k, rows::kPack) + 1 : 0);  // bytes
  auto* const factors = static_cast<float*>(allocate(static_cast<size_t>(args.m) * 2 * sizeof(float) + columns));
  result.factors = factors;
  const outliers::DigitArgs digits{args, factors};
  if (args.type == DType::kFloat16) {
    outliers::run<__half>(digits, device, cuda_stream, allocate);
  } else {
    outliers::run<__nv_bfloat16>(digits, device, cuda_stream, allocate);
  }
  return result;
}

}  // namespace octofuse
