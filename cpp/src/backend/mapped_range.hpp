// A range of addresses of which a prefix has memory. The range is reserved once, so an address in
// it never moves; memory is mapped and unmapped at the end of the prefix only, a granule at a time.
//
// Where memory must be filled first (host memory: touched and pinned, at some GB/s), the filler does
// it from the front: `usable_bytes` is how far it is.
//
// One thread at a time, except for usable_bytes and wait_usable, which any may call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>

#include "backend/filler.hpp"
#include "backend/memory_driver.hpp"

namespace sparse_kvcm {

class MappedRange {
 public:
  // Reserves addresses, without memory. Throws std::bad_alloc.
  // REQUIRES: granule_bytes > 0 a power of two and a multiple of the driver's granularity,
  // reserved_bytes > 0 a multiple of granule_bytes.
  MappedRange(std::shared_ptr<MemoryDriver> driver, std::shared_ptr<Filler> filler,
              std::size_t reserved_bytes, std::size_t granule_bytes);
  ~MappedRange();  // waits for the device, as well as it can
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  // Makes the prefix `bytes` long, a multiple of the granule. What stays mapped keeps its contents.
  // All or nothing: if a granule cannot be mapped, what was mapped for it goes again and the
  // driver's exception comes through. Waits for the device before it unmaps. Filling stops, behind
  // the granule at hand, until start_filling().
  // Throws InvalidArgument if `bytes` is beyond the reservation or not whole granules.
  void resize(std::size_t bytes);
  // Lets the filler go on, and makes it stop behind the granule at hand. Calls of their own, since
  // the kernel changes mappings for one thread at a time: filling holds up whoever maps or unmaps.
  void start_filling() noexcept;
  void stop_filling() noexcept;

  [[nodiscard]] std::byte* address() const { return address_; }
  [[nodiscard]] bool is_host_memory() const { return driver_->is_host_memory(); }
  [[nodiscard]] std::size_t mapped_bytes() const { return mapped_.load(); }
  [[nodiscard]] std::size_t reserved_bytes() const { return reserved_; }
  [[nodiscard]] std::size_t granule_bytes() const { return granule_; }

  // The prefix that may be used; grows up to mapped_bytes().
  [[nodiscard]] std::size_t usable_bytes() const { return usable_.load(); }
  // Waits until the first `bytes` (of those mapped) may be used. Throws what went wrong with the
  // filling, if something did before that; after the next resize it is tried again.
  void wait_usable(std::size_t bytes) const;

  // Fills one granule more; for the filler. False if that was the last, or went wrong.
  [[nodiscard]] bool fill_granule() noexcept;

 private:
  void grow(std::size_t bytes);
  void unmap_down_to(std::size_t bytes) noexcept;

  std::shared_ptr<MemoryDriver> driver_;
  std::shared_ptr<Filler> filler_;
  std::size_t reserved_;
  std::size_t granule_;
  std::byte* address_;
  bool filling_ = false;                 // the filler may know the range
  std::atomic<std::size_t> mapped_ = 0;  // changes only while the range is not being filled
  std::atomic<std::size_t> usable_ = 0;  // grows under mutex_

  mutable std::mutex mutex_;
  mutable std::condition_variable progress_;
  std::exception_ptr fault_;  // under mutex_
};

}  // namespace sparse_kvcm
