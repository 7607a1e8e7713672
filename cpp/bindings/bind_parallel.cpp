// What ranks gather from each other over peer memory; tensors are on a GPU.
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "arguments.h"
#include "call.h"
#include "module.h"
#include "octofuse/error.h"
#include "octofuse/parallel.h"
#include "row_call.h"

namespace octofuse {
namespace {

// Of a PeerCall: addresses[r], of memory of rank r's that this GPU may write to (parallel.h); calls int32
// [kCallCounters].
Peers parse_peers(const PeerFields& given, const TensorView& x) {
  const auto addresses = py::cast<std::vector<uint64_t>>(given.addresses);
  const auto rank = py::cast<int>(given.rank);
  const auto capacity = py::cast<int64_t>(given.capacity);
  const auto bulk = py::cast<int64_t>(given.bulk);
  const TensorView calls(given.calls, "calls");
  const int ranks = static_cast<int>(addresses.size());
  if (x.on_cpu()) refuse<ValueError>("x", "a tensor on a GPU", "one on the CPU");
  if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    refuse<ValueError>("addresses", "1 to 8 ranks, this one among them", std::to_string(ranks));
  }
  if (capacity < 1 || capacity > kMaxGather) {
    refuse<ValueError>("capacity", "1 to " + std::to_string(kMaxGather) + " bytes", std::to_string(capacity));
  }
  if (bulk < 0 || bulk > kMaxGather || bulk % kBulkSpan != 0) {
    refuse<ValueError>("bulk", "a multiple of " + std::to_string(kBulkSpan) + ", at most " + std::to_string(kMaxGather),
                       std::to_string(bulk));
  }
  expect_dtype(calls, {DType::kInt32});
  expect_same_device(calls, x);
  if (calls.numel() != kCallCounters || !calls.is_contiguous()) {
    refuse<ValueError>("calls", std::to_string(kCallCounters) + " counters", "shape " + calls.shape_text());
  }
  Peers peers;
  peers.ranks = ranks;
  peers.rank = rank;
  peers.capacity = capacity;
  peers.bulk = bulk;
  peers.calls = reinterpret_cast<uint32_t*>(calls.data<int32_t>());
  peers.limit = static_cast<uint64_t>(py::cast<double>(given.limit) * 1e9);
  for (int r = 0; r < ranks; ++r) peers.inboxes[r] = reinterpret_cast<void*>(addresses[static_cast<size_t>(r)]);
  return peers;
}

using Sizes = std::vector<int64_t>;  // elements of a row of each rank

// Whole units of bytes, that fit their part of an inbox.
void expect_sizes(const Sizes& sizes, const Peers& peers, int64_t width, int64_t element, int64_t unit,
                  int64_t rows_at_once) {
  if (static_cast<int>(sizes.size()) != peers.ranks) {
    refuse<ValueError>("sizes", "one for each rank", std::to_string(sizes.size()));
  }
  for (const int64_t size : sizes) {
    const int64_t bytes = size * element;
    if (size < 1 || bytes % unit != 0 || bytes * rows_at_once > peers.capacity) {
      refuse<ValueError>("sizes",
                         "rows of multiples of " + std::to_string(unit) + " bytes, at most " +
                             std::to_string(peers.capacity) + " in all",
                         std::to_string(bytes) + " in " + std::to_string(rows_at_once) + " rows");
    }
  }
  const int64_t own = sizes[static_cast<size_t>(peers.rank)];
  if (width != own) refuse<ValueError>("x", std::to_string(own) + " columns", std::to_string(width));
}

void expect_aligned(const TensorView& x, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(x.data()) % bytes != 0) {
    refuse<ValueError>("x", "data that starts at a multiple of " + std::to_string(bytes) + " bytes",
                       "a view into the middle of a tensor");
  }
}

