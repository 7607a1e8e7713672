// Calls of the CPU engine, cut into pieces of work: one parallel loop a call, none for small work.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "octofuse/cpu.h"

namespace octofuse::cpu {
namespace {

constexpr int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
constexpr int64_t pieces_of(int64_t value, int64_t step) { return (value + step - 1) / step; }

// A thread's memory between calls: fresh pages cost more than a small call. Large blocks are given back.
class Scratch {
 public:
  template <class T>
  T* take(int64_t count) {
    const auto bytes = static_cast<size_t>(rounded_up(count * static_cast<int64_t>(sizeof(T)), 64));
    if (bytes > size_) {
      data_.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
      size_ = data_ ? bytes : 0;
      if (!data_) throw std::bad_alloc();
    }
    return reinterpret_cast<T*>(data_.get());
  }
  void release() {
    constexpr size_t kKept = size_t{16} << 20;
    if (size_ > kKept) {
      data_.reset();
      size_ = 0;
    }
  }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

enum Use { kPrepared, kQuantised, kScales, kSums, kRow, kUses };

Scratch& scratch(Use use) {
  thread_local Scratch all[kUses];
  return all[use];
}

struct ReleaseScratch {
  ~ReleaseScratch() {
    for (int use = 0; use < kUses; ++use) scratch(static_cast<Use>(use)).release();
  }
};

// A thread has to save at least this much to be worth waking.
constexpr double kWorthAThread = 15e3;

int threads_for(double nanoseconds) {
  const double worth = nanoseconds / kWorthAThread;
  if (worth < 2.0) return 1;
  const int most = max_threads();
  return worth < most ? static_cast<int>(worth) : most;
}

// About what a call takes on one thread: ns for a byte of weights read, and for a product. Measured with AVX2 at 3.7
// GHz (benchmarks/bench_cpu.py's layers); only the number of threads follows from it.
double time_of(double weight_bytes, double products) { return weight_bytes * 0.08 + products * 0.03; }
double time_of_rows(int64_t rows, int64_t cols) { return static_cast<double>(rows * cols) * 1.0; }

// Blocks of rows are prepared by whoever comes first, as the first pieces of work of a loop; a later piece waits for
// the blocks that it reads.
class Prepared {
 public:
  explicit Prepared(int64_t blocks) : done_(new std::atomic<bool>[static_cast<size_t>(blocks)]) {
    for (int64_t i = 0; i < blocks; ++i) done_[static_cast<size_t>(i)].store(false, std::memory_order_relaxed);
  }
  // At the end of its scope, an exception's too: others wait for the block. They then work on rows of no meaning, and
  // the exception is all that the caller gets.
  struct Finish {
    Prepared& prepared;
    int64_t block;
    ~Finish() { prepared.done_[static_cast<size_t>(block)].store(true, std::memory_order_release); }
  };
  void wait(int64_t block) const {
    wait_until([&] { return done_[static_cast<size_t>(block)].load(std::memory_order_acquire); });
  }

