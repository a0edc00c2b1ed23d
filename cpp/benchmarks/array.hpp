// Device memory of a benchmark.
#pragma once

#include <vector>

#include "backend/backend.hpp"

namespace sparse_kvcm::bench {

// Begins as `contents`.
template <class T>
class Array {
 public:
  Array(Backend& backend, const std::vector<T>& contents)
      : buffer_(backend.allocate_device(contents.size() * sizeof(T))) {
    write(backend, contents);
  }
  void write(Backend& backend, const std::vector<T>& contents) {
    const Upload upload{buffer_->device_data(), contents.data(), contents.size() * sizeof(T)};
    backend.upload({&upload, 1}, 0);
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(buffer_->device_data()); }

 private:
  BufferPtr buffer_;
};

}  // namespace sparse_kvcm::bench
