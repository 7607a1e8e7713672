// Launch plumbing shared by every kernel file.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace octofuse {

[[noreturn]] void throw_launch_error(const char* kernel, const char* reason);

// Throws RuntimeError with the kernel's name if the last launch failed.
void check_launch(const char* kernel);

// One flag per device, for what must be done once on each.
using DeviceFlags = std::array<std::atomic<bool>, 64>;

// Raises the kernel's dynamic shared-memory limit, once per device.
void allow_shared_memory(const void* kernel, int bytes, int device, DeviceFlags& raised);

// True while the stream records a graph on a device whose kernels wait for their predecessors themselves
// (griddepcontrol, compiled for sm_90a): then they are chained by programmatic dependent launch, unless
// allow_overlap(false) was called.
bool is_chained(cudaStream_t stream, int device);

// Weights that the kernel reads once: their lines leave L2 first. Else a step's weights, which are larger than L2,
// would push out what is small and read by every step: positions, keys and values, scales, the weights of norms.
struct ReadOnce {
  const void* data = nullptr;
  int64_t bytes = 0;
};

// One launch with everything that <<<>>> cannot say: clusters of blocks, and `overlap`: the kernel may start before
// its predecessor has finished (it has to execute griddepcontrol.wait in every thread that touches memory).
void launch_kernel(const char* name, const void* function, dim3 grid, dim3 block, int shared_bytes, dim3 cluster,
                   bool overlap, void* args, cudaStream_t stream, ReadOnce weights = {});

// A launch all of whose blocks run at once, so that they may wait for each other. False: more than that are asked for,
// and nothing was launched.
bool launch_cooperative(const char* name, const void* function, dim3 grid, dim3 block, bool overlap, void* args,
                        cudaStream_t stream);

}  // namespace octofuse
