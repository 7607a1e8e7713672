// Rows to a layout and back. A thread moves pieces of 16 bytes that lie together in the layout; they are runs of one or
// several rows of the matrix. Lanes lie beside each other on both sides, so that every 32-byte sector is moved whole by
// one instruction, and a thread has read all its pieces before it writes one. All sizes are in bytes: 2- and 4-byte
// elements are wider runs.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/launch.h"
#include "octofuse/layout.h"

namespace octofuse {
namespace {

using Inner = MatrixOrder::Inner;

constexpr int kBlock = 256;
constexpr int64_t kMaxBlocks = 65535;

struct Geometry {
  uint8_t* matrix;
  uint8_t* laid_out;
  int64_t pitch;        // of the matrix's rows
  int64_t group;        // from one group of columns to the next
  int rows, row_bytes;  // of the matrix
  int padded_rows, padded_bytes;
  int width;  // of a group's row
  Inner inner;
  bool aligned;  // runs of the matrix start at multiples of their size
};

template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t values[kBytes / 4];
};

template <int kRun>
__device__ Words<kRun> read_run(const Geometry& g, int row, int byte) {
  Words<kRun> run{};
  if (row >= g.rows || byte >= g.row_bytes) return run;
  const uint8_t* from = g.matrix + row * g.pitch + byte;
  if (g.aligned && byte + kRun <= g.row_bytes) return *reinterpret_cast<const Words<kRun>*>(from);
#pragma unroll
  for (int word = 0; word < kRun / 4; ++word) {
#pragma unroll 1
    for (int i = 4 * word; i < min(4 * word + 4, g.row_bytes - byte); ++i) {
      run.values[word] |= static_cast<uint32_t>(from[i]) << (i % 4 * 8);
    }
  }
  return run;
}

template <int kRun>
__device__ void write_run(const Geometry& g, int row, int byte, const Words<kRun>& run) {
  if (row >= g.rows || byte >= g.row_bytes) return;
  uint8_t* to = g.matrix + row * g.pitch + byte;
  if (byte + kRun <= g.row_bytes) {
    *reinterpret_cast<Words<kRun>*>(to) = run;
    return;
  }
#pragma unroll
  for (int word = 0; word < kRun / 4; ++word) {
#pragma unroll 1
    for (int i = 4 * word; i < min(4 * word + 4, g.row_bytes - byte); ++i) {
      to[i] = static_cast<uint8_t>(run.values[word] >> (i % 4 * 8));
    }
  }
}

// Where a row of a group lies in it.
__device__ inline int place_of_row(Inner inner, int row) {
  if (inner != Inner::kAmpere) return row;
  const int r = row % 32;
  return row - r + (r % 8 / 2 * 4 + r / 8) * 2 + r % 2;
}

// Where a byte of the padded matrix lies.
__device__ inline int64_t offset_of(const Geometry& g, int row, int byte) {
  const int64_t group = byte / g.width * g.group;
  const int inside = byte % g.width;
  if (g.inner != Inner::kTuring) return group + static_cast<int64_t>(place_of_row(g.inner, row)) * g.width + inside;
  const int run = g.width / 8;  // 4 elements
  const int r = row % 8;
  return group + static_cast<int64_t>(row - r) * g.width + (r % 2 * 32 + inside / run * 4 + r / 2) * run + inside % run;
}

// What a thread moves: kPieces pieces of 16 bytes in the layout, from kRows rows of the matrix, kRun bytes of each,
// kRowStep rows apart; kAcross lanes lie beside each other in a row. `row` counts kRows rows as one.

struct WideRuns {
  static constexpr int kRun = 16, kRows = 1, kRowStep = 1, kPieces = 1, kAcross = 8, kEach = 4;
  __device__ static int first_row(int row) { return row; }
  static int rows(const Geometry& g) { return g.padded_rows; }
};

// COL4_4R2_8C of bytes: runs of 4, from 4 rows, every other one of 8.
struct TuringRuns {
  static constexpr int kRun = 4, kRows = 4, kRowStep = 2, kPieces = 1, kAcross = 32, kEach = 4;
  __device__ static int first_row(int row) { return row / 2 * 8 + row % 2; }
  static int rows(const Geometry& g) { return g.padded_rows / 4; }
};

// Groups narrower than 16 bytes, down to COL: a word of each of kRows rows is a square to transpose.
template <int kWidth>
struct NarrowRuns {
  static constexpr int kRun = 4, kRows = 16 / kWidth, kRowStep = 1, kPieces = kRun / kWidth;
  static constexpr int kAcross = 8, kEach = 1;
  __device__ static int first_row(int row) { return row * kRows; }
  static int rows(const Geometry& g) { return g.rows / kRows; }
};

// Words of 4 rows to words of 4 columns; its own inverse.
__device__ inline void transpose(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  const uint32_t low_a = __byte_perm(in[0], in[1], 0x5140), low_b = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t high_a = __byte_perm(in[0], in[1], 0x7362), high_b = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low_a, low_b, 0x5410);
  out[1] = __byte_perm(low_a, low_b, 0x7632);
  out[2] = __byte_perm(high_a, high_b, 0x5410);
  out[3] = __byte_perm(high_a, high_b, 0x7632);
}

