// Host memory for a MappedRange: mmap, mprotect and madvise, and what pinned memory needs besides
// the calls to its driver. The same on every backend.
#pragma once

#include <cstddef>

#include "backend/memory_driver.hpp"
#include "core/host_advice.hpp"

namespace sparse_kvcm {

// Memory that is there when it is touched: the CPU backend's device memory.
class HostMemory : public MemoryDriver {
 public:
  [[nodiscard]] std::size_t granularity() const override;
  [[nodiscard]] bool is_host_memory() const override { return true; }
  [[nodiscard]] bool needs_fill() const override { return false; }
  [[nodiscard]] std::byte* reserve(std::size_t bytes, std::size_t alignment) override;
  void release(std::byte* address, std::size_t bytes) noexcept override;
  void map(std::byte* address, std::size_t bytes, std::size_t granule) override;
  void unmap(std::byte* address, std::size_t bytes, std::size_t granule) noexcept override;
  void synchronize() override {}
};

// Memory that is advised, touched, and looked at afterwards; a backend may pin it then. `warn`
// hears, on any thread, of what did not go as wished.
class FilledHostMemory : public HostMemory {
 public:
  explicit FilledHostMemory(Warn warn, int numa_node = kAnyNode);

  [[nodiscard]] bool needs_fill() const override { return true; }
  void announce(std::byte* address, std::size_t bytes) override;
  void touch(std::byte* address, std::size_t bytes) override;
  void inspect(std::byte* address, std::size_t bytes) override;

 private:
  HostAdvice advice_;
};

}  // namespace sparse_kvcm
