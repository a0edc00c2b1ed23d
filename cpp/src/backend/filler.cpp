#include "backend/filler.hpp"

#include <unistd.h>

#include <algorithm>
#include <exception>

#include "backend/mapped_range.hpp"
#include "core/host_touch.hpp"

namespace sparse_kvcm {
namespace {

using Report = std::function<void(std::size_t bytes)>;

// Touches the next bytes of every range, at least `share` of each where it has so many, then opens
// them.
void fill_round(std::span<MappedRange* const> ranges, std::size_t share, const Report& touched,
                const Report& opened) {
  std::vector<MemoryPart> parts;
  parts.reserve(ranges.size());
  for (MappedRange* const range : ranges) parts.push_back(range->next_part(share));
  // All ranges of a round have one driver.
  touch_parts(
      parts, [&](std::byte* data, std::size_t bytes) { ranges.front()->touch(data, bytes); },
      touched);
  for (std::size_t i = 0; i < ranges.size(); ++i) ranges[i]->open(parts[i].bytes, opened);
}

}  // namespace

void fill_ranges(std::span<MappedRange* const> ranges,
                 const std::function<void(std::size_t, std::size_t)>& progress) {
  if (ranges.empty()) return;
  std::size_t total = 0;
  for (const MappedRange* const range : ranges) total += range->unfilled_bytes();
  const std::size_t both = ranges.front()->opens_at_once() ? 1 : 2;
  std::size_t opened = 0;
  fill_round(
      ranges, total, [&](std::size_t bytes) { progress(bytes / both, total); },
      [&](std::size_t bytes) {
        opened += bytes;
        if (both == 2) progress((total + opened) / both, total);
      });
}

Filler::Filler(std::size_t round_bytes) : round_bytes_(round_bytes), owner_(getpid()) {}

Filler::~Filler() {
  if (!thread_.joinable()) return;
  if (owner_ != getpid()) {  // a fork has no threads but the one that forked
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Filler::add(MappedRange& range) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    ranges_.push_back(&range);
    paused_ = false;
  }
  changed_.notify_all();
}

void Filler::remove(MappedRange& range) noexcept {
  std::unique_lock lock(mutex_);
  std::erase(ranges_, &range);
  changed_.wait(lock, [&] { return !busy_; });
  std::erase(ranges_, &range);
}

void Filler::pause() noexcept {
  const std::lock_guard lock(mutex_);
  paused_ = true;
}

// A fault of one range is a lack of memory, as a rule, so it ends the filling of all.
void Filler::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || (!paused_ && !ranges_.empty()); });
    if (stop_) return;
    const std::vector<MappedRange*> ranges = ranges_;
    busy_ = true;
    lock.unlock();
    std::exception_ptr fault;
    try {
      fill_round(ranges, round_bytes_ / ranges.size(), {}, [](std::size_t) {});
    } catch (...) {
      fault = std::current_exception();
      for (MappedRange* const range : ranges) range->fail(fault);
    }
    lock.lock();
    busy_ = false;
    std::erase_if(ranges_, [&](const MappedRange* range) {
      return range->is_filled() || (fault && std::ranges::count(ranges, range) > 0);
    });
    changed_.notify_all();
  }
}

}  // namespace sparse_kvcm
