#include "array.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

#include "args.hpp"

namespace sparse_kvcm::bindings {
namespace {

using AnyArray = nb::ndarray<nb::ro>;
using Code = nb::dlpack::dtype_code;

constexpr std::string_view kAnyMore = "...";

std::string to_text(nb::dlpack::dtype dtype) {
  std::string name;
  switch (static_cast<Code>(dtype.code)) {
    case Code::Bool:
      return "bool";
    case Code::Int:
      name = "int";
      break;
    case Code::UInt:
      name = "uint";
      break;
    case Code::Float:
      name = "float";
      break;
    case Code::Bfloat:
      name = "bfloat";
      break;
    case Code::Complex:
      name = "complex";
      break;
    default:
      name = "dtype_" + std::to_string(dtype.code) + "_";
      break;
  }
  return name + std::to_string(dtype.bits);
}

std::string to_text(Elements elements) {
  switch (elements) {
    case Elements::kInt32:
      return "int32";
    case Elements::kInt64:
      return "int64";
    case Elements::kInt32OrInt64:
      return "int32 or int64";
    case Elements::kWord:
      return "uint32 or int32";
    case Elements::kByte:
      return "uint8";
    case Elements::kAny:
      break;
  }
  return "any dtype";
}

bool dtype_fits(nb::dlpack::dtype dtype, Elements elements) {
  const bool is_int32 = dtype == nb::dtype<std::int32_t>();
  switch (elements) {
    case Elements::kInt32:
      return is_int32;
    case Elements::kInt64:
      return dtype == nb::dtype<std::int64_t>();
    case Elements::kInt32OrInt64:
      return is_int32 || dtype == nb::dtype<std::int64_t>();
    case Elements::kWord:
      return is_int32 || dtype == nb::dtype<std::uint32_t>();
    case Elements::kByte:
      return dtype == nb::dtype<std::uint8_t>();
    case Elements::kAny:
      break;
  }
  return dtype.lanes == 1 && dtype.bits % 8 == 0;
}

bool is_host(const AnyArray& array) {
  return array.device_type() == nb::device::cpu::value ||
         array.device_type() == nb::device::cuda_host::value;
}

bool is_gpu(const AnyArray& array) {
  return array.device_type() == nb::device::cuda::value ||
         array.device_type() == nb::device::cuda_managed::value;
}

std::optional<Device> device_of(const AnyArray& array) {
  if (is_host(array)) return Device{};
  if (is_gpu(array)) return Device{DeviceKind::kCuda, array.device_id()};
  return std::nullopt;
}

std::string device_text(const AnyArray& array) {
  const auto device = device_of(array);
  if (device) return to_string(*device);
  return "DLPack device type " + std::to_string(array.device_type());
}

template <class Values>
std::string list_text(const Values& values) {
  std::string text = "[";
  for (const auto& value : values) {
    if (text.size() > 1) text += ", ";
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) {
      text += std::to_string(value);
    } else {
      text += value;
    }
  }
  return text + "]";
}

// Whether dimensions from `first` on, 0 or 1, are C-contiguous, and rows do not overlap. Strides of
// a single item are free, and so are all if there is no item.
bool is_dense(const AnyArray& array, std::size_t first) {
  if (array.size() == 0) return true;
  std::int64_t expected = 1;
  for (std::size_t i = array.ndim(); i-- > first;) {
    const auto extent = static_cast<std::int64_t>(array.shape(i));
    if (extent != 1 && array.stride(i) != expected) return false;
    expected *= extent;
  }
  return first == 0 || array.shape(0) == 1 || array.stride(0) >= expected;
}

bool is_aligned(const AnyArray& array) {
  const auto address = reinterpret_cast<std::uintptr_t>(array.data_handle()) + array.byte_offset();
  return array.itemsize() == 0 || address % array.itemsize() == 0;
}

std::string given(const AnyArray& array) {
  const std::vector<std::int64_t> shape(array.shape_ptr(), array.shape_ptr() + array.ndim());
  return to_text(array.dtype()) + " " + list_text(shape) + " on " + device_text(array);
}

std::string strides_text(const AnyArray& array) {
  const std::vector<std::int64_t> strides(array.stride_ptr(), array.stride_ptr() + array.ndim());
  return " with strides " + list_text(strides);
}

std::optional<std::int64_t> fixed_extent(std::string_view name) {
  std::int64_t value = 0;
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), value);
  return parsed.ec == std::errc{} ? std::optional(value) : std::nullopt;
}

// What `value` exports, and whether it may be written.
struct Export {
  AnyArray array;  // not valid if there is none
  bool writable = false;
};

// The DLPack capsule of `value`, or `value` itself, which may have the buffer protocol.
// nanobind would ask for the capsule itself, but drop whatever `__dlpack__` raises.
nb::object exporter_of(nb::handle value, Access access) {
  const nb::object method = nb::getattr(value.type(), "__dlpack__", nb::none());
  if (method.is_none()) return nb::borrow(value);
  const nb::tuple arguments = nb::make_tuple(value);
  nb::dict with_version;
  with_version["max_version"] =
      nb::make_tuple(nb::dlpack::major_version, nb::dlpack::minor_version);
  // Only a capsule with a version says whether it may be written; one without comes faster.
  const bool writes = access == Access::kWrite;
  for (const bool versioned : {writes, !writes}) {
    nb::object capsule = nb::steal(
        PyObject_Call(method.ptr(), arguments.ptr(), versioned ? with_version.ptr() : nullptr));
    if (capsule.is_valid() && PyCapsule_CheckExact(capsule.ptr())) return capsule;
    drop_error();
  }
  return nb::borrow(value);
}

