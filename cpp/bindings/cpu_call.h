// Around a call of the CPU engine: other Python threads run meanwhile.
#pragma once

#include <pybind11/pybind11.h>

namespace octofuse {

class CpuCall {
 public:
  CpuCall() : threads_(threads_of_torch()) {}

 private:
  // torch.set_num_threads() reaches the OpenMP of a new Python thread only when that thread first asks torch for it.
  static bool threads_of_torch() {
    thread_local const bool asked = [] {
      pybind11::module_::import("torch").attr("get_num_threads")();
      return true;
    }();
    return asked;
  }

  bool threads_;  // asked for before the interpreter's lock is released
  pybind11::gil_scoped_release released_;
};

}  // namespace octofuse
