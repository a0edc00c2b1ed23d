# The version stands in pyproject.toml alone.
file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/pyproject.toml" version_line
  REGEX "^version = \"[0-9.]+\"" LIMIT_COUNT 1)
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" SPARSE_KVCM_VERSION "${version_line}")
if(NOT SPARSE_KVCM_VERSION)
  message(FATAL_ERROR "pyproject.toml has no line 'version = \"X.Y.Z\"'")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS pyproject.toml)