template <class R>
struct Unit {
  Words<R::kRun> runs[R::kRows];
  Words<16> pieces[R::kPieces];

  // Piece p holds, row after row, the p-th part of each run.
  template <bool kToLayout>
  __device__ void rearrange() {
    constexpr int kSide = R::kPieces;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if constexpr (kSide == 1) {
        uint32_t& in_run = runs[word / (R::kRun / 4)].values[word % (R::kRun / 4)];
        (kToLayout ? pieces[0].values[word] : in_run) = kToLayout ? in_run : pieces[0].values[word];
      } else {
        uint32_t in[kSide];
        uint32_t out[kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          in[i] = kToLayout ? runs[word * kSide + i].values[0] : pieces[i].values[word];
        }
        transpose(in, out);
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
          (kToLayout ? pieces[i].values[word] : runs[word * kSide + i].values[0]) = out[i];
        }
      }
    }
  }

  template <bool kToLayout>
  __device__ void read(const Geometry& g, int row, int byte) {
    const int first = R::first_row(row);
    if constexpr (kToLayout) {
#pragma unroll
      for (int i = 0; i < R::kRows; ++i) runs[i] = read_run<R::kRun>(g, first + i * R::kRowStep, byte);
    } else {
#pragma unroll
      for (int p = 0; p < R::kPieces; ++p) pieces[p] = *place(g, first, byte, p);
    }
  }

  template <bool kToLayout>
  __device__ void write(const Geometry& g, int row, int byte) {
    const int first = R::first_row(row);
    rearrange<kToLayout>();
    if constexpr (kToLayout) {
#pragma unroll
      for (int p = 0; p < R::kPieces; ++p) {
        if (p == 0 || byte + p * (R::kRun / R::kPieces) < g.padded_bytes) *place(g, first, byte, p) = pieces[p];
      }
    } else {
#pragma unroll
      for (int i = 0; i < R::kRows; ++i) write_run<R::kRun>(g, first + i * R::kRowStep, byte, runs[i]);
    }
  }

  // Behind the last group the last one's piece is read, and not used.
  __device__ static Words<16>* place(const Geometry& g, int row, int byte, int p) {
    constexpr int kPart = R::kRun / R::kPieces;
    const int at = p == 0 ? byte : min(byte + p * kPart, g.padded_bytes - kPart);
    return reinterpret_cast<Words<16>*>(g.laid_out + offset_of(g, row, at));
  }
};

// A thread's place among its block's: beside each other in a row, or, for narrow runs, 4 below each other first: their
// pieces then are 64 bytes of the layout.
template <class R>
constexpr int kBelow = R::kAcross == 8 && R::kRun < 16 ? 4 : 1;

template <class R>
__device__ inline int across(int thread) {
  return thread / kBelow<R> % R::kAcross;
}

template <class R>
__device__ inline int down(int thread) {
  return thread / (kBelow<R> * R::kAcross) * kBelow<R> + thread % kBelow<R>;
}

template <class R, bool kToLayout>
__global__ void __launch_bounds__(kBlock) convert_kernel(const Geometry g, int rows) {
  constexpr int kDown = kBlock / R::kAcross;
  const int thread = static_cast<int>(threadIdx.x);
  const int byte = (static_cast<int>(blockIdx.x) * R::kAcross + across<R>(thread)) * R::kRun;
  if (byte >= g.padded_bytes) return;
  const int step = kDown * static_cast<int>(gridDim.y);
  for (int row = static_cast<int>(blockIdx.y) * kDown + down<R>(thread); row < rows; row += R::kEach * step) {
    Unit<R> units[R::kEach];
#pragma unroll
    for (int i = 0; i < R::kEach; ++i) {
      if (row + i * step < rows) units[i].template read<kToLayout>(g, row + i * step, byte);
    }
#pragma unroll
    for (int i = 0; i < R::kEach; ++i) {
      if (row + i * step < rows) units[i].template write<kToLayout>(g, row + i * step, byte);
    }
  }
}

// Byte by byte, along the rows of the padded matrix: for what is not aligned, and for narrow groups whose rows do not
// fill pieces.
constexpr int kByteRows = 8;  // of a thread

