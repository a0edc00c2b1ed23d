// Calls into the engine run without the GIL: they may wait for the manager's lock, whose holder
// must never need the GIL. Arguments are converted before, results after.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

namespace sparse_kvcm::bindings {

template <class Call>
auto without_gil(Call call) {
  const nanobind::gil_scoped_release released;
  return call();
}

// The same object, whose end is a call like others: it closes, for which it takes the lock.
template <class T>
std::shared_ptr<T> ended_without_gil(std::shared_ptr<T> object) {
  T* const self = object.get();
  return {self, [held = std::move(object)](T*) mutable {
            if (PyGILState_Check() == 0) return held.reset();
            without_gil([&] { held.reset(); });
          }};
}

}  // namespace sparse_kvcm::bindings
