// Virtual memory on the CPU backend: mmap, mprotect and madvise. Memory of the "device" is there
// when it is touched; pinned memory is filled first, as on a GPU.
#pragma once

#include <cstddef>

#include "backend/memory_driver.hpp"

namespace sparse_kvcm {

class CpuMemory final : public MemoryDriver {
 public:
  enum class Fill : bool { kOnTouch, kFirst };
  explicit CpuMemory(Fill fill) : fill_(fill) {}

  [[nodiscard]] std::size_t granularity() const override;
  [[nodiscard]] bool is_host_memory() const override { return true; }
  [[nodiscard]] bool needs_fill() const override { return fill_ == Fill::kFirst; }
  [[nodiscard]] std::byte* reserve(std::size_t bytes, std::size_t alignment) override;
  void release(std::byte* address, std::size_t bytes) noexcept override;
  void map(std::byte* address, std::size_t bytes) override;
  void unmap(std::byte* address, std::size_t bytes) noexcept override;
  void fill(std::byte* address, std::size_t bytes) override;
  void synchronize() override {}

 private:
  Fill fill_;
};

}  // namespace sparse_kvcm
