// How much host memory the process may still take and pin.
#include "core/host_limits.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "args.hpp"
#include "bindings.hpp"
#include "record.hpp"

namespace sparse_kvcm::bindings {

void bind_host_limits(nb::module_& m) {
  Record<HostLimits>(m, "HostLimits",
                     "Limits of host memory in bytes. What cannot be read, or has none, is None.")
      .field("available", &HostLimits::available, "MemAvailable of the machine.")
      .field("group_left", &HostLimits::group_left,
             "What the tightest control group leaves; file cache counts as free.")
      .field("group", &HostLimits::group, "Path of that group.")
      .field("memlock", &HostLimits::memlock,
             "RLIMIT_MEMLOCK; None with CAP_IPC_LOCK, which lifts it.")
      .done();
  m.def(
      "read_host_limits",
      [](nb::handle root) { return read_host_limits(to_text("read_host_limits", "root", root)); },
      arg("root") = "", nb::sig("def read_host_limits(root: str = '') -> HostLimits"),
      "Read them; `root` stands for ``/`` in tests.");
}

}  // namespace sparse_kvcm::bindings