template <bool kToLayout>
__global__ void __launch_bounds__(kBlock) convert_bytes_kernel(const Geometry g) {
  const int byte = static_cast<int>(blockIdx.x) * kBlock + static_cast<int>(threadIdx.x);
  if (byte >= g.padded_bytes) return;
  const int step = static_cast<int>(gridDim.y);
  for (int first = static_cast<int>(blockIdx.y); first < g.padded_rows; first += kByteRows * step) {
    uint8_t values[kByteRows];
#pragma unroll
    for (int i = 0; i < kByteRows; ++i) {
      const int row = first + i * step;
      const bool inside = row < g.rows && byte < g.row_bytes;
      values[i] = !inside ? 0 : kToLayout ? g.matrix[row * g.pitch + byte] : g.laid_out[offset_of(g, row, byte)];
    }
#pragma unroll
    for (int i = 0; i < kByteRows; ++i) {
      const int row = first + i * step;
      if (kToLayout && row < g.padded_rows) g.laid_out[offset_of(g, row, byte)] = values[i];
      if (!kToLayout && row < g.rows && byte < g.row_bytes) g.matrix[row * g.pitch + byte] = values[i];
    }
  }
}

void launch_bytes(const Geometry& g, bool to_layout, cudaStream_t stream) {
  const int64_t down = std::min<int64_t>((g.padded_rows + kByteRows - 1) / kByteRows, kMaxBlocks);
  const dim3 grid(static_cast<unsigned>((g.padded_bytes + kBlock - 1) / kBlock), static_cast<unsigned>(down));
  const auto kernel = to_layout ? convert_bytes_kernel<true> : convert_bytes_kernel<false>;
  kernel<<<grid, kBlock, 0, stream>>>(g);
}

template <class R>
void launch_runs(Geometry& g, bool to_layout, cudaStream_t stream) {
  g.aligned = reinterpret_cast<uintptr_t>(g.matrix) % R::kRun == 0 && g.pitch % R::kRun == 0;
  // Words of a row that are not aligned would be stored byte by byte, 16 lines at a time.
  if (!g.aligned && !to_layout) return launch_bytes(g, to_layout, stream);
  constexpr int kDown = kBlock / R::kAcross;
  const int rows = R::rows(g);
  const int64_t across = (g.padded_bytes + R::kRun * R::kAcross - 1) / (R::kRun * R::kAcross);
  const int64_t down = std::clamp<int64_t>((rows + kDown * R::kEach - 1) / (kDown * R::kEach), 1, kMaxBlocks);
  const auto kernel = to_layout ? convert_kernel<R, true> : convert_kernel<R, false>;
  kernel<<<dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), kBlock, 0, stream>>>(g, rows);
}

template <int kWidth>
void launch_narrow(Geometry& g, bool to_layout, cudaStream_t stream) {
  if (g.rows % NarrowRuns<kWidth>::kRows != 0) return launch_bytes(g, to_layout, stream);
  launch_runs<NarrowRuns<kWidth>>(g, to_layout, stream);
}

void launch(Geometry& g, bool to_layout, cudaStream_t stream) {
  if (g.inner == Inner::kTuring) {
    if (g.width == 32) return launch_runs<TuringRuns>(g, to_layout, stream);
    return launch_bytes(g, to_layout, stream);  // wider elements: not an order of weights that any GEMM reads
  }
  switch (g.width) {
    case 1:
      return launch_narrow<1>(g, to_layout, stream);
    case 4:
      return launch_narrow<4>(g, to_layout, stream);
    case 2:
    case 8:
      return launch_bytes(g, to_layout, stream);  // interleaved<2>, <8>: too rare for kernels of their own
    default:
      if (g.width % 16 != 0) return launch_bytes(g, to_layout, stream);  // ROW, whose one tile is a whole row
      return launch_runs<WideRuns>(g, to_layout, stream);
  }
}

}  // namespace

void convert_layout(const ConvertArgs& args, int device, Stream stream) {
  const DeviceGuard guard(device);
  const MatrixOrder& order = args.order;
  Geometry g{};
  g.matrix = static_cast<uint8_t*>(args.matrix);
  g.laid_out = static_cast<uint8_t*>(args.laid_out);
  g.pitch = args.ld * args.element;
  g.rows = static_cast<int>(args.rows);
  g.row_bytes = static_cast<int>(args.cols * args.element);
  g.padded_rows = static_cast<int>(order.padded_rows(args.rows));
  g.padded_bytes = static_cast<int>(order.padded_cols(args.cols) * args.element);
  g.width = static_cast<int>(order.tile_cols * args.element);
  g.group = static_cast<int64_t>(g.padded_rows) * g.width;
  g.inner = order.inner;
  launch(g, args.to_layout, static_cast<cudaStream_t>(stream));
  check_launch("convert_layout");
}

}  // namespace octofuse
