#include "dlpack_tensor.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>

#include "octofuse/error.h"

namespace octofuse {
namespace {

// torch.Tensor's exchange table. Subclasses share it; the Python layer sends them elsewhere first.
const DLPackExchangeAPI* exchange_api() {
  static const DLPackExchangeAPI* api = [] {
    const py::object type = py::module_::import("torch").attr("Tensor");
    if (!py::hasattr(type, "__dlpack_c_exchange_api__")) {
      throw RuntimeError("octofuse needs torch >= 2.10 (no DLPack C exchange API in this torch)");
    }
    const py::object capsule = type.attr("__dlpack_c_exchange_api__");
    auto* table = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) throw py::error_already_set();
    if (table->header.version.major != DLPACK_MAJOR_VERSION) {
      throw RuntimeError("octofuse was built for DLPack 1.x; this torch speaks another major version");
    }
    return table;
  }();
  return api;
}

bool is_tensor(py::handle object) {
  // Never destroyed: the interpreter may be gone before this module is.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  const py::object& type =
      storage.call_once_and_store_result([] { return py::object(py::module_::import("torch").attr("Tensor")); })
          .get_stored();
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

DType dtype_of(DLDataType type) {
  if (type.lanes != 1) return DType::kOther;
  switch (type.code) {
    case kDLInt:
      return type.bits == 8 ? DType::kInt8 : type.bits == 32 ? DType::kInt32 : DType::kOther;
    case kDLFloat:
      return type.bits == 16 ? DType::kFloat16 : type.bits == 32 ? DType::kFloat32 : DType::kOther;
    case kDLBfloat:
      return type.bits == 16 ? DType::kBFloat16 : DType::kOther;
    case kDLFloat8_e4m3fn:
      return DType::kE4M3;
    case kDLFloat8_e5m2:
      return DType::kE5M2;
    default:
      return DType::kOther;
  }
}

DLDataType to_dl(DType type) {
  switch (type) {
    case DType::kInt8:
      return {kDLInt, 8, 1};
    case DType::kInt32:
      return {kDLInt, 32, 1};
    case DType::kFloat16:
      return {kDLFloat, 16, 1};
    case DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case DType::kE4M3:
      return {kDLFloat8_e4m3fn, 8, 1};
    case DType::kE5M2:
      return {kDLFloat8_e5m2, 8, 1};
    default:
      return {kDLFloat, 32, 1};
  }
}

// of_axis: what stands there for an axis.
template <class F>
std::string list_text(int axes, F of_axis) {
  std::string text = "[";
  for (int i = 0; i < axes; ++i) text += (i > 0 ? ", " : "") + std::to_string(of_axis(i));
  return text + "]";
}

}  // namespace

TensorView::TensorView(py::handle object, const char* argument) : name(argument) {
  if (!is_tensor(object)) {
    refuse<TypeError>(name, "torch.Tensor", std::string(Py_TYPE(object.ptr())->tp_name));
  }
  if (exchange_api()->dltensor_from_py_object_no_sync(object.ptr(), &dl) != 0) {
    const py::error_already_set error;
    const std::string what = error.what();  // torch adds where in its source, line by line
    refuse<TypeError>(name, "a dense strided tensor", what.substr(0, what.find('\n')));
  }
  dtype = dtype_of(dl.dtype);
}

int64_t TensorView::numel() const {
  int64_t count = 1;
  for (int i = 0; i < ndim(); ++i) count *= size(i);
  return count;
}

int64_t TensorView::contiguous_stride(int i) const {
  int64_t stride = 1;
  for (int j = ndim() - 1; j > i; --j) stride *= size(j);
  return stride;
}

bool TensorView::is_contiguous() const {
  for (int i = 0; i < ndim(); ++i) {
    if (size(i) != 1 && stride(i) != contiguous_stride(i)) return numel() == 0;
  }
  return true;
}

std::string TensorView::shape_text() const {
  return list_text(ndim(), [this](int i) { return size(i); });
}

std::string TensorView::layout_text() const {
  if (is_contiguous()) return shape_text();
  return shape_text() + " with strides " + list_text(ndim(), [this](int i) { return stride(i); });
}

std::string TensorView::device_text() const {
  switch (dl.device.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return "cuda:" + std::to_string(device());
    default:
      return "device type " + std::to_string(static_cast<int>(dl.device.device_type));
  }
}

std::string TensorView::dtype_text() const {
  if (dtype != DType::kOther) return name_of(dtype);
  const char* kind = dl.dtype.code == kDLFloat     ? "float"
                     : dl.dtype.code == kDLInt     ? "int"
                     : dl.dtype.code == kDLUInt    ? "uint"
                     : dl.dtype.code == kDLBool    ? "bool"
                     : dl.dtype.code == kDLComplex ? "complex"
                                                   : "dtype code ";
  if (dl.dtype.code == kDLBool) return kind;
  return kind + std::to_string(dl.dtype.bits);
}

int64_t TensorView::rows() const {
  int64_t count = 1;
  for (int i = 0; i + 1 < ndim(); ++i) count *= size(i);
  return count;
}

int64_t TensorView::row_stride() const {
  const int last = ndim() - 1;
  if (numel() == 0) return size(last);
  if (stride(last) != 1 && size(last) != 1) {
    refuse<ValueError>(name, "a dense last dimension (call .contiguous())", "stride " + std::to_string(stride(last)));
  }
  int64_t row = -1;       // stride of the innermost leading dimension that is not 1
  int64_t expected = -1;  // what the next one must have
  for (int i = last - 1; i >= 0; --i) {
    if (size(i) == 1) continue;
    if (stride(i) < 0 || (expected >= 0 && stride(i) != expected)) {
      refuse<ValueError>(name, "leading dimensions that collapse into one (call .contiguous())",
                         "shape " + shape_text() + " with other strides");
    }
    if (row < 0) row = stride(i);
    expected = stride(i) * size(i);
  }
  return row < 0 ? size(last) : row;
}

DLManagedTensorVersioned* TensorFactory::allocate(int64_t* shape, int ndim, DType dtype) const {
  DLTensor prototype{};
  prototype.device = device_;
  prototype.ndim = ndim;
  prototype.dtype = to_dl(dtype);
  prototype.shape = shape;
  DLManagedTensorVersioned* tensor = nullptr;
  std::string message;
  const int status = exchange_api()->managed_tensor_allocator(
      &prototype, &tensor, &message, [](void* context, const char* kind, const char* text) {
        *static_cast<std::string*>(context) = std::string(kind) + ": " + text;
      });
  if (status != 0) throw RuntimeError("out of memory or no allocator: " + message);
  return tensor;
}

py::object TensorFactory::make(const std::vector<int64_t>& shape, DType dtype, void** data) const {
  std::vector<int64_t> extents = shape;
  DLManagedTensorVersioned* tensor = allocate(extents.data(), static_cast<int>(extents.size()), dtype);
  *data = static_cast<char*>(tensor->dl_tensor.data) + tensor->dl_tensor.byte_offset;
  void* object = nullptr;
  if (exchange_api()->managed_tensor_to_py_object_no_sync(tensor, &object) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

void* TensorFactory::scratch(size_t bytes) {
  int64_t shape = static_cast<int64_t>(bytes);
  scratch_.push_back(allocate(&shape, 1, DType::kInt8));
  const DLTensor& tensor = scratch_.back()->dl_tensor;
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

TensorFactory::~TensorFactory() {
  for (DLManagedTensorVersioned* tensor : scratch_) {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  }
}

Stream TensorFactory::current_stream() const {
  void* stream = nullptr;
  if (exchange_api()->current_work_stream(device_.device_type, device_.device_id, &stream) != 0) {
    throw py::error_already_set();
  }
  return stream;
}

}  // namespace octofuse
