// What was measured of the kernels, on each device that was swept. Pure host data.
#pragma once

#include <cstdint>
#include <vector>

#include "octofuse/gemm.h"

namespace octofuse {

struct Measured {
  // (N, K), and for each of its part's rows an index into `timed`, or -1.
  struct Shape {
    int64_t n, k;
    std::vector<int> best;
  };

  // What was swept of one arithmetic.
  struct Part {
    Arithmetic arithmetic;
    std::vector<int64_t> rows;  // the Ms, ascending
    std::vector<Shape> shapes;
  };

  int sm_count;
  double bandwidth;                     // GB/s, as the device itself says: Capability's
  std::vector<TimeModel> models;        // one a candidate, in candidates()' order
  std::vector<const Candidate*> timed;  // nullptr: it has gone since
  std::vector<Part> parts;

  // The fastest kernel of (N, K) exactly, and the smallest measured M that is not below the problem's; nullptr: not
  // measured.
  const Candidate* best(const GemmProblem& problem) const;
};

// Of the device whose memory is nearest in speed, GB/s: compute is alike on those that were swept, all of 9.0.
const Measured& measured_near(double bandwidth);

}  // namespace octofuse
