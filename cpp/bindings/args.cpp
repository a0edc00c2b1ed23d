#include "args.hpp"

#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace sparse_kvcm::bindings {
namespace {

constexpr std::size_t kLongestValue = 60;

// UTF-8 of a str. None with a lone surrogate, or a null character, at which messages would end.
std::optional<std::string> utf8(nb::handle text) {
  Py_ssize_t size = 0;
  const char* const first = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (first == nullptr) {
    drop_error();
    return std::nullopt;
  }
  std::string result(first, static_cast<std::size_t>(size));
  if (result.find('\0') != std::string::npos) return std::nullopt;
  return result;
}

// The representation of `value` if it is short, has one line and can be had.
std::string short_repr(nb::handle value) {
  const nb::object repr = nb::steal(PyObject_Repr(value.ptr()));
  if (!repr.is_valid()) {
    drop_error();
    return {};
  }
  const std::string result = utf8(repr).value_or("");
  const bool fits = result.size() <= kLongestValue && result.find('\n') == std::string::npos;
  return fits ? result : std::string();
}

struct Int {
  nb::object object;
  std::optional<std::int64_t> value;  // none if it is longer
  [[nodiscard]] std::string digits() const {
    const std::string text = short_repr(object);
    return text.empty() ? "a longer int" : text;
  }
};

Int to_any_int(const char* function, std::string_view name, nb::handle value) {
  nb::object index = nb::steal(PyBool_Check(value.ptr()) ? nullptr : PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    drop_error();
    fail_argument(function, name, " must be an int, got ", describe(value));
  }
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) return {std::move(index), std::nullopt};
  return {std::move(index), result};
}

}  // namespace

void drop_error() {
  const bool any = PyErr_Occurred() != nullptr;
  if (any && (PyErr_ExceptionMatches(PyExc_Exception) == 0 ||
              PyErr_ExceptionMatches(PyExc_MemoryError) != 0)) {
    nb::raise_python_error();
  }
  PyErr_Clear();
}

std::string describe(nb::handle value) {
  if (value.is_none()) return "None";
  std::string type = utf8(nb::str(value.type().attr("__name__"))).value_or("object");
  const std::string repr = short_repr(value);
  const bool says_type = repr.starts_with(type) || repr.starts_with('<');
  if (repr.empty()) return type;
  return says_type ? repr : type + " " + repr;
}

std::int64_t to_int64(const char* function, std::string_view name, nb::handle value,
                      std::int64_t min, std::int64_t max) {
  const Int got = to_any_int(function, name, value);
  if (!got.value || *got.value < min || *got.value > max) {
    fail_argument(function, name, " must be in [", min, ", ", max, "], got ", got.digits());
  }
  return *got.value;
}

std::int64_t to_signed(const char* function, std::string_view name, nb::handle value, int bits) {
  const Int got = to_any_int(function, name, value);
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() >> (64 - bits);
  if (!got.value || *got.value < -most - 1 || *got.value > most) {
    fail_argument(function, name, " must be an int of ", bits, " bits, got ", got.digits());
  }
  return *got.value;
}

double to_double(const char* function, std::string_view name, nb::handle value) {
  const bool number = !PyBool_Check(value.ptr()) && PyNumber_Check(value.ptr());
  const double result = number ? PyFloat_AsDouble(value.ptr()) : 0;
  if (!number || PyErr_Occurred() != nullptr || !std::isfinite(result)) {
    drop_error();
    fail_argument(function, name, " must be a finite number, got ", describe(value));
  }
  return result;
}

std::vector<double> to_doubles(const char* function, std::string_view name, nb::handle value) {
  std::vector<double> result;
  for (const nb::object& item : to_items(function, name, value, "numbers")) {
    result.push_back(to_double(function, item_name(name, result.size()), item));
  }
  return result;
}

bool to_bool(const char* function, std::string_view name, nb::handle value) {
  if (!PyBool_Check(value.ptr())) {
    fail_argument(function, name, " must be a bool, got ", describe(value));
  }
  return value.ptr() == Py_True;
}

std::vector<nb::object> to_items(const char* function, std::string_view name, nb::handle value,
                                 const char* of) {
  const bool refused =
      PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr()) || nb::isinstance<nb::dict>(value);
  const nb::object iterator = nb::steal(refused ? nullptr : PyObject_GetIter(value.ptr()));
  if (!iterator.is_valid()) {
    drop_error();
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
  const nb::object items =
      nb::steal(PyMapping_Check(value.ptr()) ? PyMapping_Items(value.ptr()) : nullptr);
  if (!items.is_valid()) {
    drop_error();
    fail_argument(function, name, " must be a dict with int keys, got ", describe(value));
  }
  std::vector<IntItem> result;
  for (nb::handle item : items) {
    const auto pair = nb::steal<nb::tuple>(PySequence_Tuple(item.ptr()));
    if (!pair.is_valid() || pair.size() != 2) {
      drop_error();
      fail_argument(function, name, " must have pairs as items, got ", describe(item), " in ",
                    describe(value));
    }
    const auto key =
        to_int<std::int32_t>(function, std::string("key of ") + std::string(name), pair[0]);
    result.push_back({key, nb::object(pair[1])});
  }
  return result;
}

std::string to_text(const char* function, std::string_view name, nb::handle value) {
  if (!PyUnicode_Check(value.ptr())) {
    fail_argument(function, name, " must be a str, got ", describe(value));
  }
  const std::optional<std::string> text = utf8(value);
  if (!text) {
    fail_argument(function, name, " must be a str without surrogates and null characters, got ",
                  describe(value));
  }
  return *text;
}

}  // namespace sparse_kvcm::bindings
