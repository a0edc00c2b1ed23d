# GTest::gtest_main from an installed package, else from sources: SPARSE_KVCM_GOOGLETEST_SOURCE (also
# as an environment variable), or where Debian's `googletest` package lays them.
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  set(googletest_source /usr/src/googletest)
  if(DEFINED ENV{SPARSE_KVCM_GOOGLETEST_SOURCE})
    set(googletest_source $ENV{SPARSE_KVCM_GOOGLETEST_SOURCE})
  endif()
  set(SPARSE_KVCM_GOOGLETEST_SOURCE ${googletest_source} CACHE PATH "Sources of GoogleTest")
  if(NOT EXISTS "${SPARSE_KVCM_GOOGLETEST_SOURCE}/CMakeLists.txt")
    message(FATAL_ERROR "GoogleTest is missing: install libgtest-dev, or set "
      "SPARSE_KVCM_GOOGLETEST_SOURCE to its sources, or SPARSE_KVCM_BUILD_TESTS=OFF")
  endif()
  set(INSTALL_GTEST OFF)
  add_subdirectory("${SPARSE_KVCM_GOOGLETEST_SOURCE}" googletest EXCLUDE_FROM_ALL SYSTEM)
  if(NOT TARGET GTest::gtest_main)  # before GoogleTest 1.11
    add_library(GTest::gtest_main ALIAS gtest_main)
  endif()
endif()