 private:
  std::unique_ptr<std::atomic<bool>[]> done_;
};

// Handing so few rows out takes longer than preparing them.
constexpr int64_t kAlone = 16;

// prepare(first row, last row) for all rows, then multiply(block's first row, its last row, piece) for every piece of
// every block of rows.
template <class Prepare, class Multiply>
void run_blocks(int64_t rows, int64_t block_rows, int64_t pieces, int threads, const Prepare& prepare,
                const Multiply& multiply) {
  const int64_t blocks = pieces_of(rows, block_rows);
  const auto last_of = [&](int64_t block) { return std::min(rows, (block + 1) * block_rows); };
  if (threads < 2 || rows <= kAlone) {
    for (int64_t block = 0; block < blocks; ++block) prepare(block * block_rows, last_of(block));
    parallel_for(blocks * pieces, threads, [&](int64_t i) {
      const int64_t block = i / pieces;
      multiply(block * block_rows, last_of(block), i % pieces);
    });
    return;
  }
  // Rows are prepared in smaller blocks than they are multiplied in, so that all threads have some.
  constexpr int64_t kRows = 8;
  const int64_t first_pieces = pieces_of(rows, kRows);
  Prepared prepared(first_pieces);
  parallel_for(first_pieces + blocks * pieces, threads, [&](int64_t i) {
    if (i < first_pieces) {
      const Prepared::Finish finish{prepared, i};
      prepare(i * kRows, std::min(rows, (i + 1) * kRows));
      return;
    }
    const int64_t block = (i - first_pieces) / pieces, first = block * block_rows, last = last_of(block);
    for (int64_t row = first / kRows; row * kRows < last; ++row) prepared.wait(row);
    multiply(first, last, (i - first_pieces) % pieces);
  });
}

// quantise(kernel, first, last) makes int8 of x's rows [first, last) where they are not, product(kernel, x, first,
// last, n0, n1) multiplies them by these channels.
template <class Quantise, class Product>
void multiply(const GemmArgs& args, double time, const Quantise& quantise, const Product& product) {
  if (args.m == 0) return;
  const ReleaseScratch release;
  const Kernels& kernel = kernels();
  PreparedX x;
  x.ld = rounded_up(args.k, kernel.x_step);
  auto* data = scratch(kPrepared).take<char>(args.m * x.ld * static_cast<int64_t>(kernel.x_size));
  auto* sums = scratch(kSums).take<int32_t>(args.m);
  x.data = data;
  x.sums = sums;
  const auto prepare = [&](int64_t first, int64_t last) {
    quantise(kernel, first, last);
    for (int64_t m = first; m < last; ++m) {
      kernel.prepare(args.x + m * args.ldx, args.k, x.ld, data + m * x.ld * static_cast<int64_t>(kernel.x_size),
                     sums + m);
    }
  };
  const auto block = [&](int64_t first, int64_t last, int64_t piece) {
    const int64_t n = piece * kGemmChannels;
    product(kernel, x, first, last, n, std::min(args.n, n + kGemmChannels));
  };
  run_blocks(args.m, kGemmTokens, pieces_of(args.n, kGemmChannels), threads_for(time), prepare, block);
}

template <class Quantise>
void multiply(const GemmArgs& args, double time, const Quantise& quantise) {
  multiply(args, time, quantise,
           [&](const Kernels& kernel, const PreparedX& x, int64_t first, int64_t last, int64_t n0, int64_t n1) {
             kernel.gemm(args, x, first, last, n0, n1);
           });
}

// The same of float8.
template <class Quantise>
void multiply_float8(const GemmArgs& args, double time, const Quantise& quantise) {
  if (args.m == 0) return;
  const ReleaseScratch release;
  const Kernels& kernel = kernels();
  const int64_t ld = rounded_up(args.k, kScaleBlock);
  auto* x = scratch(kPrepared).take<float>(args.m * ld);
  const auto prepare = [&](int64_t first, int64_t last) {
    quantise(kernel, first, last);
    for (int64_t m = first; m < last; ++m) kernel.widen(args.x, args.x_type, m * args.ldx, args.k, ld, x + m * ld);
  };
  const auto block = [&](int64_t first, int64_t last, int64_t piece) {
    const int64_t n = piece * kGemmChannels;
    kernel.float8(args, x, ld, first, last, n, std::min(args.n, n + kGemmChannels));
  };
  run_blocks(args.m, kGemmTokens, pieces_of(args.n, kGemmChannels), threads_for(4 * time), prepare, block);
}

// The linear of channels [n0, n0 + count) alone, whose weight is `w`.
GemmArgs channels_of(GemmArgs args, int64_t n0, int64_t count, const int8_t* w) {
  const auto from = [n0](const void* row, DType type) {
    return row == nullptr ? nullptr : static_cast<const char*>(row) + n0 * static_cast<int64_t>(size_of(type));
  };
  args.n = count;
  args.w = w;
  args.out = static_cast<char*>(args.out) + n0 * static_cast<int64_t>(size_of(args.out_type));
  args.epilogue.w_scale.data += n0;
  args.epilogue.bias = from(args.epilogue.bias, args.epilogue.bias_type);
  args.epilogue.residual = from(args.epilogue.residual, args.epilogue.residual_type);
  return args;
}

double time_of(const GemmArgs& args) {
  const auto weights = static_cast<double>(args.n * args.k);
  return time_of(weights, weights * static_cast<double>(args.m));
}

// A weight of few bits that is integers, beside int8 tokens: a piece of it becomes int8 at a time, in a thread's own
// memory, and the int8 product takes that.
void integer_linear(const LowbitArgs& args) {
  const int64_t ldw = rounded_up(args.k, kBlockK);
  auto* w_scale = scratch(kScales).take<float>(args.n);
  kernels().widen(args.scale, args.type, 0, args.n, args.n, w_scale);
  GemmArgs gemm;
  gemm.m = args.m;
  gemm.n = args.n;
  gemm.k = args.k;
  gemm.x = static_cast<const int8_t*>(args.x);
  gemm.ldx = args.ldx;
  gemm.ldw = ldw;
  gemm.out = args.out;
  gemm.ldo = args.n;
  gemm.out_type = args.out_type;
  gemm.epilogue = args.epilogue;
  gemm.epilogue.w_scale = {w_scale, 1, 1.0F};
  const auto nothing = [](const Kernels&, int64_t, int64_t) {};
  // To make a weight takes about as long as to read it.
  multiply(gemm, 2 * time_of(gemm), nothing,
           [&](const Kernels& kernel, const PreparedX& x, int64_t first, int64_t last, int64_t n0, int64_t n1) {
             auto* w = scratch(kRow).take<int8_t>(kGemmChannels * ldw);
             for (int64_t n = n0; n < n1; n += kTileRows) {
               kernel.integers(args, n / kTileRows, w + (n - n0) * ldw, ldw);
             }
             kernel.gemm(channels_of(gemm, n0, n1 - n0, w), x, first, last, 0, n1 - n0);
           });
}

}  // namespace

void linear(const GemmArgs& args) {
  const auto nothing = [](const Kernels&, int64_t, int64_t) {};
  if (is_float8(args.x_type)) return multiply_float8(args, time_of(args), nothing);
  multiply(args, time_of(args), nothing);
}

void row_linear(const RowPassArgs& rows, bool per_token, GemmArgs args) {
  RowPassArgs pass = rows;
  args.x = pass.q = scratch(kQuantised).take<int8_t>(args.m * args.k);
  args.ldx = args.k;
  args.epilogue.x_scale = rows.scale;
  pass.q_type = args.x_type;
  if (per_token) {
    pass.block_scales = args.w_blocks.data != nullptr;
    pass.scales = scratch(kScales).take<float>(args.m * (pass.block_scales ? scale_blocks(args.k) : 1));
    if (pass.block_scales) {
      args.x_blocks = {pass.scales, 1, args.m};
    } else {
      args.epilogue.x_scale = {pass.scales, 1, 1.0F};
    }
  }
  const double time = time_of(args) + time_of_rows(args.m, args.k);
  const auto quantise = [&](const Kernels& kernel, int64_t first, int64_t last) {
    kernel.row_pass(pass, first, last, scratch(kRow).take<float>(row_pass_floats(pass.cols)));
  };
  if (is_float8(args.x_type)) return multiply_float8(args, time, quantise);
  multiply(args, time, quantise);
}

void row_pass(const RowPassArgs& args) {
  constexpr int64_t kRows = 4;
  const ReleaseScratch release;
  const Kernels& kernel = kernels();
  parallel_for(pieces_of(args.rows, kRows), threads_for(time_of_rows(args.rows, args.cols)), [&](int64_t piece) {
    auto* buffer = scratch(kRow).take<float>(row_pass_floats(args.cols));
    kernel.row_pass(args, piece * kRows, std::min(args.rows, (piece + 1) * kRows), buffer);
  });
}

void dequantize(const DequantizeArgs& args) {
  constexpr int64_t kRows = 4;
  const Kernels& kernel = kernels();
  parallel_for(pieces_of(args.rows, kRows), threads_for(time_of_rows(args.rows, args.cols) / 4), [&](int64_t piece) {
    kernel.dequantize(args, piece * kRows, std::min(args.rows, (piece + 1) * kRows));
  });
}

void lowbit_linear(const RowPassArgs& rows, const LowbitArgs& args) {
  if (has_integers(args)) return integer_linear(args);
  const ReleaseScratch release;
  const Kernels& kernel = kernels();
  const int64_t m = args.m, ld = rounded_up(args.k, kBlockK);
  auto* x = scratch(kPrepared).take<float>(m * ld);
  RowPassArgs pass = rows;
  const bool norm = rows.norm != Norm::kNone;
  if (norm) pass.y = scratch(kQuantised).take<char>(m * args.k * static_cast<int64_t>(size_of(rows.type)));
  const DType type = args.x_is_int8 ? DType::kInt8 : rows.type;
  const auto* from = static_cast<const char*>(norm ? pass.y : args.x);
  const int64_t stride = (norm ? args.k : args.ldx) * static_cast<int64_t>(size_of(type));
  const auto prepare = [&](int64_t first, int64_t last) {
    if (norm) kernel.row_pass(pass, first, last, scratch(kRow).take<float>(row_pass_floats(args.k)));
    for (int64_t row = first; row < last; ++row) kernel.permute(from + row * stride, type, args.k, x + row * ld, ld);
  };
  // Two row tiles at a time: a piece of work then takes some microseconds.
  constexpr int64_t kTiles = 2;
  const int64_t tiles = pieces_of(args.n, kTileRows);
  const auto block = [&](int64_t first, int64_t last, int64_t piece) {
    for (int64_t tile = piece * kTiles; tile < std::min(tiles, (piece + 1) * kTiles); ++tile) {
      kernel.lowbit(args, x, ld, first, last, tile);
    }
  };
  const auto weights = static_cast<double>(args.n) * static_cast<double>(args.k);
  const double time = weights * (0.12 + 0.06 * static_cast<double>(m));
  run_blocks(m, kLowbitTokens, pieces_of(tiles, kTiles), threads_for(time), prepare, block);
}

}  // namespace octofuse::cpu
