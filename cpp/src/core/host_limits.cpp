// Control groups: a process is bound by the limit of its group and of each of that one's ancestors.
// In a container without a namespace of its own for them, the paths that /proc names begin outside
// of what is mounted; then only the mount's root, which is the container's group, can be read.
#include "core/host_limits.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/system_file.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::size_t kWorthChecking = std::size_t{64} << 20;
constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;  // v1 writes "none" as about 2^63
constexpr std::int64_t kIpcLock = std::int64_t{1} << 14;  // CAP_IPC_LOCK

struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* soft_limit;  // past it the kernel slows the process down and reclaims; nullptr = none
  const char* use;
  const char* cache[2];  // keys of memory.stat: file cache, all of which can be dropped
};
constexpr GroupFiles kVersion1{"/sys/fs/cgroup/memory",
                               "/memory.limit_in_bytes",
                               nullptr,
                               "/memory.usage_in_bytes",
                               {"total_inactive_file ", "total_active_file "}};
constexpr GroupFiles kVersion2{"/sys/fs/cgroup",
                               "/memory.max",
                               "/memory.high",
                               "/memory.current",
                               {"inactive_file ", "active_file "}};

// The tighter limit of the group in `folder`.
std::optional<std::int64_t> read_limit(const std::string& folder, const GroupFiles& files) {
  const auto limit = parse_number(read_system_file(folder + files.limit));
  if (files.soft_limit == nullptr) return limit;
  const auto soft = parse_number(read_system_file(folder + files.soft_limit));
  return limit && soft ? std::min(limit, soft) : (limit ? limit : soft);
}

// What the limit of the group in `folder` leaves.
std::optional<std::int64_t> read_group(const std::string& folder, const GroupFiles& files) {
  const auto limit = read_limit(folder, files);
  const auto use = parse_number(read_system_file(folder + files.use));
  if (!limit || !use || *limit >= kNoLimit) return std::nullopt;
  const std::string stat = read_system_file(folder + "/memory.stat");
  std::int64_t cache = 0;
  for (const char* key : files.cache) cache += parse_number(find_value(stat, key)).value_or(0);
  return std::max(std::int64_t{0}, *limit - std::max(std::int64_t{0}, *use - cache));
}

// Takes the group `path` and each of its ancestors into account.
void visit_groups(const std::string& root, std::string path, const GroupFiles& files,
                  HostLimits& limits) {
  if (path == "/") path.clear();
  const std::string mount = root + files.mount;
  for (;;) {
    const auto left = read_group(mount + path, files);
    if (left && (!limits.group_left || *left < *limits.group_left)) {
      limits.group_left = left;
      limits.group = path.empty() ? "/" : path;
    }
    if (path.empty()) return;
    const std::size_t slash = path.rfind('/');
    path.erase(slash == path.npos ? 0 : slash);
  }
}

void read_groups(const std::string& root, HostLimits& limits) {
  const std::string text = read_system_file(root + "/proc/self/cgroup");
  for (std::string_view rest = text; !rest.empty();) {
    // "id:controllers:path"; v2 has no controllers.
    const std::string_view line = take_line(rest);
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    std::string controllers(line.substr(first, second - first + 1));
    std::replace(controllers.begin(), controllers.end(), ':', ',');
    const std::string path(line.substr(second + 1));
    if (controllers == ",,") visit_groups(root, path, kVersion2, limits);
    if (controllers.find(",memory,") != controllers.npos) {
      visit_groups(root, path, kVersion1, limits);
    }
  }
}

// CapEff is in hexadecimal.
bool may_lock_all(const std::string& root) {
  const std::string status = read_system_file(root + "/proc/self/status");
  std::string_view digits = find_value(status, "CapEff:");
  std::uint64_t bits = 0;
  for (const char c : digits) {
    if (c >= '0' && c <= '9') bits = bits * 16 + static_cast<std::uint64_t>(c - '0');
    if (c >= 'a' && c <= 'f') bits = bits * 16 + static_cast<std::uint64_t>(c - 'a' + 10);
  }
  return (bits & kIpcLock) != 0;
}

}  // namespace

HostLimits read_host_limits(const std::string& root) {
  HostLimits limits;
  const std::string memory = read_system_file(root + "/proc/meminfo");
  const auto kib = parse_number(find_value(memory, "MemAvailable:"));
  if (kib) limits.available = *kib * 1024;
  read_groups(root, limits);
  if (!may_lock_all(root)) {
    const std::string resources = read_system_file(root + "/proc/self/limits");
    limits.memlock = parse_number(find_value(resources, "Max locked memory"));
  }
  return limits;
}

void check_host_memory(const char* function, std::size_t bytes, const HostLimits& limits) {
  const auto too_many = [bytes](std::optional<std::int64_t> left) {
    return left && bytes > static_cast<std::size_t>(*left);
  };
  if (too_many(limits.group_left)) {
    throw HostMemoryError(message(function, "the memory limit of the control group ", limits.group,
                                  " leaves ", *limits.group_left, " B, ", bytes,
                                  " B are wanted; raise the limit or ask for less"));
  }
  if (too_many(limits.available)) {
    throw HostMemoryError(message(function, "the machine has ", *limits.available,
                                  " B of memory available (MemAvailable), ", bytes,
                                  " B are wanted; free some or ask for less"));
  }
}

void check_host_memory(const char* function, std::size_t bytes) {
  if (bytes >= kWorthChecking) check_host_memory(function, bytes, read_host_limits());
}

std::string pin_failure(const char* function, std::size_t bytes, std::string_view reason,
                        const HostLimits& limits) {
  const std::string failed =
      message(function, bytes, " B of host memory could not be pinned (", reason, "): ");
  if (limits.memlock && bytes > static_cast<std::size_t>(*limits.memlock)) {
    return failed + "RLIMIT_MEMLOCK is " + std::to_string(*limits.memlock) +
           " B; raise it (ulimit -l, or memlock of the container) or ask for less";
  }
  const std::string available =
      limits.available ? std::to_string(*limits.available) + " B" : "not known";
  return failed + "the driver lacks memory, MemAvailable is " + available +
         "; free some or ask for less";
}

}  // namespace sparse_kvcm
