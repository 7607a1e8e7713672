// The kernels that select() chooses from, with what was measured of each.
#pragma once

#include "octofuse/gemm.h"

namespace octofuse {

// us. kNoEstimate where the model says nothing: the kernel's tiles do not suit these sizes, so that it was not swept.
// More for kernels that come behind all others.
constexpr double kNoEstimate = 1e9;
constexpr double kLastResort = 2e9;
double estimated_time(const Candidate& candidate, const GemmProblem& problem, const Capability& capability);

// The fastest kernel of a measured shape: (N, K) exactly, and the smallest measured M that is not below the problem's.
// nullptr where nothing close was measured on such a device.
const Candidate* measured_best(const GemmProblem& problem, const Capability& capability);

}  // namespace octofuse
