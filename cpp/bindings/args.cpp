#include "args.hpp"

#include <algorithm>

namespace sparse_kvcm::bindings {
namespace {

constexpr std::size_t kLongestValue = 60;

// The representation of `value` if it is short, has one line and can be had.
std::string short_repr(nb::handle value) {
  PyObject* const repr = PyObject_Repr(value.ptr());
  if (repr == nullptr) {
    PyErr_Clear();
    return {};
  }
  const nb::str text = nb::steal<nb::str>(repr);
  const std::string result = text.c_str();
  const bool fits = result.size() <= kLongestValue && result.find('\n') == std::string::npos;
  return fits ? result : std::string();
}

}  // namespace

std::string describe(nb::handle value) {
  if (value.is_none()) return "None";
  std::string type = nb::str(value.type().attr("__name__")).c_str();
  const std::string repr = short_repr(value);
  const bool says_type = repr.starts_with(type) || repr.starts_with('<');
  if (repr.empty()) return type;
  return says_type ? repr : type + " " + repr;
}

std::string item_name(std::string_view name, std::size_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

std::int64_t to_int64(const char* function, std::string_view name, nb::handle value,
                      std::int64_t min, std::int64_t max) {
  const nb::object index =
      nb::steal(PyBool_Check(value.ptr()) ? nullptr : PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    fail_argument(function, name, " must be an int, got ", describe(value));
  }
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || result < min || result > max) {
    const std::string digits = short_repr(index);
    fail_argument(function, name, " must be in [", min, ", ", max, "], got ",
                  digits.empty() ? "a longer int" : digits);
  }
  return result;
}

std::vector<nb::object> to_items(const char* function, std::string_view name, nb::handle value,
                                 const char* of) {
  const bool refused =
      PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr()) || nb::isinstance<nb::dict>(value);
  const nb::object iterator = nb::steal(refused ? nullptr : PyObject_GetIter(value.ptr()));
  if (!iterator.is_valid()) {
    PyErr_Clear();
    fail_argument(function, name, " must be a sequence of ", of, ", got ", describe(value));
  }
  std::vector<nb::object> items;
  for (nb::handle item : nb::iter(iterator)) items.push_back(nb::borrow(item));
  return items;
}

std::vector<std::int32_t> to_int32s(const char* function, std::string_view name, nb::handle value) {
  std::vector<std::int32_t> result;
  for (const nb::object& item : to_items(function, name, value, "ints")) {
    result.push_back(to_int<std::int32_t>(function, item_name(name, result.size()), item));
  }
  return result;
}

std::vector<IntItem> to_int_items(const char* function, std::string_view name, nb::handle value) {
  const nb::object items = nb::steal(PyMapping_Check(value.ptr()) && nb::hasattr(value, "items")
                                         ? PyMapping_Items(value.ptr())
                                         : nullptr);
  if (!items.is_valid()) {
    PyErr_Clear();
    fail_argument(function, name, " must be a dict with int keys, got ", describe(value));
  }
  std::vector<IntItem> result;
  for (nb::handle item : items) {
    const auto key =
        to_int<std::int32_t>(function, std::string("key of ") + std::string(name), item[0]);
    result.push_back({key, nb::object(item[1])});
  }
  return result;
}

std::string to_text(const char* function, std::string_view name, nb::handle value) {
  if (!PyUnicode_Check(value.ptr())) {
    fail_argument(function, name, " must be a str, got ", describe(value));
  }
  return nb::borrow<nb::str>(value).c_str();
}

}  // namespace sparse_kvcm::bindings
