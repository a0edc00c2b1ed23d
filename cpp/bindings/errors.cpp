// Exceptions and error words. nanobind maps standard exceptions, faults of the device among them,
// to their Python counterparts.
#include "sparse_kvcm/error.hpp"

#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "sparse_kvcm/types.hpp"

namespace nb = nanobind;

namespace sparse_kvcm::bindings {
namespace {

template <class Error>
void bind_error(nb::module_& m, const char* name, PyObject* base, const char* doc) {
  nb::exception<Error>(m, name, base).attr("__doc__") = doc;
}

// nanobind makes flags print as numbers; Python's own repr names them.
void show_names(nb::handle flags) {
  nb::delattr(flags, "__str__");
  nb::delattr(flags, "__repr__");
}

}  // namespace

void bind_errors(nb::module_& m) {
  bind_error<InvalidArgument>(m, "InvalidArgument", PyExc_ValueError,
                              "An argument is outside what the function takes.");
  bind_error<InvalidState>(m, "InvalidState", PyExc_RuntimeError,
                           "The call does not fit the object's state: a closed request, an open "
                           "step.");
  bind_error<OutOfPages>(m, "OutOfPages", PyExc_RuntimeError,
                         "Host history or the arena has too few free pages.");
  bind_error<HostMemoryError>(m, "HostMemoryError", PyExc_MemoryError,
                              "Host memory cannot be had; names the limit that it does not fit.");
  bind_error<DeviceMemoryError>(m, "DeviceMemoryError", PyExc_MemoryError,
                                "Device memory cannot be had; names what it was for.");
  bind_error<CorruptedError>(m, "CorruptedError", PyExc_RuntimeError,
                             "A device failed half-way and nothing could be fenced: the manager "
                             "refuses all further work.");
  bind_error<NotAvailable>(m, "NotAvailable", PyExc_RuntimeError,
                           "This build or machine lacks what the call needs, such as a GPU.");

  nb::enum_<RowError> error_bits(
      m, "ErrorBits", nb::is_flag(), nb::is_arithmetic(),
      "Bits of a row's error word. They are ORed; 0 means that nothing was wrong.");
  error_bits.value("RANGE", kErrorRange, "an ordinal outside [0, length)")
      .value("HOLE", kErrorHole, "an ordinal in [watermark, window_begin): readable nowhere")
      .value("STALE", kErrorStale, "launched while no step is open, or twice in one step")
      .value("LEASE", kErrorLease, "the row's state contradicts itself or the arena")
      .value("PAGE", kErrorPage, "a miss whose page the page table does not have")
      .value("UNCOVERED", kErrorUncovered, "convert's check: a selected unit without a slot");
  show_names(error_bits);

  nb::enum_<BatchError> batch_error_bits(m, "BatchErrorBits", nb::is_flag(), nb::is_arithmetic(),
                                         "Bits of a launch's batch error word.");
  batch_error_bits.value("ROW", kBatchErrorRow,
                         "an entry of `rows` that is neither -1 nor a seated row");
  show_names(batch_error_bits);
}

}  // namespace sparse_kvcm::bindings
