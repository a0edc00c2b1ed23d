#include "storage/pool_group.hpp"

#include <algorithm>
#include <limits>

#include "core/address_space.hpp"
#include "core/chunked_registration.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

// Sparse pages come in runs, so that what fetch reads of a request is contiguous.
std::variant<SlotAllocator, PageAllocator> make_allocator(const PoolGroupDesc& desc,
                                                          const std::shared_ptr<Backend>& backend) {
  if (desc.is_sparse) return PageAllocator(0);
  return SlotAllocator(backend, 0);
}

// Between slots, so that a copy of one never crosses two registrations.
std::size_t chunk_bytes(const PoolMemory& memory, std::int64_t slot_bytes) {
  const std::size_t most = memory.driver->most_opened();
  if (memory.size == PoolSize::kChanges || most == 0) return 0;
  return chunk_size(most, static_cast<std::size_t>(slot_bytes), system_page_bytes());
}

}  // namespace

PoolGroup::PoolGroup(const PoolGroupDesc& desc, const std::shared_ptr<Backend>& backend,
                     const PoolMemory& memory)
    : size_(memory.size), allocator_(make_allocator(desc, backend)) {
  const bool fixed = size_ == PoolSize::kFixed;
  const auto unit = fixed ? system_page_bytes() : static_cast<std::size_t>(memory.granule_bytes);
  for (const std::int64_t bytes : desc.slot_bytes) {
    const auto most = static_cast<std::size_t>(bytes * memory.max_slots);
    const std::size_t reserved = round_up(std::max(most, unit), unit);
    pools_.push_back({bytes, std::make_shared<MappedRange>(memory.driver, memory.filler, reserved,
                                                           fixed ? reserved : unit,
                                                           chunk_bytes(memory, bytes))});
  }
}

void PoolGroup::grow(std::int32_t num_slots) {
  for (const Pool& pool : pools_) {
    pool.memory->resize(std::max(pool.memory->mapped_bytes(), bytes_for(pool, num_slots)),
                        used_bytes(pool, std::max(num_slots, num_addressed())));
  }
  goal_ = num_slots;
  refresh();
}

void PoolGroup::shrink(std::int32_t num_slots) {
  goal_ = num_slots;
  set_target(std::min(goal_, num_filled()));
}

bool PoolGroup::has_spare_memory() const {
  return std::ranges::any_of(pools_, [slots = num_addressed()](const Pool& pool) {
    return bytes_for(pool, slots) < pool.memory->mapped_bytes();
  });
}

void PoolGroup::trim() {
  const std::int32_t slots = num_addressed();
  for (const Pool& pool : pools_) {
    const std::size_t bytes = std::min(bytes_for(pool, slots), pool.memory->mapped_bytes());
    const std::size_t used = used_bytes(pool, slots);
    if (bytes < pool.memory->mapped_bytes() || used < pool.memory->used_bytes()) {
      pool.memory->shrink(bytes, used);
    }
  }
}

void PoolGroup::start_filling() noexcept {
  for (const Pool& pool : pools_) pool.memory->start_filling();
}

void PoolGroup::stop_filling() noexcept {
  for (const Pool& pool : pools_) pool.memory->stop_filling();
}

void PoolGroup::wait_usable() const {
  for (const Pool& pool : pools_) pool.memory->wait_usable(pool.memory->mapped_bytes());
}

void PoolGroup::add_unfilled(std::vector<MappedRange*>& ranges) const {
  for (const Pool& pool : pools_) {
    if (!pool.memory->is_filled()) ranges.push_back(pool.memory.get());
  }
}

void PoolGroup::refresh() {
  const std::int32_t target = std::visit([](const auto& a) { return a.target(); }, allocator_);
  if (target != goal_) set_target(std::min(goal_, num_filled()));
}

std::int32_t PoolGroup::num_free() const {
  return std::visit([](const auto& a) { return a.num_free(); }, allocator_);
}

std::int32_t PoolGroup::num_draining() const {
  return std::visit([](const auto& a) { return a.num_draining(); }, allocator_);
}

std::int32_t PoolGroup::num_addressed() const {
  return std::max(goal_, std::visit([](const auto& a) { return a.extent(); }, allocator_));
}

void PoolGroup::set_target(std::int32_t num_slots) {
  std::visit([&](auto& a) { a.set_target(num_slots); }, allocator_);
}

std::int64_t PoolGroup::mapped_bytes() const {
  std::int64_t bytes = 0;
  for (const Pool& pool : pools_) bytes += static_cast<std::int64_t>(pool.memory->mapped_bytes());
  return bytes;
}

const std::shared_ptr<MappedRange>& PoolGroup::pool(std::int32_t index) const {
  return pools_[static_cast<std::size_t>(index)].memory;
}

// At least a granule, as the layout counts.
std::size_t PoolGroup::bytes_for(const Pool& pool, std::int32_t num_slots) {
  const std::size_t granule = pool.memory->granule_bytes();
  const auto bytes = static_cast<std::size_t>(pool.slot_bytes * num_slots);
  return std::max(round_up(bytes, granule), granule);
}

// Whole pages of the system, which the next slots begin behind; a fixed pool has no next ones.
std::size_t PoolGroup::used_bytes(const Pool& pool, std::int32_t num_slots) const {
  const auto bytes = static_cast<std::size_t>(pool.slot_bytes * num_slots);
  return size_ == PoolSize::kFixed ? bytes : round_up(bytes, system_page_bytes());
}

std::int32_t PoolGroup::num_filled() const {
  std::int64_t slots = std::numeric_limits<std::int32_t>::max();
  for (const Pool& pool : pools_) {
    const auto usable = static_cast<std::int64_t>(pool.memory->usable_bytes());
    slots = std::min(slots, usable / pool.slot_bytes);
  }
  return static_cast<std::int32_t>(slots);
}

}  // namespace sparse_kvcm
