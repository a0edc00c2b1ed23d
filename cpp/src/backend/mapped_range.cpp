#include "backend/mapped_range.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

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

}  // namespace

MappedRange::MappedRange(std::shared_ptr<MemoryDriver> driver, std::shared_ptr<Filler> filler,
                         std::size_t reserved_bytes, std::size_t granule_bytes)
    : driver_(std::move(driver)),
      filler_(std::move(filler)),
      reserved_(reserved_bytes),
      granule_(granule_bytes),
      address_(driver_->reserve(reserved_bytes, granule_bytes)) {}

MappedRange::~MappedRange() {
  stop_filling();
  if (mapped_ > 0) static_cast<void>(try_synchronize(*driver_));
  unmap_down_to(0);
  driver_->release(address_, reserved_);
}

void MappedRange::resize(std::size_t bytes) {
  if (bytes > reserved_ || bytes % granule_ != 0) {
    fail_argument("MappedRange.resize", "bytes must be a multiple of ", granule_, " in [0, ",
                  reserved_, "], got ", bytes);
  }
  if (bytes < mapped_) driver_->synchronize();
  stop_filling();
  if (bytes > mapped_) grow(bytes);
  unmap_down_to(bytes);
  if (!driver_->needs_fill()) usable_ = mapped_.load();
}

void MappedRange::wait_usable(std::size_t bytes) const {
  std::unique_lock lock(mutex_);
  const auto missing = [&] { return usable_ < std::min(bytes, mapped_.load()); };
  progress_.wait(lock, [&] { return !missing() || fault_; });
  if (missing()) std::rethrow_exception(fault_);
}

void MappedRange::grow(std::size_t bytes) {
  const std::size_t before = mapped_;
  try {
    for (; mapped_ < bytes; mapped_ += granule_) driver_->map(address_ + mapped_, granule_);
  } catch (...) {
    unmap_down_to(before);  // never used, so nothing to wait for
    throw;
  }
}

void MappedRange::unmap_down_to(std::size_t bytes) noexcept {
  for (; mapped_ > bytes; mapped_ -= granule_) {
    driver_->unmap(address_ + mapped_ - granule_, granule_);
  }
  usable_ = std::min(usable_.load(), mapped_.load());
}

void MappedRange::start_filling() noexcept {
  if (filling_ || usable_ == mapped_) return;
  try {
    filler_->add(*this);
    filling_ = true;
  } catch (...) {  // no more threads
    const std::lock_guard lock(mutex_);
    fault_ = std::current_exception();
  }
}

void MappedRange::stop_filling() noexcept {
  if (!filling_) return;
  filler_->remove(*this);
  filling_ = false;
  const std::lock_guard lock(mutex_);
  fault_ = nullptr;
}

bool MappedRange::fill_granule() noexcept {
  std::exception_ptr fault;
  try {
    driver_->fill(address_ + usable_, granule_);
  } catch (...) {
    fault = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    fault_ = fault;
    if (!fault) usable_ += granule_;
  }
  progress_.notify_all();
  return !fault && usable_ < mapped_;
}

}  // namespace sparse_kvcm
