#include "lowbit/levels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace octofuse::lowbit {
namespace {

constexpr int kMost = 127 * 256 + 127;  // of the integers: both bytes are signed
constexpr int kHalf = 8;                // codes that prmt tells apart

struct Digits {
  int high, low;
};

Digits digits_of(double level, double scale) {
  const auto integer = static_cast<int>(std::nearbyint(level * scale));
  const int high = (integer + 128) >> 8;  // low is what is left, -128 to 127
  return {high, integer - 256 * high};
}

// Two bytes, of which one and the other's sign (0 or -1) are `below`, and the other and the one's sign `above`; false
// where there are none: 127 beside a negative number.
bool split(int below, int above, int (&bytes)[2]) {
  for (const int sign : {0, -1}) {
    for (const int other_sign : {0, -1}) {
      bytes[0] = below - other_sign;
      bytes[1] = above - sign;
      const bool fits = std::max(bytes[0], bytes[1]) < 128 && std::min(bytes[0], bytes[1]) >= -128;
      if (fits && (bytes[0] < 0) == (sign < 0) && (bytes[1] < 0) == (other_sign < 0)) return true;
    }
  }
  return false;
}

bool has_bytes(const Levels& levels, double scale) {
  for (size_t i = 0; i < kHalf; ++i) {
    const Digits below = digits_of(levels[i], scale), above = digits_of(levels[i + kHalf], scale);
    int bytes[2];
    if (!split(below.high, above.high, bytes) || !split(below.low, above.low, bytes)) return false;
  }
  return true;
}

// The largest relative error of the levels as multiples of 1 / scale; 2 where they do not fit.
double error_of(const Levels& levels, double scale) {
  double worst = 0.0;
  for (const double level : levels) {
    const double integer = std::nearbyint(level * scale);
    if (std::abs(integer) > kMost) return 2.0;
    if (level != 0.0) worst = std::max(worst, std::abs(integer / scale / level - 1.0));
  }
  return worst;
}

double best_scale(const Levels& levels) {
  double largest = 0.0;
  for (const double level : levels) largest = std::max(largest, std::abs(level));
  if (largest == 0.0) return 1.0;
  double best = 64 / largest;  // no level has a byte of 127
  double least = 2.0;
  for (int i = kMost; i >= kMost / 2; --i) {
    const double scale = i / largest;
    const double error = error_of(levels, scale);
    if (error >= least || !has_bytes(levels, scale)) continue;
    best = scale;
    least = error;
  }
  return best;
}

IntegerLevels rounded(const Levels& levels) {
  IntegerLevels found{};
  const double scale = best_scale(levels);
  found.unit = static_cast<float>(1.0 / scale);
  for (size_t i = 0; i < levels.size(); ++i) {
    const Digits digits = digits_of(levels[i], scale);
    found.bytes[i] = static_cast<uint16_t>((digits.high & 0xFF) << 8 | (digits.low & 0xFF));
  }
  const auto put = [&](int part, size_t i, int below, int above) {
    int bytes[2];
    split(below, above, bytes);
    for (int half = 0; half < 2; ++half) {
      found.parts[part + half][i / 4] |= static_cast<uint32_t>(bytes[half] & 0xFF) << i % 4 * 8;
    }
  };
  for (size_t i = 0; i < kHalf; ++i) {
    const Digits below = digits_of(levels[i], scale), above = digits_of(levels[i + kHalf], scale);
    put(0, i, below.high, above.high);
    put(2, i, below.low, above.low);
  }
  return found;
}

}  // namespace

const IntegerLevels& integers_of(const Levels& levels) {
  thread_local std::map<Levels, IntegerLevels> known;
  if (known.size() > 64) known.clear();
  const auto found = known.find(levels);
  return found != known.end() ? found->second : known.emplace(levels, rounded(levels)).first->second;
}

uint16_t level_bits(float level, DType type) {
  return type == DType::kFloat16 ? static_cast<__half_raw>(__float2half_rn(level)).x
                                 : static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(level)).x;
}

}  // namespace octofuse::lowbit
