// Checks arguments that come from Python. They arrive as plain objects, so that what is wrong can
// be said with function, argument, limit and value; a typed nanobind argument only says
// "incompatible".
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/check.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm::bindings {

namespace nb = nanobind;

// A named argument of a bound function. None is let through, to be refused by name.
[[nodiscard]] inline auto arg(const char* name) { return nb::arg(name).none(); }

// After a failed call of Python's API: drops an error that says no more than that a value does not
// fit, to be said by name instead. Throws others on: an interrupt, an exit, lack of memory.
void drop_error();

// Type and, for short values, value: "float 1.5", "None", "list [1, 2]".
[[nodiscard]] std::string describe(nb::handle value);

// The index into a sequence argument: "layers[2]".
[[nodiscard]] std::string item_name(std::string_view name, std::integral auto index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

// An int, or what Python takes as an index (NumPy integers); not bool, nothing else is converted.
// Throws InvalidArgument if it is no int or outside [min, max].
[[nodiscard]] std::int64_t to_int64(const char* function, std::string_view name, nb::handle value,
                                    std::int64_t min, std::int64_t max);

// The same for an int of `bits`, signed. Limits of meaning are the callee's, who alone knows them,
// so a longer int is refused for its length.
[[nodiscard]] std::int64_t to_signed(const char* function, std::string_view name, nb::handle value,
                                     int bits);

// An int that T holds. What has no sign may be all that T holds, so here its limits are said.
template <class T>
[[nodiscard]] T to_int(const char* function, std::string_view name, nb::handle value) {
  if constexpr (std::is_signed_v<T>) {
    return static_cast<T>(to_signed(function, name, value, 8 * sizeof(T)));
  }
  constexpr std::int64_t kMax = sizeof(T) == 8
                                    ? std::numeric_limits<std::int64_t>::max()
                                    : static_cast<std::int64_t>(std::numeric_limits<T>::max());
  return static_cast<T>(to_int64(function, name, value, 0, kMax));
}

// A finite number: a float, or what Python takes as one; not bool.
[[nodiscard]] double to_double(const char* function, std::string_view name, nb::handle value);
[[nodiscard]] bool to_bool(const char* function, std::string_view name, nb::handle value);

[[nodiscard]] inline Stream to_stream(const char* function, nb::handle value) {
  return to_int<Stream>(function, "stream", value);
}

// The items of a list, tuple or other iterable that is not a str, bytes or mapping.
// `of` names them in the message: "ints".
[[nodiscard]] std::vector<nb::object> to_items(const char* function, std::string_view name,
                                               nb::handle value, const char* of);
[[nodiscard]] std::vector<std::int32_t> to_int32s(const char* function, std::string_view name,
                                                  nb::handle value);

// A `dict[int, object]` or another mapping.
struct IntItem {
  std::int32_t key = 0;
  nb::object value;
};
[[nodiscard]] std::vector<IntItem> to_int_items(const char* function, std::string_view name,
                                                nb::handle value);

// A str without what text in C++ cannot have: lone surrogates and null characters.
[[nodiscard]] std::string to_text(const char* function, std::string_view name, nb::handle value);

// None, or what `convert` makes of the value.
template <class Convert>
[[nodiscard]] auto to_optional(nb::handle value, Convert convert)
    -> std::optional<decltype(convert(value))> {
  if (value.is_none()) return std::nullopt;
  return convert(value);
}

// Finite numbers, as to_double.
[[nodiscard]] std::vector<double> to_doubles(const char* function, std::string_view name,
                                             nb::handle value);

// An instance of the bound class T.
template <class T>
[[nodiscard]] T& to_instance(const char* function, std::string_view name, nb::handle value) {
  T* instance = nullptr;
  if (!value.is_none()) nb::try_cast(value, instance, false);
  if (instance == nullptr) {
    fail_argument(function, name, " must be a ", nb::str(nb::type<T>().attr("__name__")).c_str(),
                  ", got ", describe(value));
  }
  return *instance;
}

// A member of the bound enum T.
template <class T>
[[nodiscard]] T to_enum(const char* function, std::string_view name, nb::handle value) {
  T member{};
  if (!nb::try_cast(value, member, false)) {
    fail_argument(function, name, " must be a ", nb::str(nb::type<T>().attr("__name__")).c_str(),
                  ", got ", describe(value));
  }
  return member;
}

// Instances of the bound class T.
template <class T>
[[nodiscard]] std::vector<T> to_instances(const char* function, std::string_view name,
                                          nb::handle value) {
  std::vector<T> result;
  const nb::str type = nb::str(nb::type<T>().attr("__name__"));
  for (const nb::object& item : to_items(function, name, value, type.c_str())) {
    result.push_back(to_instance<T>(function, item_name(name, result.size()), item));
  }
  return result;
}

}  // namespace sparse_kvcm::bindings
