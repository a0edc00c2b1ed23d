// What the tests of `ops` share: device arrays, poison, seeds, and resolve as a function from one
// plain value to another.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/ops.hpp"
#include "test_device.hpp"

namespace sparse_kvcm::testing {

// No operation writes it by chance: as an ordinal, a slot or a count it is out of every range.
inline constexpr std::uint32_t kPoisonWord = 0xDEADBEEFu;
inline constexpr auto kPoison = static_cast<std::int32_t>(kPoisonWord);

// An array in device memory, with its contents on demand.
template <class T>
class DeviceArray {
 public:
  DeviceArray(Device device, const std::vector<T>& contents)
      : backend_(backend_for(device)),
        size_(contents.size()),
        buffer_(backend_->allocate_device(contents.size() * sizeof(T))) {
    upload(contents);
  }
  DeviceArray(Device device, std::size_t size, T fill)
      : DeviceArray(device, std::vector<T>(size, fill)) {}

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(buffer_->device_data()); }

  void upload(const std::vector<T>& contents) {
    const Upload upload{buffer_->device_data(), contents.data(), contents.size() * sizeof(T)};
    backend_->upload({&upload, 1}, 0);
  }

  [[nodiscard]] std::vector<T> download() const {
    const std::size_t bytes = size_ * sizeof(T);
    const BufferPtr pinned = backend_->allocate_pinned(bytes);
    backend_->download(*pinned, buffer_->device_data(), bytes, 0);
    backend_->synchronize(*backend_->record(0));
    std::vector<T> contents(size_);
    if (bytes > 0) std::memcpy(contents.data(), pinned->data(), bytes);
    return contents;
  }

 private:
  std::shared_ptr<Backend> backend_;
  std::size_t size_;
  BufferPtr buffer_;
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  // Uniform in [low, high].
  std::int32_t in(std::int32_t low, std::int32_t high) {
    return std::uniform_int_distribution<std::int32_t>(low, high)(engine_);
  }
  bool one_in(std::int32_t n) { return in(1, n) == 1; }
  template <class T>
  T pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(in(0, static_cast<std::int32_t>(choices.size()) - 1))];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }

 private:
  std::mt19937_64 engine_;
};

// Fails at the first cell that differs, with its position.
template <class T>
void expect_equal(const char* what, const std::vector<T>& actual, const std::vector<T>& expected) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i], expected[i]) << what << "[" << i << "]";
  }
}

}  // namespace sparse_kvcm::testing
