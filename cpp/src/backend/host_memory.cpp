#include "backend/host_memory.hpp"

#include <utility>

#include "core/address_space.hpp"
#include "core/host_touch.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "Storage";

}  // namespace

std::size_t HostMemory::granularity() const { return system_page_bytes(); }

std::byte* HostMemory::reserve(std::size_t bytes, std::size_t alignment) {
  return reserve_addresses(bytes, alignment);
}

void HostMemory::release(std::byte* address, std::size_t bytes) noexcept {
  release_addresses(address, bytes);
}

void HostMemory::map(std::byte* address, std::size_t bytes, std::size_t) {
  commit_memory(address, bytes);
}
void HostMemory::unmap(std::byte* address, std::size_t bytes, std::size_t) noexcept {
  decommit_memory(address, bytes);
}

FilledHostMemory::FilledHostMemory(Warn warn, int numa_node)
    : advice_(kFunction, numa_node, std::move(warn)) {}

void FilledHostMemory::announce(std::byte* address, std::size_t bytes) {
  advice_.apply(address, bytes);
}
void FilledHostMemory::touch(std::byte* address, std::size_t bytes) {
  touch_pages_or_throw(kFunction, address, bytes);
}
void FilledHostMemory::inspect(std::byte* address, std::size_t bytes) {
  advice_.verify(address, bytes);
}

}  // namespace sparse_kvcm
