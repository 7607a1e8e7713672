# Warnings are errors for our own code; headers of others are SYSTEM includes.
function(octofuse_enable_warnings target)
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Werror>
                      $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings -Xcompiler=-Wall>)
endfunction()
