// What this build can run on a given compute capability. Pure: no device is asked.
#include <algorithm>
#include <string>

#include "octofuse/device.h"

namespace octofuse {

#ifdef OCTOFUSE_ARCHITECTURES
const char* built_architectures() { return OCTOFUSE_ARCHITECTURES; }
#else
const char* built_architectures() { return ""; }
#endif

Capability capability_for(int compute_capability, int sm_count) {
  Capability capability;
  capability.compute_capability = compute_capability;
  capability.sm_count = sm_count;
  const std::string list = built_architectures();
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string entry = list.substr(begin, end - begin);
    begin = end + 1;
    const int built = std::stoi(entry);
    const bool accelerated = entry.back() == 'a';
    // A plain entry carries PTX for every later chip; an accelerated one its own machine code alone.
    const bool loads = accelerated ? built == compute_capability : built <= compute_capability;
    if (!loads) continue;
    capability.kernels_naive = true;
    if (built >= 80) capability.kernels_mma = true;
    if (accelerated && built == 90) capability.kernels_sm90a = true;
  }
  return capability;
}

}  // namespace octofuse