// x [..., sizes[rank]] -> [..., sum of sizes].
py::object gather_op(py::handle x_object, const py::tuple& peer_fields) {
  const PeerFields given(peer_fields);
  const TensorView x(x_object, "x");
  GatherArgs args;
  args.peers = parse_peers(given, x);
  const auto sizes = py::cast<Sizes>(given.sizes);
  if (x.ndim() < 1 || !x.is_contiguous()) refuse<ValueError>("x", "a contiguous tensor", "shape " + x.layout_text());
  const auto element = static_cast<int64_t>(size_of(x.dtype));
  args.rows = static_cast<int>(x.rows());
  args.x = x.data();
  for (size_t r = 0; r < std::min<size_t>(sizes.size(), kMaxRanks); ++r) {
    args.row_units[r] = static_cast<int>(sizes[r] * element / kGatherUnit);
  }
  const bool in_bulk = args.peers.bulk > 0 && gathers_bulk(args);
  expect_sizes(sizes, args.peers, x.size(x.ndim() - 1), element, kGatherUnit, in_bulk ? 0 : args.rows);
  expect_aligned(x, kGatherUnit);
  std::vector<int64_t> shape(x.dl.shape, x.dl.shape + x.ndim());
  shape.back() = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const TensorFactory factory(x.dl.device);
  py::object result = factory.make(shape, x.dtype, &args.out);
  gather(args, x.device(), factory.current_stream());
  return result;
}

// A RowsCall of "copy", "gated_activation" or a norm over rows that ranks have parts of (GatherRowsArgs); returns what
// `rows` does, and for the norm of a sum the sum as well. adds: every rank has whole rows, which are added.
py::object gather_rows_op(const py::tuple& fields, bool adds, const py::tuple& peer_fields, bool clusters) {
  const RowsFields given(fields);
  const PeerFields peers(peer_fields);
  const TensorView x(given.x, "x");
  GatherRowsArgs args;
  args.peers = parse_peers(peers, x);
  const auto sizes = py::cast<Sizes>(peers.sizes);
  RowPassArgs& rows = args.rows = checked_rows(x);
  expect_dtype(x, {DType::kFloat16, DType::kBFloat16});
  const std::string op = parse_str(given.op, "op");
  const int64_t parts = op == "gated_activation" ? 2 : 1;
  if (rows.cols % parts != 0) refuse<ValueError>("x", "gates and values of the same width", "shape " + x.shape_text());
  constexpr int64_t kPackBytes = 16;
  expect_sizes(sizes, args.peers, rows.cols / parts, 2, kPackBytes, rows.rows);
  expect_aligned(x, kPackBytes);
  if (rows.ldx * 2 % kPackBytes != 0) refuse<ValueError>("x", "rows at multiples of 16 bytes", x.shape_text());
  for (size_t r = 0; r < sizes.size(); ++r) args.cols[r] = static_cast<int>(sizes[r]);
  args.adds = adds;
  args.clusters = clusters;
  const int64_t whole = adds ? rows.cols : parts * std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  rows.cols = whole;
  parse_rows(given, x, rows);
  if (!given.residual.is_none()) refuse<ValueError>("residual", "None", "a tensor");
  const int64_t most = most_gathered_columns(rows.norm != Norm::kNone, clusters, x.device());
  const bool plain =
      rows.order == nullptr && !rows.block_scales && (rows.activation == Activation::kNone || rows.gated);
  if (!plain || (adds && rows.gated) || rows.rows > kMostGatheredRows || rows.cols > most) {
    refuse<ValueError>("call",
                       "a norm, a gated activation or a copy of at most " + std::to_string(kMostGatheredRows) +
                           " rows and " + std::to_string(most) + " columns",
                       op + " of " + std::to_string(rows.rows) + " and " + std::to_string(rows.cols));
  }
  const TensorFactory factory(x.dl.device);
  py::list results = make_row_results(given, x, factory, rows);
  if (adds && rows.norm != Norm::kNone) results.append(factory.make(shape_of(x), x.dtype, &rows.sum));
  gather_rows(args, x.device(), factory.current_stream());
  return results;
}

}  // namespace

void bind_parallel(py::module_& module) {
  module.attr("CALL_COUNTERS") = kCallCounters;
  module.attr("MOST_GATHERED_ROWS") = kMostGatheredRows;
  module.attr("GATHER_UNIT") = kGatherUnit;
  module.attr("BULK_UNIT") = kBulkUnit;
  module.attr("BULK_SPAN") = kBulkSpan;
  module.attr("MAX_RANKS") = kMaxRanks;
  module.def("gather_inbox_bytes", &gather_inbox_bytes, py::arg("capacity"), py::arg("bulk"), py::arg("ranks"));
  module.def("most_gathered_columns", &most_gathered_columns, py::arg("norm"), py::arg("clusters"), py::arg("device"));
  module.def("gather", &gather_op, py::arg("x"), py::arg("peers"));
  module.def("gather_rows", &gather_rows_op, py::arg("call"), py::arg("adds"), py::arg("peers"),
             py::arg("clusters") = true);
}

}  // namespace octofuse
