#include "storage/slot_allocator.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace sparse_kvcm {

SlotAllocator::SlotAllocator(std::shared_ptr<Backend> backend, std::int32_t num_slots)
    : backend_(std::move(backend)) {
  set_target(num_slots);
}

bool SlotAllocator::allocate(std::int32_t count, std::vector<Slot>& slots) {
  if (count > num_free()) return false;
  slots.reserve(slots.size() + static_cast<std::size_t>(std::max(count, 0)));
  for (std::int32_t i = 0; i < count; ++i) slots.push_back(take());
  return true;
}

Slot SlotAllocator::take() {
  const bool fresh = num_touched_ < target_;
  const bool returned = !returned_.empty() && (!fresh || is_over(returned_.front().ready));
  Slot slot;
  if (returned) {
    slot = std::move(returned_.front());
    returned_.pop_front();
  } else {
    slot.id = num_touched_++;
  }
  in_use_[static_cast<std::size_t>(slot.id)] = true;
  return slot;
}

// Slots that came back together have one event, so the device is asked once.
bool SlotAllocator::is_over(const EventPtr& use) {
  if (!use || use == last_over_) return true;
  if (!backend_->is_done(*use)) return false;
  last_over_ = use;
  return true;
}

void SlotAllocator::release(Slot slot) {
  const bool known = slot.id >= 0 && std::cmp_less(slot.id, in_use_.size());
  if (!known || !in_use_[static_cast<std::size_t>(slot.id)]) {
    fail_state("SlotAllocator.release", "slot ", slot.id, " is not in use");
  }
  in_use_[static_cast<std::size_t>(slot.id)] = false;
  if (slot.id < target_) {
    returned_.push_back(std::move(slot));
  } else {
    --num_draining_;
    overflow_.push_back(std::move(slot));
  }
}

void SlotAllocator::set_target(std::int32_t num_slots) {
  const auto old_target = static_cast<std::size_t>(target_);
  target_ = num_slots;
  const auto target = static_cast<std::size_t>(target_);
  if (in_use_.size() < target) in_use_.resize(target);
  if (target < old_target) {
    const auto beyond = std::stable_partition(returned_.begin(), returned_.end(),
                                              [&](const Slot& slot) { return slot.id < target_; });
    overflow_.insert(overflow_.end(), beyond, returned_.end());
    returned_.erase(beyond, returned_.end());
  } else {
    const auto beyond = std::stable_partition(overflow_.begin(), overflow_.end(),
                                              [&](const Slot& slot) { return slot.id < target_; });
    returned_.insert(returned_.end(), overflow_.begin(), beyond);
    overflow_.erase(overflow_.begin(), beyond);
  }
  num_draining_ = static_cast<std::int32_t>(
      std::count(in_use_.begin() + static_cast<std::ptrdiff_t>(target), in_use_.end(), true));
}

std::int32_t SlotAllocator::num_free() const {
  return static_cast<std::int32_t>(returned_.size()) + std::max(0, target_ - num_touched_);
}

std::int32_t SlotAllocator::extent() const {
  auto extent = static_cast<std::int32_t>(in_use_.size());
  while (extent > target_ && !in_use_[static_cast<std::size_t>(extent) - 1]) --extent;
  return extent;
}

}  // namespace sparse_kvcm
