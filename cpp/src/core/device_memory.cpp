#include "core/device_memory.hpp"

#include <string>

#include "core/check.hpp"

namespace sparse_kvcm {

void fail_device_memory(const char* function, std::string_view part,
                        const DeviceMemoryError::Bytes& bytes) {
  std::string text = message(function, part);
  text += bytes.wanted == 0 ? " lacks device memory"
                            : " takes " + std::to_string(bytes.wanted) + " B of device memory";
  if (bytes.free > 0) text += ", " + std::to_string(bytes.free) + " B are free";
  if (bytes.total > 0) text += " of the device's " + std::to_string(bytes.total) + " B";
  throw DeviceMemoryError(text + "; ask for less, or let others give some back", bytes);
}

}  // namespace sparse_kvcm
