// torch tensors through the DLPack C exchange API: no libtorch, a few nanoseconds each.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "octofuse/gemm.h"
#include "octofuse/types.h"

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#else
#include <ATen/dlpack.h>
#endif

namespace octofuse {

namespace py = pybind11;

// A borrowed view of a tensor argument; valid while the Python object lives.
class TensorView {
 public:
  // Throws TypeError naming `name` if the object is not a tensor that DLPack can describe.
  TensorView(py::handle object, const char* name);

  const char* name;
  DLTensor dl{};
  DType dtype = DType::kOther;

  int ndim() const { return dl.ndim; }
  int64_t size(int i) const { return dl.shape[i]; }
  int64_t stride(int i) const { return dl.strides != nullptr ? dl.strides[i] : contiguous_stride(i); }
  int64_t numel() const;
  bool on_cpu() const { return dl.device.device_type == kDLCPU; }
  int device() const { return dl.device.device_id; }
  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(dl.data) + dl.byte_offset);
  }

  std::string shape_text() const;   // "[2, 3]"
  std::string layout_text() const;  // the same, "[2, 3] with strides [6, 2]" where it is not contiguous
  std::string device_text() const;  // "cuda:0"
  std::string dtype_text() const;   // "float64"
  bool is_contiguous() const;

  // The tensor read as [rows, size(-1)]: the distance between rows in elements. Throws ValueError if the last dimension
  // is not dense or the leading ones do not collapse into one.
  int64_t row_stride() const;
  int64_t rows() const;  // product of all dimensions but the last

 private:
  int64_t contiguous_stride(int i) const;
};

// torch's allocator and current stream, for one device.
class TensorFactory {
 public:
  explicit TensorFactory(DLDevice device) : device_(device) {}
  ~TensorFactory();
  TensorFactory(const TensorFactory&) = delete;
  TensorFactory& operator=(const TensorFactory&) = delete;

  // A new contiguous tensor; `data` receives its address.
  py::object make(const std::vector<int64_t>& shape, DType dtype, void** data) const;
  // Scratch memory, given back to torch's stream-ordered allocator when this object dies.
  void* scratch(size_t bytes);
  Stream current_stream() const;

 private:
  DLManagedTensorVersioned* allocate(int64_t* shape, int ndim, DType dtype) const;

  DLDevice device_;
  std::vector<DLManagedTensorVersioned*> scratch_;
};

}  // namespace octofuse
