// Where outliers are, of a few tokens: a block looks at 256 columns of some rows.
#pragma once

#include <algorithm>

#include "device/align.h"
#include "device/launch.h"
#include "outliers/pack.cuh"

namespace octofuse::outliers {

constexpr int kMeasureThreads = 512;
constexpr int kPartColumns = 32 * kPack;  // that a block looks at
constexpr int kMostGroups = static_cast<int>(ceil_div(kMostDigitTokens, kMeasureThreads / 32));

struct MeasureArgs {
  OutlierArgs of;
  uint32_t* masks;  // [groups, words]: columns with an outlier in some rows
  uint32_t* below;  // [parts, m]: each row's largest magnitude below the threshold in the part's columns
  uint32_t* most;   // [parts, m]: of all magnitudes
  uint32_t* any;    // [groups, parts]: not zero where there is an outlier
  int words, parts, groups, rows_of_group;

  // Of few rows a warp has one.
  MeasureArgs(const OutlierArgs& args, const Allocator& allocate)
      : of(args),
        words(static_cast<int>(ceil_div(args.k, 32))),
        parts(static_cast<int>(ceil_div(args.k, kPartColumns))),
        groups(static_cast<int>(std::min<int64_t>(kMostGroups, ceil_div(args.m, kMeasureThreads / 32)))),
        rows_of_group(static_cast<int>(ceil_div(args.m, groups))) {
    const auto make = [&](int64_t count) {
      return static_cast<uint32_t*>(allocate(static_cast<size_t>(count) * sizeof(uint32_t)));
    };
    masks = make(int64_t{groups} * words);
    below = make(parts * args.m);
    most = make(parts * args.m);
    any = make(int64_t{parts} * groups);
  }

  // A word of the mask of all rows' columns.
  __device__ uint32_t mask(int word) const {
    uint32_t columns = 0;
#pragma unroll
    for (int group = 0; group < kMostGroups; ++group) {
      if (group < groups) columns |= masks[group * words + word];
    }
    return columns;
  }
};

void measure(const MeasureArgs& args, bool wide, bool chained, cudaStream_t stream);

}  // namespace octofuse::outliers
