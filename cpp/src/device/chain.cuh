// Programmatic dependent launch, seen from a kernel. In a captured graph a kernel may start while its predecessor runs
// (launch_kernel's `overlap`); cpp/README.md has the rules that keep this exact.
#pragma once

namespace octofuse {

// Waits until every earlier kernel of the stream has finished and its writes can be read. Without programmatic
// dependent launch they have: then this costs nothing.
__device__ inline void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start as soon as every block of this one has come here or ended.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace octofuse
