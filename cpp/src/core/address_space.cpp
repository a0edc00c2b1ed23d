#include "core/address_space.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <string>
#include <system_error>

#include "core/check.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "Storage";

std::uintptr_t number(const std::byte* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

// Unlimited is the rule; a limit explains why the kernel has no addresses.
std::string resource_limit(const char* name, int resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return std::string(", ") + name + " is " + std::to_string(limit.rlim_cur) + " B";
}

}  // namespace

void fail_addresses(const char* function, std::size_t bytes, int error) {
  throw HostMemoryError(message(
      function, "mmap of ", bytes, " B failed: ", std::generic_category().message(error),
      resource_limit("RLIMIT_AS (ulimit -v)", RLIMIT_AS),
      resource_limit("RLIMIT_DATA (ulimit -d)", RLIMIT_DATA), "; raise it or ask for less"));
}

std::size_t system_page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::byte* reserve_addresses(std::size_t bytes, std::size_t alignment) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2 - alignment) {
    fail_addresses(kFunction, bytes, ENOMEM);
  }
  // What mmap gives begins at a page.
  const std::size_t whole = alignment <= system_page_bytes() ? bytes : bytes + alignment;
  void* const mapped =
      mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) fail_addresses(kFunction, bytes, errno);
  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t before = round_up(number(begin), alignment) - number(begin);
  const std::size_t page_end = round_up(bytes, system_page_bytes());
  if (before > 0) munmap(begin, before);
  if (whole > before + page_end) munmap(begin + before + page_end, whole - before - page_end);
  return begin + before;
}

void release_addresses(std::byte* address, std::size_t bytes) noexcept { munmap(address, bytes); }

void commit_memory(std::byte* address, std::size_t bytes) {
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) {
    fail_addresses(kFunction, bytes, errno);
  }
}

// One call that forgets all advice too.
void decommit_memory(std::byte* address, std::size_t bytes) noexcept {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(address, bytes, PROT_NONE, kFlags, -1, 0) != MAP_FAILED) return;
  madvise(address, bytes,
          MADV_DONTNEED);  // the kernel lacks mappings; the memory goes all the same
  mprotect(address, bytes, PROT_NONE);
}

}  // namespace sparse_kvcm
