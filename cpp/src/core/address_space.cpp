#include "core/address_space.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <new>
#include <system_error>

#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older headers lack it

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
  const std::size_t whole = bytes + alignment;
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

void decommit_memory(std::byte* address, std::size_t bytes) noexcept {
  madvise(address, bytes, MADV_DONTNEED);
  mprotect(address, bytes, PROT_NONE);
}

void populate_memory(std::byte* address, std::size_t bytes) {
  populate_memory(address, bytes, &madvise);
}

void populate_memory(std::byte* address, std::size_t bytes, Advise advise) {
  if (advise(address, bytes, kPopulateWrite) == 0) return;
  const int error = errno;
  if (error == ENOMEM) throw std::bad_alloc();
  if (error != EINVAL && error != ENOSYS) {
    throw std::system_error(error, std::generic_category(), "madvise(MADV_POPULATE_WRITE)");
  }
  for (std::size_t offset = 0; offset < bytes; offset += system_page_bytes()) {
    auto* const byte = reinterpret_cast<volatile std::byte*>(address + offset);
    *byte = *byte;
  }
}

}  // namespace sparse_kvcm
