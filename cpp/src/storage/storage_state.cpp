#include "storage/storage_state.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <utility>

#include "core/check.hpp"
#include "core/host_limits.hpp"
#include "core/rounding.hpp"
#include "storage/granule.hpp"

namespace sparse_kvcm {

// Sentences that may come from any thread, and outlive the storage in a driver.
class StorageState::Warnings {
 public:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (std::ranges::count(texts_, text) == 0) texts_.push_back(text);
  }
  std::vector<std::string> get() {
    const std::lock_guard lock(mutex_);
    return texts_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

StorageState::StorageState(const StorageConfig& config, std::shared_ptr<Backend> chosen_backend,
                           const StorageOptions& options)
    : layout(config),
      backend(std::move(chosen_backend)),
      counters(layout.layer_groups().size()),
      owner_(options.owner),
      warnings_(std::make_shared<Warnings>()),
      filler_(std::make_shared<Filler>()),
      in_background_(options.fill == StorageFill::kInBackground) {
  make_pool_groups();
  for (std::int32_t level = 0; level < layout.num_levels(); ++level) {
    resize(level, layout.config().cache_tiers[static_cast<std::size_t>(level)].quota);
  }
  if (!in_background_) fill_at_once(options.progress);
  in_background_ = true;
}

void StorageState::make_pool_groups() {
  for (std::int32_t level = 0; level < layout.num_levels(); ++level) {
    const CacheTierConfig& tier = layout.config().cache_tiers[static_cast<std::size_t>(level)];
    const std::int64_t least = layout.effective_quota(level, tier.quota);
    check_memory(level, layout.slots_for_quota(level, least));  // by name, before addresses run out
    quotas.push_back(0);
    max_quotas_.push_back(std::max(least, round_up(tier.max_quota, layout.granule_bytes(level))));
  }
  const auto warn = [warnings = warnings_](const std::string& text) { warnings->add(text); };
  std::array<std::shared_ptr<MemoryDriver>, 2> drivers;
  for (std::size_t g = 0; g < layout.pool_groups().size(); ++g) {
    const PoolGroupDesc& group = layout.pool_groups()[g];
    const auto level = static_cast<std::size_t>(group.level);
    // A GPU maps whole granules only.
    const bool fixed = owner_ != nullptr && group.level != kGpuLevel;
    if (!drivers[level]) {
      drivers[level] = backend->memory_driver(
          group.level == kGpuLevel ? MemoryKind::kDevice : MemoryKind::kPinned, warn);
    }
    // Addresses for the case that the group gets all of the tier.
    const std::int64_t granule = layout.granule_bytes(group.level);
    PoolMemory memory{drivers[level], filler_, granule,
                      slots_for(group.slot_bytes, max_quotas_[level] / granule, granule)};
    if (fixed) {
      memory.size = PoolSize::kFixed;
      memory.max_slots =
          layout.slots_for_quota(group.level, layout.config().cache_tiers[level].quota)[g];
    }
    pool_groups.emplace_back(group, backend, memory);
  }
}

void StorageState::fill_at_once(const FillProgress& progress) {
  std::vector<MappedRange*> ranges;
  for (const PoolGroup& group : pool_groups) group.add_unfilled(ranges);
  fill_ranges(ranges, [&](std::size_t done, std::size_t total) {
    if (progress) progress(static_cast<std::int64_t>(done), static_cast<std::int64_t>(total));
  });
  for (PoolGroup& group : pool_groups) group.refresh();
}

void StorageState::check_level(const char* function, std::int32_t level) const {
  if (level < 0 || level >= layout.num_levels()) {
    fail_argument(function, "level must be in [0, ", layout.num_levels(), "), got ", level);
  }
}

void StorageState::check_free(const char* function) const {
  if (owner_ == nullptr) return;
  fail_state(function, "the storage belongs to a ", owner_, ", which alone changes it");
}

std::vector<std::string> StorageState::warnings() const { return warnings_->get(); }

// What host pools are to grow by, before any of it is touched.
void StorageState::check_memory(std::int32_t level, const std::vector<std::int64_t>& slots) const {
  if (level == kGpuLevel) return;
  std::size_t bytes = 0;
  for (std::size_t g = 0; g < slots.size(); ++g) {
    const PoolGroupDesc& group = layout.pool_groups()[g];
    const std::int32_t had = pool_groups.empty() ? 0 : pool_groups[g].num_slots();
    const std::int64_t more = slots[g] - had;
    if (group.level != level || more <= 0) continue;
    for (const std::int64_t slot_bytes : group.slot_bytes) {
      bytes += static_cast<std::size_t>(slot_bytes * more);
    }
  }
  check_host_memory(owner_ == nullptr ? "Storage" : owner_, bytes);
}

// Kernels take page indices of 32 bits.
void StorageState::check_indices(const std::vector<std::int64_t>& slots) const {
  for (const BufferId& id : layout.all_buffer_ids()) {
    const BufferPlace& place = layout.place(id.layer_id, id.role);
    const std::int64_t pages_per_slot =
        std::int64_t{place.converter.scale} * place.converter.expansion;
    const std::int64_t most = std::numeric_limits<std::int32_t>::max() / pages_per_slot;
    const std::int64_t wanted = slots[static_cast<std::size_t>(place.pool_group)];
    if (!place.is_sparse && wanted > most) {
      fail_argument("Storage", "the pool of layer ", id.layer_id, "'s \"", id.role, "\" may have ",
                    most, " slots, so that its page indices fit 32 bits; the quota gives ", wanted);
    }
  }
}

// What grows comes first: it can fail, and then is undone. Lowering the rest cannot.
void StorageState::resize(std::int32_t level, std::int64_t quota) {
  constexpr const char* kFunction = "Storage.resize";
  check_level(kFunction, level);
  const std::int64_t most = max_quotas_[static_cast<std::size_t>(level)];
  if (quota < 1 || quota > most) {
    fail_argument(kFunction, "quota must be in [1, ", most, "], the tier's max_quota, got ", quota);
  }
  const std::int64_t effective = layout.effective_quota(level, quota);
  const std::vector<std::int64_t> slots = layout.slots_for_quota(level, effective);
  if (level == kGpuLevel && std::ranges::max(slots) > 0) check_indices(slots);
  check_memory(level, slots);

  stop_filling();
  try {
    grow(level, slots);
  } catch (...) {
    trim_if_possible();
    throw;
  }
  for (std::size_t g = 0; g < pool_groups.size(); ++g) {
    if (layout.pool_groups()[g].level != level) continue;
    pool_groups[g].shrink(static_cast<std::int32_t>(slots[g]));
  }
  quotas[static_cast<std::size_t>(level)] = effective;
  trim_if_possible();
}

// Gives pool groups that are to have more slots as many, or none of them any.
void StorageState::grow(std::int32_t level, const std::vector<std::int64_t>& slots) {
  std::vector<std::int32_t> before;
  before.reserve(pool_groups.size());
  try {
    for (std::size_t g = 0; g < pool_groups.size(); ++g) {
      const auto wanted = static_cast<std::int32_t>(slots[g]);
      before.push_back(pool_groups[g].num_slots());
      const bool grows = layout.pool_groups()[g].level == level && wanted > before.back();
      if (grows) pool_groups[g].grow(wanted);
    }
  } catch (...) {
    for (std::size_t g = 0; g < before.size(); ++g) pool_groups[g].shrink(before[g]);
    throw;
  }
}

// The device is waited for before the first change.
void StorageState::trim() {
  settle();
  for (const PoolGroup& group : pool_groups) {
    if (group.has_spare_memory()) group.synchronize();
  }
  stop_filling();
  for (PoolGroup& group : pool_groups) group.trim();
  start_filling();
}

// What the device does not let go now goes with the next trim.
void StorageState::trim_if_possible() noexcept {
  try {
    trim();
  } catch (...) {
    start_filling();
  }
}

void StorageState::stop_filling() noexcept {
  filler_->pause();
  for (PoolGroup& group : pool_groups) group.stop_filling();
}

void StorageState::start_filling() noexcept {
  if (!in_background_) return;
  for (PoolGroup& group : pool_groups) group.start_filling();
}

// Looks at nothing that another call may change; whoever asks for slots sees what was filled.
void StorageState::wait_usable(std::int32_t level) const {
  check_level("Storage.wait_usable", level);
  for (std::size_t g = 0; g < pool_groups.size(); ++g) {
    if (layout.pool_groups()[g].level == level) pool_groups[g].wait_usable();
  }
}

void StorageState::count(std::int32_t layer_group, const LayerGroupStatistics& more) {
  if (!layout.config().enable_stats) return;
  counters[static_cast<std::size_t>(layer_group)] += more;
}

// NOLINTNEXTLINE(bugprone-exception-escape): only a slot that is not in use is refused.
void StorageState::give_back(Stream stream, std::vector<SlotOfGroup> slots) noexcept {
  if (slots.empty()) return;
  unsettled_.push_back({stream, std::move(slots)});
  settle();
}

void StorageState::settle() {
  std::erase_if(unsettled_, [&](const Return& given) { return try_release(given); });
}

// In a capture an event would stand for a point in the graph, which no later call can ask about.
bool StorageState::try_release(const Return& given) {
  EventPtr ready;
  try {
    if (backend->is_capturing(given.stream)) return false;
    ready = backend->record(given.stream);
  } catch (...) {
    return false;
  }
  for (const auto& [group, slot, is_cold] : given.slots) {
    (is_cold ? cold_home(group) : home(group)).slots().release({slot, ready});
  }
  return true;
}

PoolGroupStatistics StorageState::statistics(std::int32_t pool_group) {
  settle();
  PoolGroup& group = pool_groups[static_cast<std::size_t>(pool_group)];
  group.refresh();
  PoolGroupStatistics result;
  result.pool_group = pool_group;
  result.slot_bytes = layout.pool_groups()[static_cast<std::size_t>(pool_group)].slot_bytes;
  result.draining = group.num_draining();
  result.total = std::int64_t{group.num_slots()} + result.draining;
  result.free = group.num_free();
  result.available = result.free + result.evictable;
  result.unavailable = result.total - result.available;
  return result;
}

}  // namespace sparse_kvcm
