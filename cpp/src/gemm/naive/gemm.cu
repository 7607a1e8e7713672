// The readable reference, and a column of every benchmark: what one gets without tensor cores, wide loads or reuse in
// registers. It takes any shape, stride and alignment.
#include "device/launch.h"
#include "epilogue/formula.cuh"
#include "gemm/naive/run.h"

namespace octofuse {
namespace {

constexpr int kTile = 16;

__global__ void gemm_naive(GemmArgs args) {
  __shared__ int8_t x_tile[kTile][kTile];
  __shared__ int8_t w_tile[kTile][kTile + 4];  // + 4: threads of a row read different banks

  const int64_t m = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.y;
  const int64_t n = static_cast<int64_t>(blockIdx.y) * kTile + threadIdx.x;
  const int64_t w_row = static_cast<int64_t>(blockIdx.y) * kTile + threadIdx.y;

  int32_t acc = 0;
  for (int64_t k0 = 0; k0 < args.k; k0 += kTile) {
    const int64_t k = k0 + threadIdx.x;
    x_tile[threadIdx.y][threadIdx.x] = m < args.m && k < args.k ? args.x[m * args.ldx + k] : 0;
    w_tile[threadIdx.y][threadIdx.x] = w_row < args.n && k < args.k ? args.w[w_row * args.ldw + k] : 0;
    __syncthreads();
    for (int i = 0; i < kTile; ++i) acc += x_tile[threadIdx.y][i] * w_tile[threadIdx.x][i];
    __syncthreads();
  }

  if (m >= args.m || n >= args.n) return;
  const Coordinates<1> at{
      {static_cast<int>(m)}, {static_cast<int>(n)}, static_cast<int>(args.m), static_cast<int>(args.n)};
  int32_t accs[1] = {acc};
  store_row(args.out, args.out_type, m * args.ldo + n, accs, at, args.epilogue, false);
}

}  // namespace

void run_naive(const GemmArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.m + kTile - 1) / kTile),
                  static_cast<unsigned>((args.n + kTile - 1) / kTile));
  gemm_naive<<<grid, dim3(kTile, kTile), 0, stream>>>(args);
  check_launch("naive");
}

}  // namespace octofuse
