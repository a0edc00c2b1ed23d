# Flags for our own targets: warnings and sanitizers. Nothing here is exported.
add_library(sparse_kvcm_compile INTERFACE)

set(cxx_warnings -Wall -Wextra -Wshadow -Wconversion)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Guesses of the optimizer, which at -O3 raise false alarms inside std::string and std::vector
  # (GCC bug 105651 and its like). The sanitizers look for the same faults.
  list(APPEND cxx_warnings -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow)
endif()
set(cuda_warnings -Wall -Wextra -Wshadow)  # nvcc's own host code is not clean under more
if(SPARSE_KVCM_WERROR)
  list(APPEND cxx_warnings -Werror)
  list(APPEND cuda_warnings -Werror)
endif()
list(JOIN cuda_warnings "," cuda_host_warnings)
target_compile_options(sparse_kvcm_compile INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${cxx_warnings};-Wpedantic>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${cuda_host_warnings};--expt-relaxed-constexpr>")
if(SPARSE_KVCM_WERROR)
  target_compile_options(sparse_kvcm_compile INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>")
endif()

# The library alone is instrumented: it holds every access that counts, and tests compile faster.
add_library(sparse_kvcm_sanitize INTERFACE)
if(SPARSE_KVCM_SANITIZE)
  list(JOIN SPARSE_KVCM_SANITIZE "," sanitizers)
  target_compile_options(sparse_kvcm_sanitize INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizers};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  target_link_options(sparse_kvcm_compile INTERFACE -fsanitize=${sanitizers})
endif()
