// The arguments of the larger ops as Python hands them over: one NamedTuple of ops/_calls.py for each, whose fields
// have the names and the order of the lists here (tests/test_ops_calls.py compares both).
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "octofuse/error.h"

namespace octofuse {

namespace py = pybind11;

// clang-format off
#define OCTOFUSE_LINEAR_FIELDS(X) \
  X(x) X(w) X(x_scale) X(w_scale) X(bias) X(activation) X(residual) \
  X(out_dtype) X(out_scale) X(engine) X(x_zero_point) X(w_sum) X(constant_weight) X(fast_accumulate)

#define OCTOFUSE_ROW_LINEAR_FIELDS(X) \
  X(x) X(w) X(x_scale) X(w_scale) X(norm) X(norm_weight) X(norm_bias) X(eps) X(bias) X(activation) X(residual) \
  X(out_dtype) X(out_scale) X(constant_weight) X(fast_accumulate)

#define OCTOFUSE_LOWBIT_FIELDS(X) \
  X(x) X(x_scale) X(packed) X(scale) X(zero) X(offset) X(kind) X(bits) X(group) \
  X(norm) X(norm_weight) X(norm_bias) X(eps) X(bias) X(activation) X(residual) \
  X(out_scale) X(engine) X(constant_weight) X(gated) X(zero_point) X(levels) X(group_scale)

#define OCTOFUSE_OUTLIER_FIELDS(X) \
  X(x) X(w) X(w_scale) X(bias) X(threshold) X(activation) X(residual) X(constant_weight)

#define OCTOFUSE_ROWS_FIELDS(X) \
  X(x) X(op) X(residual) X(weight) X(bias) X(eps) X(activation) X(quantize) X(scale) \
  X(constants) X(order) X(q_dtype) X(q_block) X(of_part)

#define OCTOFUSE_COL32_FIELDS(X) \
  X(x) X(w) X(sizes) X(x_scale) X(w_scale) X(bias) X(activation) X(residual) \
  X(out_dtype) X(out_scale) X(out_layout) X(size)

#define OCTOFUSE_ATTEND_FIELDS(X) \
  X(q) X(k) X(v) X(keys) X(values) X(key_scales) X(value_scales) X(fixed_scales) X(rotary) X(query_norm) X(key_norm) \
  X(eps) X(scaling) X(window) X(softcap) X(positions) X(starts) X(partials) X(arrivals) X(out_scale)

#define OCTOFUSE_PEER_FIELDS(X) X(sizes) X(rank) X(addresses) X(calls) X(capacity) X(bulk) X(limit)
// clang-format on

#define OCTOFUSE_ONE(name) +1
#define OCTOFUSE_MEMBER(name) py::handle name;
#define OCTOFUSE_TAKE(name) name = PyTuple_GET_ITEM(call.ptr(), next++);
#define OCTOFUSE_NAME(name) names.append(#name);

#define OCTOFUSE_CALL(Type, FIELDS)                                                                                 \
  struct Type {                                                                                                     \
    FIELDS(OCTOFUSE_MEMBER)                                                                                         \
    explicit Type(const py::tuple& call) {                                                                          \
      constexpr py::ssize_t kFields = 0 FIELDS(OCTOFUSE_ONE);                                                       \
      if (static_cast<py::ssize_t>(call.size()) != kFields) {                                                       \
        refuse<TypeError>("call", #Type " of " + std::to_string(kFields) + " fields", std::to_string(call.size())); \
      }                                                                                                             \
      py::ssize_t next = 0;                                                                                         \
      FIELDS(OCTOFUSE_TAKE)                                                                                         \
    }                                                                                                               \
    static py::list names() {                                                                                       \
      py::list names;                                                                                               \
      FIELDS(OCTOFUSE_NAME)                                                                                         \
      return names;                                                                                                 \
    }                                                                                                               \
  };

OCTOFUSE_CALL(LinearFields, OCTOFUSE_LINEAR_FIELDS)
OCTOFUSE_CALL(RowLinearFields, OCTOFUSE_ROW_LINEAR_FIELDS)
OCTOFUSE_CALL(LowbitFields, OCTOFUSE_LOWBIT_FIELDS)
OCTOFUSE_CALL(OutlierFields, OCTOFUSE_OUTLIER_FIELDS)
OCTOFUSE_CALL(RowsFields, OCTOFUSE_ROWS_FIELDS)
OCTOFUSE_CALL(Col32Fields, OCTOFUSE_COL32_FIELDS)
OCTOFUSE_CALL(AttendFields, OCTOFUSE_ATTEND_FIELDS)
OCTOFUSE_CALL(PeerFields, OCTOFUSE_PEER_FIELDS)

#undef OCTOFUSE_CALL
#undef OCTOFUSE_NAME
#undef OCTOFUSE_TAKE
#undef OCTOFUSE_MEMBER
#undef OCTOFUSE_ONE

}  // namespace octofuse
