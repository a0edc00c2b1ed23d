// A view of memory of the library, for as long as `owner` lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace sparse_kvcm {

struct MemoryView {
  std::byte* data = nullptr;         // host address; null for memory of a GPU
  std::byte* device_data = nullptr;  // device address
  std::vector<std::int64_t> shape;   // of uint8, dense
  std::shared_ptr<const void> owner;
};

}  // namespace sparse_kvcm
