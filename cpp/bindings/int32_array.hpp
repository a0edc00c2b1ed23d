// Copies of int32 vectors as NumPy arrays.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "array.hpp"

namespace sparse_kvcm::bindings {

[[nodiscard]] inline nb::object to_int32_array(std::vector<std::int32_t> values) {
  const auto owner = std::make_shared<std::vector<std::int32_t>>(std::move(values));
  return to_python(Device{}, owner->data(), {static_cast<std::int64_t>(owner->size())}, owner);
}

[[nodiscard]] inline nb::object to_int32_array(std::span<const std::int32_t> values) {
  return to_int32_array(std::vector<std::int32_t>(values.begin(), values.end()));
}

}  // namespace sparse_kvcm::bindings
