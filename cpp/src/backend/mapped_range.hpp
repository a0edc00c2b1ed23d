// A range of addresses of which a prefix has memory. The range is reserved once, so an address in
// it never moves; memory is mapped and unmapped at the end of the prefix only, a granule at a time.
//
// Where memory must be filled first (host memory: touched, then pinned), that happens from the
// front, by fill_ranges() (filler.hpp) or behind the caller's back by a Filler: `usable_bytes` is
// how far it is. Only as much is filled as is used, in whole pages of the system, so that a small
// pool does not take a granule.
//
// One thread at a time, except for usable_bytes and wait_usable, which any may call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/memory_driver.hpp"
#include "core/host_touch.hpp"
#include "core/of_this_process.hpp"

namespace sparse_kvcm {

class Filler;

class MappedRange {
 public:
  // Reserves addresses, without memory. Throws std::bad_alloc. What is filled is opened to the
  // device in chunks that end at multiples of `chunk_bytes`; 0 = of a granule. Copies from the host
  // must not cross their borders.
  // REQUIRES: granule_bytes > 0 a multiple of the driver's granularity; a power of two where the
  // range is of more than one granule;
  // reserved_bytes > 0 a multiple of granule_bytes, chunk_bytes one of the driver's granularity; if
  // it is none of granule_bytes, the range never shrinks.
  MappedRange(std::shared_ptr<MemoryDriver> driver, std::shared_ptr<Filler> filler,
              std::size_t reserved_bytes, std::size_t granule_bytes, std::size_t chunk_bytes = 0);
  ~MappedRange();  // waits for the device, as well as it can
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  // Makes the prefix `bytes` long, a multiple of the granule, of which the first `used_bytes` are
  // to be filled: whole pages of the system, unless the range never grows. What stays mapped keeps
  // its contents. All or nothing: if memory cannot be mapped, what was mapped for it goes again and
  // the driver's exception comes through. Waits for the device before it unmaps. Filling stops
  // until start_filling().
  // Throws InvalidArgument if `bytes` is beyond the reservation or not whole granules.
  void resize(std::size_t bytes, std::size_t used_bytes);
  void resize(std::size_t bytes) { resize(bytes, bytes); }
  // The part of resize that cannot fail. REQUIRES: at most as long as it is, in whole granules, and
  // the device has been waited for if that is less.
  void shrink(std::size_t bytes, std::size_t used_bytes) noexcept;
  void synchronize() const { driver_->synchronize(); }
  // Lets the filler go on, and makes it stop behind what it is at. Calls of their own, since
  // the kernel changes mappings for one thread at a time: filling holds up whoever maps or unmaps.
  void start_filling() noexcept;
  void stop_filling() noexcept;

  [[nodiscard]] std::byte* address() const { return address_; }
  [[nodiscard]] bool is_host_memory() const { return driver_->is_host_memory(); }
  [[nodiscard]] std::size_t mapped_bytes() const { return mapped_.load(); }
  [[nodiscard]] std::size_t reserved_bytes() const { return reserved_; }
  [[nodiscard]] std::size_t used_bytes() const { return used_.load(); }
  [[nodiscard]] std::size_t granule_bytes() const { return granule_; }

  // The prefix that may be used; grows up to what resize was told.
  [[nodiscard]] std::size_t usable_bytes() const { return usable_.load(); }
  // Waits until the first `bytes` may be used, or as many as are used after a resize. Throws what
  // went wrong with the filling, if something did before that; after the next resize it is tried
  // again.
  // Throws InvalidState, in a child of a fork, for what is not filled: nobody is there to fill it.
  void wait_usable(std::size_t bytes) const;

  // For who fills it, in this order. The next bytes, announced: chunks up to the one with which
  // they are at least `least_bytes`; none if all is filled.
  [[nodiscard]] MemoryPart next_part(std::size_t least_bytes);
  void touch(std::byte* data, std::size_t bytes) const { driver_->touch(data, bytes); }
  // Opens the first `bytes`, which have been touched; calls `opened` with the bytes of each chunk.
  void open(std::size_t bytes, const std::function<void(std::size_t)>& opened);
  [[nodiscard]] bool is_filled() const { return usable_ >= used_; }
  [[nodiscard]] std::size_t unfilled_bytes() const { return is_filled() ? 0 : used_ - usable_; }
  // Touching is all there is to it.
  [[nodiscard]] bool opens_at_once() const { return driver_->most_opened() == 0; }
  void fail(const std::exception_ptr& fault);

 private:
  void grow(std::size_t bytes);
  void unmap_down_to(std::size_t bytes) noexcept;
  [[nodiscard]] std::size_t chunk_end(std::size_t begin) const;

  std::shared_ptr<MemoryDriver> driver_;
  std::shared_ptr<Filler> filler_;
  std::size_t reserved_;
  std::size_t granule_;
  std::size_t chunk_;
  std::byte* address_;
  bool filling_ = false;                 // the filler may know the range
  std::vector<std::size_t> opened_;      // where chunks begin
  std::atomic<std::size_t> mapped_ = 0;  // changes only while the range is not being filled
  std::atomic<std::size_t> used_ = 0;    // likewise, under the signal's mutex
  std::atomic<std::size_t> usable_ = 0;  // grows under it

  struct Signal {
    std::mutex mutex;
    std::condition_variable progress;
  };
  // None in a child, which has one thread and copies of its own.
  [[nodiscard]] std::unique_lock<std::mutex> lock() const;
  void notify() const;

  OfThisProcess<Signal> signal_;
  std::exception_ptr fault_;  // under the signal's mutex
};

}  // namespace sparse_kvcm
