#include "sparse_kvcm/device.hpp"

#include <charconv>
#include <string_view>
#include <system_error>

#include "core/check.hpp"

namespace sparse_kvcm {

std::string to_string(Device device) {
  if (device.kind == DeviceKind::kCpu) return "cpu";
  return "cuda:" + std::to_string(device.index);
}

Device parse_device(const std::string& name) {
  if (name == "cpu") return {DeviceKind::kCpu, 0};
  if (name == "cuda") return {DeviceKind::kCuda, 0};

  constexpr std::string_view kPrefix = "cuda:";
  if (name.starts_with(kPrefix)) {
    std::int32_t index = 0;
    const char* const end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + kPrefix.size(), end, index);
    if (parsed.ec == std::errc{} && parsed.ptr == end && index >= 0) {
      return {DeviceKind::kCuda, index};
    }
  }
  fail_argument("parse_device", "name must be \"cpu\", \"cuda\" or \"cuda:<index>\", got \"", name,
                "\"");
}

}  // namespace sparse_kvcm
