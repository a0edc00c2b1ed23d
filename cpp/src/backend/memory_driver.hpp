// What a MappedRange asks of a machine: addresses, and memory behind parts of them. Thread-safe.
//
// REQUIRES, of all calls but reserve and release: ranges of whole granules of one reservation, or
// of multiples of granularity() within them where it says so; map only what is not mapped,
// everything else only what is.
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

  // Puts memory behind addresses, in granules that can be unmapped each for itself, and all of it
  // in few calls, since what a call to a driver costs hardly depends on its size. Throws
  // std::bad_alloc if there is not so much, and std::runtime_error for a fault of the device;
  // nothing is mapped then.
  virtual void map(std::byte* address, std::size_t bytes, std::size_t granule) = 0;
  // Filled or not, but closed. Nothing may use it any more.
  virtual void unmap(std::byte* address, std::size_t bytes, std::size_t granule) noexcept = 0;

  // Filling, where needs_fill(), of multiples of granularity(), in this order: what is to be
  // touched is announced, touched, by several threads at a time, inspected, and opened to the
  // device. Never touched while something is being opened: both wait for one lock of the address
  // space, and take twice as long. touch and open throw as map does.
  virtual void announce(std::byte*, std::size_t) {}
  virtual void touch(std::byte*, std::size_t) {}
  // All of a fill has been touched: looks where it lies, before any of it is opened.
  virtual void inspect(std::byte*, std::size_t) {}
  virtual void open(std::byte*, std::size_t) {}
  // What one call of open opened.
  virtual void close(std::byte*, std::size_t) noexcept {}
  // The most that open takes; 0 = it has nothing to do, and takes everything.
  [[nodiscard]] virtual std::size_t most_opened() const { return 0; }

  // Waits until the device has finished everything. Throws std::runtime_error.
  virtual void synchronize() = 0;
};

}  // namespace sparse_kvcm
