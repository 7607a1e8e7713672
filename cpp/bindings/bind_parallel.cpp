// What ranks gather from each other over peer memory; tensors are on a GPU.
#include <pybind11/stl.h>

#include <numeric>
#include <vector>

#include "arguments.h"
#include "module.h"
#include "octofuse/error.h"
#include "octofuse/parallel.h"

namespace octofuse {
namespace {

// x [..., sizes[rank]] -> [..., sum of sizes]. inboxes: addresses, of each rank one, of memory that this GPU may write
// to (parallel.h); calls int32 [kGatherBlocks].
py::object gather_op(py::handle x_object, const std::vector<int64_t>& sizes, int rank,
                     const std::vector<uint64_t>& inboxes, py::handle calls_object, int64_t capacity, double limit) {
  const TensorView x(x_object, "x");
  const TensorView calls(calls_object, "calls");
  const int ranks = static_cast<int>(sizes.size());
  if (x.on_cpu()) refuse<ValueError>("x", "a tensor on a GPU", "one on the CPU");
  if (ranks < 1 || ranks > kMaxRanks || inboxes.size() != sizes.size() || rank < 0 || rank >= ranks) {
    refuse<ValueError>("sizes", "1 to 8 ranks, this one among them, with an inbox each", std::to_string(ranks));
  }
  if (capacity < 1 || capacity > kMaxGather) {
    refuse<ValueError>("capacity", "1 to " + std::to_string(kMaxGather) + " bytes", std::to_string(capacity));
  }
  if (x.ndim() < 1 || x.size(x.ndim() - 1) != sizes[static_cast<size_t>(rank)] || !x.is_contiguous()) {
    refuse<ValueError>("x", "a contiguous tensor with " + std::to_string(sizes[static_cast<size_t>(rank)]) + " columns",
                       "shape " + x.shape_text());
  }
  expect_dtype(calls, {DType::kInt32});
  expect_same_device(calls, x);
  if (calls.numel() != kGatherBlocks || !calls.is_contiguous()) {
    refuse<ValueError>("calls", std::to_string(kGatherBlocks) + " counters", "shape " + calls.shape_text());
  }
  GatherArgs args;
  args.rows = static_cast<int>(x.rows());
  args.ranks = ranks;
  args.rank = rank;
  for (int r = 0; r < ranks; ++r) {
    const auto at = static_cast<size_t>(r);
    const int64_t row_bytes = sizes[at] * static_cast<int64_t>(size_of(x.dtype));
    if (sizes[at] < 1 || row_bytes % kGatherUnit != 0 || row_bytes * args.rows > capacity) {
      refuse<ValueError>("sizes", "rows of multiples of 8 bytes, at most " + std::to_string(capacity) + " in all",
                         std::to_string(row_bytes) + " in " + std::to_string(args.rows) + " rows");
    }
    args.row_units[r] = static_cast<int>(row_bytes / kGatherUnit);
    args.inboxes[r] = reinterpret_cast<void*>(inboxes[at]);
  }
  if (reinterpret_cast<uintptr_t>(x.data()) % kGatherUnit != 0) {
    refuse<ValueError>("x", "data that starts at a multiple of 8 bytes", "a view into the middle of a tensor");
  }
  args.capacity = capacity;
  args.x = x.data();
  args.calls = reinterpret_cast<uint32_t*>(calls.data<int32_t>());
  args.limit = static_cast<uint64_t>(limit * 1e9);
  std::vector<int64_t> shape(x.dl.shape, x.dl.shape + x.ndim());
  shape.back() = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const TensorFactory factory(x.dl.device);
  py::object result = factory.make(shape, x.dtype, &args.out);
  gather(args, x.device(), factory.current_stream());
  return result;
}

}  // namespace

void bind_parallel(py::module_& module) {
  module.attr("GATHER_BLOCKS") = kGatherBlocks;
  module.attr("GATHER_UNIT") = kGatherUnit;
  module.attr("MAX_RANKS") = kMaxRanks;
  module.def("gather_inbox_bytes", &gather_inbox_bytes, py::arg("capacity"), py::arg("ranks"));
  module.def("gather", &gather_op, py::arg("x"), py::arg("sizes"), py::arg("rank"), py::arg("inboxes"),
             py::arg("calls"), py::arg("capacity"), py::arg("limit"));
}

}  // namespace octofuse
