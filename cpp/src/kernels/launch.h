// Launch plumbing shared by every kernel file.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace octofuse {

[[noreturn]] void throw_launch_error(const char* kernel, const char* reason);

// Throws RuntimeError with the kernel's name if the last launch failed.
void check_launch(const char* kernel);

// One flag per device, for what must be done once on each.
using DeviceFlags = std::array<std::atomic<bool>, 64>;

// Raises the kernel's dynamic shared-memory limit, once per device.
void allow_shared_memory(const void* kernel, int bytes, int device, DeviceFlags& raised);

}  // namespace octofuse
