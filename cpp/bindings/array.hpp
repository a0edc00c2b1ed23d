// Checks arrays that come from Python, and hands memory to Python as arrays.
//
// Any object that exports DLPack or the buffer protocol is taken, without a copy. Nothing is
// converted: an array of another dtype, shape, device or stride is refused by name. The extents of
// a call belong together: "b" has one value for all arrays whose shape names it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm::bindings {

namespace nb = nanobind;

enum class Elements : std::uint8_t {
  kInt32,
  kInt64,
  kInt32OrInt64,
  kWord,  // uint32, or int32 for frameworks that hardly know it
  kByte,  // uint8
  kAny,
};

enum class Strides : std::uint8_t {
  kDense,  // C-contiguous
  kRows,   // each item of the first dimension C-contiguous, at any distance from the next
};

enum class Access : std::uint8_t { kRead, kWrite };

enum class Place : std::uint8_t {
  kDevice,  // the device of the call
  kHost,    // host memory, pinned or not
};

struct ArraySpec {
  Elements elements = Elements::kInt32;
  // Names of the extents, as in {"b", "k"}; a number fixes one, "..." lets any more follow.
  std::vector<std::string_view> shape;
  Access access = Access::kRead;
  Strides strides = Strides::kDense;
  Place place = Place::kDevice;
};

// An array that fits its spec. Keeps the exported memory alive.
class Array {
 public:
  Array() = default;  // stands for None
  explicit Array(nb::ndarray<nb::ro> array) : array_(std::move(array)) {}

  [[nodiscard]] bool given() const { return array_.is_valid(); }
  template <class T>
  [[nodiscard]] T* data() const {
    if (!given() || array_.data_handle() == nullptr) return nullptr;
    return reinterpret_cast<T*>(static_cast<std::byte*>(array_.data_handle()) +
                                array_.byte_offset());
  }
  [[nodiscard]] std::int64_t extent(std::size_t dimension) const {
    return static_cast<std::int64_t>(array_.shape(dimension));
  }
  [[nodiscard]] std::int64_t item_bytes() const {
    return static_cast<std::int64_t>(array_.itemsize());
  }
  // Elements from one item of the first dimension to the next; the dense value if there is no next.
  [[nodiscard]] std::int64_t row_stride() const;
  // Bytes of one item of the first dimension.
  [[nodiscard]] std::int64_t row_bytes() const;

 private:
  nb::ndarray<nb::ro> array_;
};

// Takes the arrays of one call.
class ArrayChecker {
 public:
  // All device arrays must be on `device`; without one, on that of the first.
  explicit ArrayChecker(const char* function, std::optional<Device> device = std::nullopt)
      : function_(function), device_(device) {}

  // Throws InvalidArgument with what `name` must be, what was given and what to do.
  [[nodiscard]] Array take(std::string_view name, nb::handle value, const ArraySpec& spec);
  // The same, and None is an Array that is not given.
  [[nodiscard]] Array take_optional(std::string_view name, nb::handle value, const ArraySpec& spec);

  // The extent that arrays of this call agreed on. 0 if it has occurred in none.
  [[nodiscard]] std::int64_t extent(std::string_view name) const;
  // Throws InvalidArgument if it does not fit.
  [[nodiscard]] std::int32_t extent32(std::string_view name) const;
  // Fixes an extent before the first array; `origin` tells where it comes from.
  void fix(std::string_view name, std::int64_t extent, std::string_view origin);

  [[nodiscard]] const char* function() const { return function_; }
  [[nodiscard]] Device device() const { return device_.value_or(Device{}); }

 private:
  struct Extent {
    std::string name;
    std::int64_t value = 0;
    std::string origin;  // the argument that set it
  };
  [[nodiscard]] const Extent* find(std::string_view name) const;
  [[nodiscard]] bool shape_fits(const nb::ndarray<nb::ro>& array, const ArraySpec& spec) const;
  void remember(std::string_view argument, const nb::ndarray<nb::ro>& array, const ArraySpec& spec);
  [[nodiscard]] std::string wanted(const ArraySpec& spec) const;

  const char* function_;
  std::optional<Device> device_;
  std::vector<Extent> extents_;
};

// Device memory as an array: a NumPy array on the CPU, a DLPack exporter on a GPU. `owner` keeps
// the memory alive. A const T gives a read-only array.
template <class T>
[[nodiscard]] nb::object to_python(Device device, T* data, const std::vector<std::int64_t>& shape,
                                   std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  nb::capsule keep(new Owner(std::move(owner)),
                   [](void* p) noexcept { delete static_cast<Owner*>(p); });
  const std::vector<std::size_t> extents(shape.begin(), shape.end());
  if (device.kind == DeviceKind::kCpu) {
    return nb::cast(nb::ndarray<nb::numpy, T>(data, extents.size(), extents.data(), keep));
  }
  return nb::cast(nb::ndarray<nb::array_api, T>(data, extents.size(), extents.data(), keep, nullptr,
                                                nb::dtype<T>(), nb::device::cuda::value,
                                                device.index));
}

}  // namespace sparse_kvcm::bindings
