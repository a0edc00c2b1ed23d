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
  for (std::thread& thread : threads_) thread.join();
}

void Filler::add(MappedRange& range) {
  {
    const std::lock_guard lock(mutex_);
    add_thread();
    ranges_.push_back(&range);
  }
  changed_.notify_all();
}

void Filler::add_thread() {
  if (threads_.size() == num_threads_) return;
  try {
    threads_.emplace_back([this] { run(); });
  } catch (...) {
    if (threads_.empty()) throw;  // else there are fewer
  }
}

void Filler::remove(MappedRange& range) noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return std::ranges::count(current_, &range) == 0; });
  std::erase(ranges_, &range);
}

void Filler::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !ranges_.empty(); });
    if (stop_) return;
    MappedRange* const range = ranges_.front();
    ranges_.pop_front();
    current_.push_back(range);
    lock.unlock();
    const bool more = range->fill_granule();
    lock.lock();
    std::erase(current_, range);
    if (more) ranges_.push_back(range);
    changed_.notify_all();
  }
}

}  // namespace sparse_kvcm
