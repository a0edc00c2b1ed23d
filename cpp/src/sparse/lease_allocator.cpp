#include "sparse/lease_allocator.hpp"

#include <algorithm>
#include <iterator>

namespace sparse_kvcm {

LeaseAllocator::LeaseAllocator(std::int32_t num_slots, std::int32_t max_leases)
    : max_leases_(max_leases) {
  if (num_slots > 0) free_runs_.emplace(0, num_slots);
}

std::optional<Lease> LeaseAllocator::acquire(std::int32_t cached_slots, std::int32_t window_slots) {
  const std::int32_t size = cached_slots + window_slots;
  const auto run = std::find_if(free_runs_.begin(), free_runs_.end(),
                                [size](const auto& r) { return r.second >= size; });
  if (run == free_runs_.end() || num_free_ids() == 0) return std::nullopt;
  const auto [first, slots] = *run;
  free_runs_.erase(run);
  if (slots > size) free_runs_.emplace(first + size, slots - size);
  std::int32_t id = next_id_;
  if (free_ids_.empty()) {
    ++next_id_;
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  return Lease{id, first, cached_slots, window_slots, next_generation_++};
}

void LeaseAllocator::release(const Lease& lease) {
  std::int32_t first = lease.base;
  std::int32_t size = lease.num_slots();
  const auto next = free_runs_.lower_bound(first);
  if (next != free_runs_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == first) {
      first = before->first;
      size += before->second;
      free_runs_.erase(before);
    }
  }
  if (next != free_runs_.end() && first + size == next->first) {
    size += next->second;
    free_runs_.erase(next);
  }
  free_runs_.emplace(first, size);
  free_ids_.push_back(lease.id);
}

std::int64_t LeaseAllocator::num_free_slots() const {
  std::int64_t slots = 0;
  for (const auto& run : free_runs_) slots += run.second;
  return slots;
}

std::int64_t LeaseAllocator::largest_free_run() const {
  std::int64_t largest = 0;
  for (const auto& run : free_runs_) largest = std::max<std::int64_t>(largest, run.second);
  return largest;
}

}  // namespace sparse_kvcm
