#include "progress.hpp"

#include "args.hpp"

namespace sparse_kvcm::bindings {

FillProgress to_progress(const char* function, nb::handle progress) {
  if (!progress.is_none() && PyCallable_Check(progress.ptr()) == 0) {
    fail_argument(function, "progress must be callable or None, got ", describe(progress));
  }
  return [progress](std::int64_t bytes_done, std::int64_t bytes_total) {
    const nb::gil_scoped_acquire gil;
    if (!progress.is_none()) progress(bytes_done, bytes_total);
    if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  };
}

}  // namespace sparse_kvcm::bindings
