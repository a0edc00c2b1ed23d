// A range of addresses of which a prefix has memory. The range is reserved once, so an address in
// it never moves; memory is mapped and unmapped at the end of the prefix only, a granule at a time.
//
// Where memory must be filled first (host memory: touched and pinned, at some GB/s), a thread does
// it behind the caller's back, from the front: `usable_bytes` is how far it is.
//
// One thread at a time, except for usable_bytes and wait_usable, which any may call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/memory_driver.hpp"

namespace sparse_kvcm {

class MappedRange {
 public:
  // Reserves addresses, without memory. Throws std::bad_alloc.
  // REQUIRES: granule_bytes > 0 a power of two and a multiple of the driver's granularity,
  // reserved_bytes > 0 a multiple of granule_bytes.
  MappedRange(std::shared_ptr<MemoryDriver> driver, std::size_t reserved_bytes,
              std::size_t granule_bytes);
  ~MappedRange();  // waits for the device, best it can
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  // Makes the prefix `bytes` long, a multiple of the granule. What stays mapped keeps its contents.
  // All or nothing: if a granule cannot be mapped, what was mapped for it goes again and the
  // driver's exception comes through. Waits for the device before it unmaps, for the filler always.
  // Throws InvalidArgument if `bytes` is beyond the reservation or not whole granules.
  void resize(std::size_t bytes);

  [[nodiscard]] std::byte* address() const { return address_; }
  [[nodiscard]] bool is_host_memory() const { return driver_->is_host_memory(); }
  [[nodiscard]] std::size_t mapped_bytes() const { return mapped_.load(); }
  [[nodiscard]] std::size_t reserved_bytes() const { return reserved_; }
  [[nodiscard]] std::size_t granule_bytes() const { return granule_; }

  // The prefix that may be used; grows up to mapped_bytes().
  [[nodiscard]] std::size_t usable_bytes() const { return usable_.load(); }
  // Waits until the first `bytes` (of those mapped) may be used. Throws what stopped the filler, if
  // it was stopped before that; the next resize tries again.
  void wait_usable(std::size_t bytes) const;

 private:
  void grow(std::size_t bytes);
  void unmap_down_to(std::size_t bytes) noexcept;
  void start_filler();
  void stop_filler() noexcept;
  void fill();

  std::shared_ptr<MemoryDriver> driver_;
  std::size_t reserved_;
  std::size_t granule_;
  std::byte* address_;
  std::atomic<std::size_t> mapped_ = 0;
  std::atomic<std::size_t> usable_ = 0;  // written under mutex_

  mutable std::mutex mutex_;
  mutable std::condition_variable progress_;
  std::exception_ptr fault_;  // under mutex_
  std::atomic<bool> stop_ = false;
  std::thread filler_;
};

}  // namespace sparse_kvcm
