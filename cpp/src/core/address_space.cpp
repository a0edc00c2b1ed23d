#include "core/address_space.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <new>

#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

std::uintptr_t number(const std::byte* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

}  // namespace

std::size_t system_page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::byte* reserve_addresses(std::size_t bytes, std::size_t alignment) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2 - alignment) throw std::bad_alloc();
  // What mmap gives begins at a page.
  const std::size_t whole = alignment <= system_page_bytes() ? bytes : bytes + alignment;
  void* const mapped =
      mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t before = round_up(number(begin), alignment) - number(begin);
  const std::size_t page_end = round_up(bytes, system_page_bytes());
  if (before > 0) munmap(begin, before);
  if (whole > before + page_end) munmap(begin + before + page_end, whole - before - page_end);
  return begin + before;
}

void release_addresses(std::byte* address, std::size_t bytes) noexcept { munmap(address, bytes); }

void commit_memory(std::byte* address, std::size_t bytes) {
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
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