Export export_of(nb::handle source, Access access) {
  if (source.is_none()) return {};
  const nb::object value = exporter_of(source, access);
  if (nb::ndarray<> array; access == Access::kWrite && nb::try_cast(value, array, false)) {
    return {AnyArray(array), true};
  }
  AnyArray array;
  if (!nb::try_cast(value, array, false)) return {};
  return {array, false};
}

}  // namespace

std::int64_t Array::row_stride() const {
  if (array_.shape(0) > 1) return array_.stride(0);
  return array_.itemsize() == 0 ? 0 : row_bytes() / item_bytes();
}

std::int64_t Array::row_bytes() const {
  std::int64_t bytes = item_bytes();
  for (std::size_t i = 1; i < array_.ndim(); ++i) bytes *= extent(i);
  return bytes;
}

Array ArrayChecker::take(std::string_view name, nb::handle value, const ArraySpec& spec) {
  auto [array, writable] = export_of(value, spec.access);
  if (!array.is_valid()) {
    fail_argument(function_, name, " must be ", wanted(spec), ", got ", describe(value),
                  ": pass a NumPy array, a torch tensor or another DLPack exporter");
  }
  const auto refuse = [&](const std::string& got, const char* advice) {
    fail_argument(function_, name, " must be ", wanted(spec), ", got ", got, ": ", advice);
  };
  if (!dtype_fits(array.dtype(), spec.elements)) {
    refuse(given(array), "cast it before the call, nothing is converted here");
  }
  if (!shape_fits(array, spec)) refuse(given(array), "pass an array of that shape");
  const bool place_fits =
      spec.place == Place::kHost
          ? is_host(array)
          : device_of(array).has_value() && device_of(array) == device_.value_or(*device_of(array));
  if (!place_fits) refuse(given(array), "move it before the call");
  if (!is_dense(array, spec.strides == Strides::kRows ? 1 : 0)) {
    refuse(given(array) + strides_text(array), "pass a contiguous copy");
  }
  if (!is_aligned(array)) refuse(given(array) + ", unaligned", "pass a copy");
  if (spec.access == Access::kWrite && !writable) {
    refuse(given(array) + ", read-only", "pass a writable array");
  }
  if (spec.place == Place::kDevice) device_ = device_of(array);
  remember(name, array, spec);
  return Array(std::move(array));
}

Array ArrayChecker::take_optional(std::string_view name, nb::handle value, const ArraySpec& spec) {
  return value.is_none() ? Array() : take(name, value, spec);
}

std::int64_t ArrayChecker::extent(std::string_view name) const {
  const Extent* const found = find(name);
  return found == nullptr ? 0 : found->value;
}

std::int32_t ArrayChecker::extent32(std::string_view name) const {
  const std::int64_t value = extent(name);
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (value > kMax) {
    fail_argument(function_, name, " must be <= ", kMax, ", got ", value, " in ",
                  find(name)->origin);
  }
  return static_cast<std::int32_t>(value);
}

void ArrayChecker::fix(std::string_view name, std::int64_t extent, std::string_view origin) {
  extents_.push_back({std::string(name), extent, std::string(origin)});
}

const ArrayChecker::Extent* ArrayChecker::find(std::string_view name) const {
  const auto found = std::ranges::find(extents_, name, &Extent::name);
  return found == extents_.end() ? nullptr : &*found;
}

bool ArrayChecker::shape_fits(const AnyArray& array, const ArraySpec& spec) const {
  const bool open_end = spec.shape.back() == kAnyMore;
  const std::size_t named = spec.shape.size() - (open_end ? 1 : 0);
  if (open_end ? array.ndim() < named : array.ndim() != named) return false;
  for (std::size_t i = 0; i < named; ++i) {
    auto expected = fixed_extent(spec.shape[i]);
    if (!expected && find(spec.shape[i]) != nullptr) expected = find(spec.shape[i])->value;
    if (expected && static_cast<std::int64_t>(array.shape(i)) != *expected) return false;
  }
  return true;
}

void ArrayChecker::remember(std::string_view argument, const AnyArray& array,
                            const ArraySpec& spec) {
  for (std::size_t i = 0; i < spec.shape.size(); ++i) {
    const std::string_view name = spec.shape[i];
    if (name != kAnyMore && !fixed_extent(name) && find(name) == nullptr) {
      fix(name, static_cast<std::int64_t>(array.shape(i)), argument);
    }
  }
}

std::string ArrayChecker::wanted(const ArraySpec& spec) const {
  std::vector<std::string> extents;
  for (const std::string_view name : spec.shape) {
    std::string text(name);
    if (const Extent* const known = find(name)) {
      text += " = " + std::to_string(known->value) + " of " + known->origin;
    }
    extents.push_back(std::move(text));
  }
  std::string text = to_text(spec.elements) + " " + list_text(extents);
  if (spec.place == Place::kHost) {
    text += " in host memory";
  } else if (device_) {
    text += " on " + to_string(*device_);
  }
  text += spec.strides == Strides::kDense ? ", C-contiguous" : ", each row C-contiguous";
  return spec.access == Access::kWrite ? text + ", writable" : text;
}

}  // namespace sparse_kvcm::bindings
