// How much host memory the process may still take and pin.
#include "core/host_limits.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

#include "args.hpp"
#include "bindings.hpp"
#include "core/numa.hpp"
#include "record.hpp"

namespace sparse_kvcm::bindings {
namespace {

// Asks for a page that is not touched.
std::string memory_placement_error() {
  const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* page = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return std::generic_category().message(errno);
  const int error = prefer_node(static_cast<std::byte*>(page), bytes, 0);
  munmap(page, bytes);
  return error == 0 ? "" : std::generic_category().message(error);
}

}  // namespace

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
  m.def("memory_placement_error", &memory_placement_error,
        "Why this process may not put memory on a NUMA node; empty if it may.");
}

}  // namespace sparse_kvcm::bindings
