#include "backend/filler.hpp"

#include <algorithm>

#include "backend/mapped_range.hpp"

namespace sparse_kvcm {

Filler::~Filler() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Filler::add(MappedRange& range) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    ranges_.push_back(&range);
  }
  changed_.notify_all();
}

void Filler::remove(MappedRange& range) noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return current_ != &range; });
  std::erase(ranges_, &range);
}

void Filler::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !ranges_.empty(); });
    if (stop_) return;
    current_ = ranges_.front();
    ranges_.pop_front();
    lock.unlock();
    const bool more = current_->fill_granule();
    lock.lock();
    if (more) ranges_.push_back(current_);
    current_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace sparse_kvcm
