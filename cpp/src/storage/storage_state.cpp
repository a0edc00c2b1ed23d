#include "storage/storage_state.hpp"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

// Touching and pinning memory is work of the kernel that scales over ranges; half the machine is
// left to whoever starts beside us.
std::size_t num_filling_threads() {
  constexpr std::size_t kMost = 32;
  return std::clamp<std::size_t>(std::thread::hardware_concurrency() / 2, 1, kMost);
}

}  // namespace

StorageState::StorageState(const StorageConfig& config, std::shared_ptr<Backend> chosen_backend)
    : layout(config), backend(std::move(chosen_backend)), counters(layout.layer_groups().size()) {
  make_pool_groups();
  for (std::int32_t level = 0; level < layout.num_levels(); ++level) {
    resize(level, layout.config().cache_tiers[static_cast<std::size_t>(level)].quota);
  }
}

void StorageState::make_pool_groups() {
  for (std::int32_t level = 0; level < layout.num_levels(); ++level) {
    const CacheTierConfig& tier = layout.config().cache_tiers[static_cast<std::size_t>(level)];
    const std::int64_t least = layout.effective_quota(level, tier.quota);
    quotas.push_back(0);
    max_quotas_.push_back(std::max(least, round_up(tier.max_quota, layout.granule_bytes(level))));
  }
  const std::vector<std::shared_ptr<MemoryDriver>> drivers{
      backend->memory_driver(MemoryKind::kDevice), backend->memory_driver(MemoryKind::kPinned)};
  const auto filler = std::make_shared<Filler>(num_filling_threads());
  for (const PoolGroupDesc& group : layout.pool_groups()) {
    const auto level = static_cast<std::size_t>(group.level);
    pool_groups.emplace_back(group, backend, drivers[level], filler,
                             layout.granule_bytes(group.level), max_quotas_[level]);
  }
}

void StorageState::check_level(const char* function, std::int32_t level) const {
  if (level < 0 || level >= layout.num_levels()) {
    fail_argument(function, "level must be in [0, ", layout.num_levels(), "), got ", level);
  }
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
  check_indices(slots);

  stop_filling();
  std::vector<std::pair<PoolGroup*, std::int32_t>> grown;
  try {
    for (std::size_t g = 0; g < pool_groups.size(); ++g) {
      const auto wanted = static_cast<std::int32_t>(slots[g]);
      const std::int32_t had = pool_groups[g].num_slots();
      if (layout.pool_groups()[g].level != level || wanted <= had) continue;
      pool_groups[g].grow(wanted);
      grown.emplace_back(&pool_groups[g], had);
    }
  } catch (...) {
    for (const auto& [group, had] : grown) group->shrink(had);
    trim();
    throw;
  }
  for (std::size_t g = 0; g < pool_groups.size(); ++g) {
    if (layout.pool_groups()[g].level != level) continue;
    pool_groups[g].shrink(static_cast<std::int32_t>(slots[g]));
  }
  quotas[static_cast<std::size_t>(level)] = effective;
  trim();
}

void StorageState::trim() {
  stop_filling();
  try {
    for (PoolGroup& group : pool_groups) group.trim();
  } catch (...) {
    start_filling();
    throw;
  }
  start_filling();
}

void StorageState::stop_filling() noexcept {
  for (PoolGroup& group : pool_groups) group.stop_filling();
}

void StorageState::start_filling() noexcept {
  for (PoolGroup& group : pool_groups) group.start_filling();
}

void StorageState::wait_usable(std::int32_t level) {
  check_level("Storage.wait_usable", level);
  for (std::size_t g = 0; g < pool_groups.size(); ++g) {
    if (layout.pool_groups()[g].level != level) continue;
    pool_groups[g].wait_usable();
    pool_groups[g].refresh();
  }
}

PoolGroupStatistics StorageState::statistics(std::int32_t pool_group) {
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
