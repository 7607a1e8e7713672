# Header-only dependencies, found in the Python environment that builds: dlpack.h always, CUTLASS and cublasLt for CUDA.
# find_spec does not import: importing cutlass_library would run its generator.
function(octofuse_find_in_python out package relative)
  execute_process(
    COMMAND
      "${Python_EXECUTABLE}" -c
      "import importlib.util, pathlib, sys
spec = importlib.util.find_spec('${package}')
roots = list(spec.submodule_search_locations or []) if spec else []
print(next((str(p) for p in (pathlib.Path(r, '${relative}') for r in roots) if p.exists()), ''), end='')"
    OUTPUT_VARIABLE found COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

function(octofuse_require out variable package relative what)
  if(NOT ${variable})
    octofuse_find_in_python(found ${package} ${relative})
    set(${variable} "${found}")
  endif()
  if(NOT ${variable})
    message(FATAL_ERROR "octofuse: ${what} not found. pip installs it for an isolated build; without build isolation "
                        "install it yourself or set -D${variable}=<folder>.")
  endif()
  set(${out} "${${variable}}" PARENT_SCOPE)
endfunction()

function(octofuse_header_target name include)
  add_library(${name} INTERFACE)
  target_include_directories(${name} SYSTEM INTERFACE ${include})
endfunction()
