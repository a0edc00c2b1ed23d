// What a MappedRange asks of a machine: addresses, and memory behind parts of them. Thread-safe.
//
// Every call but reserve and release is about whole granules of one reservation. REQUIRES: map only
// what is not mapped, fill and unmap only what is.
#pragma once

#include <cstddef>

namespace sparse_kvcm {

class MemoryDriver {
 public:
  virtual ~MemoryDriver() = default;

  // Granules are multiples of it.
  [[nodiscard]] virtual std::size_t granularity() const = 0;
  // The memory can be read and written by the host.
  [[nodiscard]] virtual bool is_host_memory() const = 0;
  // Memory must be filled before use, which takes long enough for a thread of its own.
  [[nodiscard]] virtual bool needs_fill() const = 0;

  // Throws std::bad_alloc. `alignment` is a power of two.
  [[nodiscard]] virtual std::byte* reserve(std::size_t bytes, std::size_t alignment) = 0;
  virtual void release(std::byte* address, std::size_t bytes) noexcept = 0;

  // Puts one granule of memory behind its addresses. Throws std::bad_alloc if there is none, and
  // std::runtime_error for a fault of the device; nothing is mapped then.
  virtual void map(std::byte* address, std::size_t bytes) = 0;
  // One granule, filled or not. Nothing may use it any more.
  virtual void unmap(std::byte* address, std::size_t bytes) noexcept = 0;
  // Takes the memory of one mapped granule and opens it to the device. Throws as map does.
  virtual void fill(std::byte* address, std::size_t bytes) = 0;
  // Waits until the device has finished everything. Throws std::runtime_error.
  virtual void synchronize() = 0;
};

}  // namespace sparse_kvcm
