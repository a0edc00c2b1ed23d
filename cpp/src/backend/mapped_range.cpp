#include "backend/mapped_range.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "backend/filler.hpp"
#include "core/check.hpp"
#include "core/host_advice.hpp"

namespace sparse_kvcm {
namespace {

// False if the device is gone, and its memory with it.
bool try_synchronize(MemoryDriver& driver) noexcept {
  try {
    driver.synchronize();
    return true;
  } catch (...) {
    return false;
  }
}

// At which huge pages can begin.
std::size_t alignment(std::size_t granule, const MemoryDriver& driver) {
  if (std::has_single_bit(granule)) return granule;
  return granule < kHugePage ? driver.granularity() : kHugePage;
}

}  // namespace

MappedRange::MappedRange(std::shared_ptr<MemoryDriver> driver, std::shared_ptr<Filler> filler,
                         std::size_t reserved_bytes, std::size_t granule_bytes,
                         std::size_t chunk_bytes)
    : driver_(std::move(driver)),
      filler_(std::move(filler)),
      reserved_(reserved_bytes),
      granule_(granule_bytes),
      chunk_(chunk_bytes == 0 ? granule_bytes : chunk_bytes),
      address_(driver_->reserve(reserved_bytes, alignment(granule_bytes, *driver_))) {}

MappedRange::~MappedRange() {
  stop_filling();
  if (mapped_ > 0) static_cast<void>(try_synchronize(*driver_));
  unmap_down_to(0);
  driver_->release(address_, reserved_);
}

void MappedRange::resize(std::size_t bytes, std::size_t used_bytes) {
  if (bytes > reserved_ || bytes % granule_ != 0) {
    fail_argument("MappedRange.resize", "bytes must be a multiple of ", granule_, " in [0, ",
                  reserved_, "], got ", bytes);
  }
  if (bytes < mapped_) driver_->synchronize();
  stop_filling();
  if (bytes > mapped_) grow(bytes);
  shrink(bytes, used_bytes);
}

// Who waits for what has gone must hear of it.
void MappedRange::shrink(std::size_t bytes, std::size_t used_bytes) noexcept {
  stop_filling();
  unmap_down_to(bytes);
  {
    const auto held = lock();
    used_ = std::max(std::min(used_bytes, bytes), usable_.load());
    if (!driver_->needs_fill()) usable_ = mapped_.load();
  }
  notify();
}

std::unique_lock<std::mutex> MappedRange::lock() const {
  return signal_.is_here() ? std::unique_lock(signal_->mutex) : std::unique_lock<std::mutex>();
}

void MappedRange::notify() const {
  if (signal_.is_here()) signal_->progress.notify_all();
}

void MappedRange::wait_usable(std::size_t bytes) const {
  const auto missing = [&] { return usable_ < std::min(bytes, used_.load()); };
  if (!signal_.is_here()) {
    if (!missing()) return;
    fail_state("Storage.wait_usable", "memory is not filled in a fork of the process that made it");
  }
  auto held = lock();
  bool there = false;  // asked once: what is there may go again meanwhile
  signal_->progress.wait(held, [&] {
    there = !missing();
    return there || fault_;
  });
  if (!there) std::rethrow_exception(fault_);
}

void MappedRange::grow(std::size_t bytes) {
  driver_->map(address_ + mapped_, bytes - mapped_, granule_);
  mapped_ = bytes;
}

void MappedRange::unmap_down_to(std::size_t bytes) noexcept {
  while (!opened_.empty() && opened_.back() >= bytes) {
    const std::size_t begin = opened_.back();
    driver_->close(address_ + begin, usable_ - begin);
    opened_.pop_back();
    usable_ = begin;
  }
  if (mapped_ > bytes) driver_->unmap(address_ + bytes, mapped_ - bytes, granule_);
  mapped_ = std::min(mapped_.load(), bytes);
  usable_ = std::min(usable_.load(), mapped_.load());
}

void MappedRange::start_filling() noexcept {
  if (filling_ || is_filled()) return;
  try {
    filler_->add(*this);
    filling_ = true;
  } catch (...) {  // no more threads
    fail(std::current_exception());
  }
}

void MappedRange::stop_filling() noexcept {
  if (filling_) filler_->remove(*this);
  filling_ = false;
  const auto held = lock();
  fault_ = nullptr;
}

std::size_t MappedRange::chunk_end(std::size_t begin) const {
  if (opens_at_once()) return used_;
  return std::min(used_.load(), (begin / chunk_ + 1) * chunk_);
}

MemoryPart MappedRange::next_part(std::size_t least_bytes) {
  const std::size_t begin = usable_;
  if (is_filled()) return {address_ + begin, 0};
  std::size_t end = begin;
  do {
    end = std::min(used_.load(), (end / chunk_ + 1) * chunk_);
  } while (end < used_ && end - begin < least_bytes);
  driver_->announce(address_ + begin, end - begin);
  return {address_ + begin, end - begin};
}

void MappedRange::open(std::size_t bytes, const std::function<void(std::size_t)>& opened) {
  const std::size_t last = usable_ + bytes;
  if (bytes > 0) driver_->inspect(address_ + usable_, bytes);
  while (usable_ < last) {
    const std::size_t begin = usable_;
    const std::size_t end = std::min(last, chunk_end(begin));
    opened_.reserve(opened_.size() + 1);
    driver_->open(address_ + begin, end - begin);
    {
      const auto held = lock();
      opened_.push_back(begin);
      usable_ = end;
    }
    notify();
    opened(end - begin);
  }
}

void MappedRange::fail(const std::exception_ptr& fault) {
  {
    const auto held = lock();
    fault_ = fault;
  }
  notify();
}

}  // namespace sparse_kvcm
