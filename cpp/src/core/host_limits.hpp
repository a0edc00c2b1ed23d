// How much host memory this process may still take and pin, and errors that say which limit stands
// in the way. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sparse_kvcm {

// In bytes. What cannot be read, and what has no limit, is empty.
struct HostLimits {
  std::optional<std::int64_t> available;  // MemAvailable: free memory and cache that can be dropped
  std::optional<std::int64_t>
      group_left;                       // in the tightest control group; file cache counts as free
  std::string group;                    // path of that group
  std::optional<std::int64_t> memlock;  // RLIMIT_MEMLOCK; empty with CAP_IPC_LOCK, which lifts it
};

// Reads /proc/meminfo, the control groups (v1 and v2) of the process with all their ancestors, and
// the memlock limit. `root` stands for "/" in tests.
[[nodiscard]] HostLimits read_host_limits(const std::string& root = "");

// Throws HostMemoryError, in the name of `function`, if `bytes` are more than `limits` leave. To be
// asked before the first touch: past a group's limit the kernel ends the process.
void check_host_memory(const char* function, std::size_t bytes, const HostLimits& limits);
// The same with the limits of now. Does nothing for sizes below 64 MiB, which are not worth it.
void check_host_memory(const char* function, std::size_t bytes);

// What to say when `bytes` could not be pinned because of `reason`, the driver's words. Names
// memlock where that is too low, else MemAvailable.
[[nodiscard]] std::string pin_failure(const char* function, std::size_t bytes,
                                      std::string_view reason, const HostLimits& limits);

}  // namespace sparse_kvcm
