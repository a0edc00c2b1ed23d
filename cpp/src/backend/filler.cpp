#include "backend/filler.hpp"

#include <algorithm>
#include <exception>

#include "backend/mapped_range.hpp"
#include "core/check.hpp"
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

Filler::Filler(std::size_t round_bytes) : round_bytes_(round_bytes) {}

Filler::~Filler() {
  if (!shared_.is_here() || !shared_->thread.joinable()) return;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->changed.notify_all();
  shared_->thread.join();
}

void Filler::add(MappedRange& range) {
  if (!shared_.is_here()) {
    fail_state("Storage", "memory is not filled in a fork of the process that made the storage");
  }
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->thread.joinable()) shared_->thread = std::thread([this] { run(); });
    shared_->ranges.push_back(&range);
    shared_->paused = false;
  }
  shared_->changed.notify_all();
}

void Filler::remove(MappedRange& range) noexcept {
  if (!shared_.is_here()) return;
  std::unique_lock lock(shared_->mutex);
  std::erase(shared_->ranges, &range);
  shared_->changed.wait(lock, [&] { return !shared_->busy; });
  std::erase(shared_->ranges, &range);
}

void Filler::pause() noexcept {
  if (!shared_.is_here()) return;
  const std::lock_guard lock(shared_->mutex);
  shared_->paused = true;
}

// A fault of one range is a lack of memory, as a rule, so it ends the filling of all.
void Filler::run() {
  Shared& shared = *shared_;
  std::unique_lock lock(shared.mutex);
  while (true) {
    shared.changed.wait(lock,
                        [&] { return shared.stop || (!shared.paused && !shared.ranges.empty()); });
    if (shared.stop) return;
    const std::vector<MappedRange*> ranges = shared.ranges;
    shared.busy = true;
    lock.unlock();
    std::exception_ptr fault;
    try {
      fill_round(ranges, round_bytes_ / ranges.size(), {}, [](std::size_t) {});
    } catch (...) {
      fault = std::current_exception();
      for (MappedRange* const range : ranges) range->fail(fault);
    }
    lock.lock();
    shared.busy = false;
    std::erase_if(shared.ranges, [&](const MappedRange* range) {
      return range->is_filled() || (fault && std::ranges::count(ranges, range) > 0);
    });
    shared.changed.notify_all();
  }
}

}  // namespace sparse_kvcm
