#include "gemm/cublaslt/api.h"

#include <dlfcn.h>

#include "octofuse/error.h"

namespace octofuse::cublaslt {
namespace {

Api load() {
  Api loaded;
  const std::string soname = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  // torch's copy if it is in the process already, else whatever the loader finds (the module's RPATH names torch's).
  void* library = dlopen(soname.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(soname.c_str(), RTLD_NOW);
  if (library == nullptr) {
    loaded.why_not = soname + " could not be loaded";
    return loaded;
  }
#define OCTOFUSE_RESOLVE(name)                                                  \
  loaded.name = reinterpret_cast<decltype(loaded.name)>(dlsym(library, #name)); \
  if (loaded.name == nullptr) loaded.why_not = soname + " has no function " #name;
  OCTOFUSE_CUBLASLT_FUNCTIONS(OCTOFUSE_RESOLVE)
#undef OCTOFUSE_RESOLVE
  Dl_info info;
  if (loaded.loaded() && dladdr(reinterpret_cast<void*>(loaded.cublasLtCreate), &info) != 0) {
    loaded.path = info.dli_fname;
  }
  return loaded;
}

}  // namespace

const Api& api() {
  static const Api loaded = load();
  return loaded;
}

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw RuntimeError(std::string(call) + ": cuBLAS status " + std::to_string(static_cast<int>(status)));
}

}  // namespace octofuse::cublaslt
