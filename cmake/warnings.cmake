# Warnings of our own code; headers of others are SYSTEM includes. They are errors in CI and for developers
# (-DCMAKE_COMPILE_WARNING_AS_ERROR=ON), not for users, whose compiler may know warnings that we have never seen.
function(octofuse_enable_warnings target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow>
                                           $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)
endfunction()
