// What is said where device memory lacks.
#pragma once

#include <string_view>

#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm {

// Throws DeviceMemoryError in the name of `function`; `part` of what it makes wanted the memory.
[[noreturn]] void fail_device_memory(const char* function, std::string_view part,
                                     const DeviceMemoryError::Bytes& bytes);

}  // namespace sparse_kvcm
