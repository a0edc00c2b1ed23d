#include "backend/backend.hpp"

#include <map>
#include <mutex>

#include "core/check.hpp"
#include "core/device_memory.hpp"

namespace sparse_kvcm {
namespace {

std::shared_ptr<Backend> make_backend(Device device) {
  if (device.kind == DeviceKind::kCuda) return make_cuda_backend(device.index);
  if (device.index != 0) {
    fail_argument("backend_for", "the index of the CPU must be 0, got ", device.index);
  }
  return make_cpu_backend();
}

}  // namespace

BufferPtr allocate_part(Backend& backend, std::size_t bytes, const char* function,
                        std::string_view part) {
  try {
    return backend.allocate_device(bytes);
  } catch (const DeviceMemoryError& error) {
    fail_device_memory(function, part, error.bytes());
  }
}

std::shared_ptr<Backend> backend_for(Device device) {
  if (device.index < 0) {
    fail_argument("backend_for", "the index of a device must be >= 0, got ", device.index);
  }
  static std::mutex mutex;
  static std::map<std::pair<DeviceKind, std::int32_t>, std::shared_ptr<Backend>> backends;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Backend>& backend = backends[{device.kind, device.index}];
  if (!backend) backend = make_backend(device);
  return backend;
}

}  // namespace sparse_kvcm
