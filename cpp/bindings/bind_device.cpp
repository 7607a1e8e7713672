// What this build and this machine can do.
#include <pybind11/stl.h>

#include "cpu_call.h"
#include "module.h"
#include "octofuse/cpu.h"
#include "octofuse/device.h"

namespace octofuse {
namespace {

namespace py = pybind11;

// Versions and paths of what was built against and what is loaded; creates no CUDA context.
py::dict build_info() {
  py::dict info;
  info["architectures"] = built_architectures();
  info["cuda"] = *built_architectures() != '\0';
  info["cuda_version"] = toolkit_version();
  info["cutlass_version"] = cutlass_version();
  return info;
}

int threads_of_calls() {
  const CpuCall on_cpu;
  return cpu::max_threads();
}

// The CPU engine's instruction sets, the best first: what stands against each ("" if nothing does).
py::dict cpu_info() {
  py::dict isas;
  for (const cpu::Isa& one : cpu::isas()) isas[one.name] = one.why_not;
  py::dict info;
  info["isa"] = cpu::isa();
  info["isas"] = isas;
  info["threads"] = threads_of_calls();
  return info;
}

py::dict cublaslt_info() {
  const CublasLtStatus status = cublaslt_status();
  py::dict info;
  info["loaded"] = status.loaded;
  info["why_not"] = status.why_not;
  info["path"] = status.path;
  info["version"] = status.version;
  return info;
}

py::dict device_info(int device) {
  const Capability& capability = device_capability(device);
  py::dict info;
  info["compute_capability"] = capability.compute_capability;
  info["sm_count"] = capability.sm_count;
  info["bandwidth"] = capability.bandwidth;
  info["kernels_sm90a"] = capability.kernels_sm90a;
  info["kernels_mma"] = capability.kernels_mma;
  info["kernels_naive"] = capability.kernels_naive;
  info["cublaslt"] = capability.cublaslt;
  return info;
}

}  // namespace

void bind_device(py::module_& module) {
  module.def("build_info", &build_info);
  module.def("cpu_info", &cpu_info);
  module.def("free_cores", &cpu::free_cores);
  module.def("use_cpu_isa", &cpu::use_isa, py::arg("name"));
  module.def("cublaslt_info", &cublaslt_info);
  module.def("allow_overlap", &allow_overlap, py::arg("allowed"));
  module.def("limit_shared_memory", &limit_shared_memory, py::arg("device"), py::arg("bytes"));
  module.def("device_info", &device_info, py::arg("device"));
}

}  // namespace octofuse
