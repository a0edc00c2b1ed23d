// Progress of host memory that is made while others run Python.
#pragma once

#include <nanobind/nanobind.h>

#include "sparse_kvcm/storage_config.hpp"

namespace sparse_kvcm::bindings {

// Takes the GIL, calls `progress` unless it is None, and lets a signal, such as Ctrl-C, end a long
// wait. REQUIRES: `progress` outlives what is returned.
[[nodiscard]] FillProgress to_progress(const char* function, nanobind::handle progress);

}  // namespace sparse_kvcm::bindings
