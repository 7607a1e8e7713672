// One function per topic; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace octofuse {

void bind_decode(pybind11::module_& module);
void bind_gemm(pybind11::module_& module);
void bind_layout(pybind11::module_& module);
void bind_lowbit(pybind11::module_& module);
void bind_outliers(pybind11::module_& module);
void bind_parallel(pybind11::module_& module);
void bind_quantize(pybind11::module_& module);
void bind_device(pybind11::module_& module);

}  // namespace octofuse
