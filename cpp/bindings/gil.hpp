// Calls into the engine run without the GIL: they may wait for the manager's lock, whose holder
// must never need the GIL. Arguments are converted before, results after.
#pragma once

#include <nanobind/nanobind.h>

namespace sparse_kvcm::bindings {

template <class Call>
auto without_gil(Call call) {
  const nanobind::gil_scoped_release released;
  return call();
}

}  // namespace sparse_kvcm::bindings
