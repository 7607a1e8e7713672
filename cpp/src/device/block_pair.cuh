// Barriers in shared memory, and what two blocks of a cluster tell each other through them. Without clusters (before
// compute capability 9.0) only a block's own: CUTLASS's barriers are for 9.0 alone.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"

namespace octofuse {

// An mbarrier. A phase ends when `count` threads have arrived, and all bytes that were announced.
struct BlockBarrier {
  uint64_t word;

  __device__ uint32_t address() const { return shared_address(this); }

  __device__ void init(int count) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(address()), "r"(count) : "memory");
  }
  // By the thread that made barriers: the other block may arrive at them.
  __device__ static void publish() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  // read: what the thread has read from shared memory before, since for that an arrival does not wait by itself.
  __device__ void arrive(float read) const {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}"
                 :
                 : "r"(address()), "f"(read)
                 : "memory");
  }
  // Until the phase of this parity has ended.
  __device__ void wait(uint32_t parity) const {
    uint32_t done = 0;
    while (done == 0) {
#if __CUDA_ARCH__ >= 900
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(address()), "r"(parity)
                   : "memory");
#else
      asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(address()), "r"(parity)
                   : "memory");
#endif
    }
  }

#if __CUDA_ARCH__ >= 900
  // Arrives, and announces bytes that the other block sends.
  __device__ void expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" : : "r"(address()), "r"(bytes) : "memory");
  }
  // At the barrier in the same place of another block of the cluster. read: as above.
  __device__ void arrive_at(int rank, float read) const {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
        :
        : "r"(address()), "r"(rank), "f"(read)
        : "memory");
  }
  // 8 bytes to the same place of another block, whose barrier counts them.
  __device__ void send(int rank, const void* to, float2 v) const {
    asm volatile(
        "{\n.reg .b32 remote, barrier;\nmapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 barrier, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [barrier];\n}"
        :
        : "r"(shared_address(to)), "r"(address()), "r"(rank), "f"(v.x), "f"(v.y)
        : "memory");
  }
#endif
};

// All threads of both blocks. Says nothing of memory.
__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

}  // namespace octofuse
