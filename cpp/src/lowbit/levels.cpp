#include "lowbit/levels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace octofuse::lowbit {
namespace {

constexpr int kMost = 127 * 256 + 127;  // of the integers: both bytes are signed

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
  double best = kMost / largest;
  double least = error_of(levels, best);
  for (int i = kMost / 2; i < kMost; ++i) {
    const double scale = i / largest;
    const double error = error_of(levels, scale);
    if (error < least) best = scale;
    least = std::min(least, error);
  }
  return best;
}

IntegerLevels rounded(const Levels& levels) {
  IntegerLevels found{};
  const double scale = best_scale(levels);
  found.unit = static_cast<float>(1.0 / scale);
  for (size_t i = 0; i < levels.size(); ++i) {
    const auto integer = static_cast<int>(std::nearbyint(levels[i] * scale));
    const int high = (integer + 128) >> 8;  // low is what is left, -128 to 127
    found.bytes[i] = static_cast<uint16_t>((high & 0xFF) << 8 | (integer & 0xFF));
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
