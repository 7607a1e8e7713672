// The kernels that select() chooses from, with what was measured of each.
#pragma once

#include <array>

#include "octofuse/gemm.h"

namespace octofuse {

// Microseconds of a kernel as a function of the problem. With `waves` the rounds in which the device runs its blocks:
//   tiles:   launch + waves * (per_wave + per_k * ceil(K / 128 / split)) + per_mb * (N * K / 1e6)
//   skinny:  launch + waves *  per_wave + per_k * (N * K / 1e6)          + per_mb * (M * N * K / 1e6 / channels / 8)
struct TimeModel {
  double launch = 0, per_wave = 0, per_k = 0, per_mb = 0;
};

double estimated_time(const Candidate& candidate, const GemmProblem& problem, const Capability& capability);

// The fastest kernel of a measured shape: (N, K) exactly, and the smallest measured M that is not below the problem's.
// nullptr where nothing near was measured on such a device.
const Candidate* measured_best(const GemmProblem& problem, const Capability& capability);

}  // namespace octofuse
