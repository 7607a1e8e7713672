#include "module.h"

#include "octofuse/error.h"

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  module.doc() = "octofuse's kernels, bound through DLPack. The public API is octofuse.*.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const octofuse::TypeError& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
    } catch (const octofuse::ValueError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const octofuse::RuntimeError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  });
  octofuse::bind_decode(module);
  octofuse::bind_gemm(module);
  octofuse::bind_layout(module);
  octofuse::bind_lowbit(module);
  octofuse::bind_outliers(module);
  octofuse::bind_parallel(module);
  octofuse::bind_quantize(module);
  octofuse::bind_device(module);
}
