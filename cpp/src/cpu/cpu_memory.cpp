#include "cpu/cpu_memory.hpp"

#include <memory>

#include "core/address_space.hpp"
#include "cpu/cpu_backend.hpp"

namespace sparse_kvcm {

std::size_t CpuMemory::granularity() const { return system_page_bytes(); }

std::byte* CpuMemory::reserve(std::size_t bytes, std::size_t alignment) {
  return reserve_addresses(bytes, alignment);
}

void CpuMemory::release(std::byte* address, std::size_t bytes) noexcept {
  release_addresses(address, bytes);
}

void CpuMemory::map(std::byte* address, std::size_t bytes) { commit_memory(address, bytes); }
void CpuMemory::unmap(std::byte* address, std::size_t bytes) noexcept {
  decommit_memory(address, bytes);
}
void CpuMemory::fill(std::byte* address, std::size_t bytes) { populate_memory(address, bytes); }

std::shared_ptr<MemoryDriver> CpuBackend::memory_driver(MemoryKind kind) {
  return std::make_shared<CpuMemory>(kind == MemoryKind::kPinned ? CpuMemory::Fill::kFirst
                                                                 : CpuMemory::Fill::kOnTouch);
}

}  // namespace sparse_kvcm
