// Threads for loops: torch's OpenMP threads while the machine is idle, and threads of our own while it is not.
//
// OpenMP's wait for work by spinning, some milliseconds long. A thread of our own beside one that spins for torch gets
// half a core, so on an idle machine the loop runs on torch's. But a parallel region ends when all of its threads have
// come by, and on a busy machine one that is not scheduled keeps the others waiting for a time slice. Threads of our
// own are waited for only if they have taken work, and they sleep between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace octofuse::cpu {

// work(i) once for every i in [0, count), on the calling thread and at most threads - 1 others; returns when all are
// done. Indices are handed out one by one, in order. Calls from several threads do not wait for each other: the second
// one works alone.
void parallel_for(int64_t count, int threads, const std::function<void(int64_t)>& work);

// Waits until ready() by spinning, then by naps: sched_yield() would give a busy neighbour a whole time slice.
void wait_until(const std::function<bool()>& ready);

}  // namespace octofuse::cpu
