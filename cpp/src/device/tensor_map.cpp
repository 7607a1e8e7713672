#include "device/tensor_map.h"

#include <cudaTypedefs.h>

#include "device/launch.h"

namespace octofuse {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw_launch_error("tensor_map", "the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(pointer);
  }();
  return function;
}

CUtensorMapSwizzle swizzle_of(const BoxedMatrix& matrix) {
  if (!matrix.swizzled) return CU_TENSOR_MAP_SWIZZLE_NONE;
  switch (matrix.box * matrix.bytes) {
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    default:
      throw_launch_error("tensor_map", "swizzled boxes have rows of 32, 64 or 128 bytes");
  }
}

}  // namespace

CUtensorMap tensor_map(const BoxedMatrix& matrix) {
  CUtensorMap map;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(matrix.columns), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(matrix.pitch)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(matrix.box), static_cast<cuuint32_t>(matrix.box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUtensorMapDataType type = matrix.bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : matrix.bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_INT64;
  const CUresult status = encoder()(&map, type, 2, const_cast<void*>(matrix.data), extents, strides, box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(matrix),
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw_launch_error("tensor_map", "cuTensorMapEncodeTiled refused a matrix");
  return map;
}

}  // namespace octofuse
