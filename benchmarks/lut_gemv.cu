// Binary codes times one token by look-up tables in shared memory, after nuQmm and LUT-GEMM (Park et al.): 8 columns of
// the token have 256 signed sums, and a byte of signs looks one up. To compare with; nothing else uses it.
#include <cuda_fp16.h>

#include <cstdint>

namespace {

constexpr int kColumns = 256;  // of a block
constexpr int kRows = 1024;
constexpr int kThreads = 512;
constexpr int kGroup = 128;  // columns that share a scale
constexpr int kKeys = 4;     // bytes of a word

// signs [q, K / 32, N]: bit i of byte j is column 8 j + i of the word's 32. alpha [K / 128, q, N], partial
// [K / 256, N].
template <int kPlanes>
__global__ void __launch_bounds__(kThreads)
    lut_kernel(const __half* x, const uint32_t* signs, const __half* alpha, float* partial, int n, int k) {
  __shared__ float tables[kColumns / 8][256];
  const int tile = static_cast<int>(blockIdx.y);
  for (int i = static_cast<int>(threadIdx.x); i < kColumns / 8 * 256; i += kThreads) {
    const int table = i / 256;
    const int key = i % 256;
    float sum = 0.0F;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const float v = __half2float(x[tile * kColumns + table * 8 + bit]);
      sum += (key >> bit & 1) != 0 ? v : -v;
    }
    tables[table][key] = sum;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kRows; i += kThreads) {
    const int row = static_cast<int>(blockIdx.x) * kRows + i;
    if (row >= n) return;
    float total = 0.0F;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t* words = signs + (static_cast<int64_t>(plane) * (k / 32) + tile * (kColumns / 32)) * n + row;
#pragma unroll
      for (int group = 0; group < kColumns / kGroup; ++group) {
        float sum = 0.0F;
#pragma unroll
        for (int word = 0; word < kGroup / 32; ++word) {
          const uint32_t keys = words[static_cast<int64_t>(group * (kGroup / 32) + word) * n];
#pragma unroll
          for (int j = 0; j < kKeys; ++j) {
            sum += tables[(group * (kGroup / 32) + word) * kKeys + j][keys >> 8 * j & 255U];
          }
        }
        const int of_row = tile * (kColumns / kGroup) + group;
        total += sum * __half2float(alpha[(static_cast<int64_t>(of_row) * kPlanes + plane) * n + row]);
      }
    }
    partial[static_cast<int64_t>(tile) * n + row] = total;
  }
}

// In an order that never changes.
__global__ void add_kernel(const float* partial, __half* y, int n, int tiles) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= n) return;
  float sum = 0.0F;
#pragma unroll 8
  for (int i = 0; i < tiles; ++i) sum += partial[static_cast<int64_t>(i) * n + row];
  y[row] = __float2half_rn(sum);
}

}  // namespace

// 0, or an error of the runtime.
extern "C" int lut_gemv(const void* x, const void* signs, const void* alpha, void* partial, void* y, int planes, int n,
                        int k, cudaStream_t stream) {
  using Kernel = void (*)(const __half*, const uint32_t*, const __half*, float*, int, int);
  const Kernel kernels[] = {lut_kernel<1>, lut_kernel<2>, lut_kernel<3>, lut_kernel<4>};
  const dim3 grid((n + kRows - 1) / kRows, k / kColumns);
  kernels[planes - 1]<<<grid, kThreads, 0, stream>>>(static_cast<const __half*>(x), static_cast<const uint32_t*>(signs),
                                                     static_cast<const __half*>(alpha), static_cast<float*>(partial), n,
                                                     k);
  add_kernel<<<(n + 127) / 128, 128, 0, stream>>>(static_cast<const float*>(partial), static_cast<__half*>(y), n,
                                                  k / kColumns);
  return static_cast<int>(cudaGetLastError());
}
