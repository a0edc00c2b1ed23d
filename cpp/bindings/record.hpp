// Binds a plain C++ struct as a read-only Python class with a repr and, where it can be compared,
// equality. Users can make one only if it is given a constructor.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <concepts>
#include <string>
#include <type_traits>
#include <vector>

namespace sparse_kvcm::bindings {

template <class T>
class Record {
 public:
  Record(nanobind::module_& m, const char* name, const char* doc) : class_(m, name, doc) {}

  // `source` is a pointer to a member, or a function that takes the struct.
  template <class Source>
  Record& field(const char* name, Source source, const char* doc) {
    if constexpr (std::is_member_object_pointer_v<Source>) {
      class_.def_ro(name, source, doc);
    } else {
      class_.def_prop_ro(name, source, doc);
    }
    names_.emplace_back(name);
    return *this;
  }

  // A constructor, for records that users make.
  template <class... Args>
  Record& init(const Args&... args) {
    class_.def("__init__", args...);
    return *this;
  }

  // For methods.
  [[nodiscard]] nanobind::class_<T>& type() { return class_; }

  // Ends the list of fields.
  void done() {
    class_.def("__repr__", [names = names_](nanobind::handle self) {
      std::string text = nanobind::str(self.type().attr("__name__")).c_str();
      std::string separator = "(";
      for (const std::string& name : names) {
        text += separator + name + "=" + nanobind::repr(self.attr(name.c_str())).c_str();
        separator = ", ";
      }
      return text + ")";
    });
    if constexpr (std::equality_comparable<T>) {
      class_.def(
          "__eq__", [](const T& self, const T& other) { return self == other; },
          nanobind::is_operator(), nanobind::sig("def __eq__(self, other: object, /) -> bool"));
      class_.def("__hash__", [names = names_](nanobind::handle self) {
        nanobind::list values;
        for (const std::string& name : names) values.append(self.attr(name.c_str()));
        return nanobind::hash(nanobind::tuple(values));
      });
    }
  }

 private:
  nanobind::class_<T> class_;
  std::vector<std::string> names_;
};

}  // namespace sparse_kvcm::bindings
