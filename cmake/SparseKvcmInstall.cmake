# cmake --install: headers, archive and a package for find_package(sparse_kvcm).
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sparse_kvcm)
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/sparse_kvcm-config.cmake.in
  ${PROJECT_BINARY_DIR}/sparse_kvcm-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/sparse_kvcm-config-version.cmake
  COMPATIBILITY SameMinorVersion)

install(TARGETS sparse_kvcm EXPORT sparse_kvcm-targets ARCHIVE COMPONENT cpp)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/cpp/include/ TYPE INCLUDE COMPONENT cpp)
install(EXPORT sparse_kvcm-targets
  NAMESPACE sparse_kvcm::
  DESTINATION ${package_dir}
  COMPONENT cpp)
install(FILES
  ${PROJECT_BINARY_DIR}/sparse_kvcm-config.cmake
  ${PROJECT_BINARY_DIR}/sparse_kvcm-config-version.cmake
  DESTINATION ${package_dir}
  COMPONENT cpp)
