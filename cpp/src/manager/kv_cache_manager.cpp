#include "sparse_kvcm/kv_cache_manager.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/address_space.hpp"
#include "core/check.hpp"
#include "core/rounding.hpp"
#include "manager/batch_state.hpp"
#include "manager/manager_state.hpp"
#include "manager/request.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {
namespace {

const KvCacheManagerConfig& checked(const KvCacheManagerConfig& config) {
  check(config);
  return config;
}

// Index of `layer` in ManagerState::layers.
std::size_t find_layer(const ManagerState& state, const char* function, std::int32_t layer) {
  const auto found = std::find(state.layers.begin(), state.layers.end(), layer);
  if (found == state.layers.end()) {
    fail_argument(function, "layer must be one of the config's member layers, got ", layer);
  }
  return static_cast<std::size_t>(found - state.layers.begin());
}

MemoryView view_of(const BufferPtr& buffer, std::vector<std::int64_t> shape) {
  return {buffer->data(), buffer->device_data(), std::move(shape), buffer};
}

std::int32_t largest_top_k(const KvCacheManagerConfig& config) {
  std::int32_t top_k = 0;
  for (const SelectionGroupConfig& group : config.groups) top_k = std::max(top_k, group.top_k);
  return top_k;
}

void check_options(const ManagerState& state, const KvCacheOptions& options) {
  const char* function = "KvCacheManager.create_kv_cache";
  // Its tokens are counted with 32 bits, too.
  const std::int32_t most =
      std::min(kMaxUnits, std::numeric_limits<std::int32_t>::max() / state.config.tokens_per_unit);
  if (options.need < 1 || options.need > most) {
    fail_argument(function, "need must be in [1, ", most, "] units, got ", options.need);
  }
  if (state.is_resident() && options.cached_slots != -1) {
    fail_argument(function, "cached_slots must be -1 in a manager without groups, got ",
                  options.cached_slots);
  }
  const std::int32_t page = state.config.units_per_page();
  const std::int32_t low = largest_top_k(state.config);
  const std::int32_t cached = options.cached_slots;
  if (cached < -1 || cached > kMaxCachedSlots || (cached != -1 && cached % page != 0)) {
    fail_argument(function, "cached_slots must be a multiple of the page's units ", page,
                  " in [0, ", kMaxCachedSlots, "], or -1 for the manager's, got ", cached);
  }
  const LeaseShape shape = state.lease_shape(options);
  const std::int64_t lease = std::int64_t{shape.cached_slots} + shape.window_slots;
  if (options.need > lease && shape.cached_slots < low) {
    fail_argument(function, "cached_slots must be >= the largest top_k ", low, " for a need of ",
                  options.need, " units, which does not fit the lease as a whole, got ", cached);
  }
  if (lease > state.arena.num_slots()) {
    fail_argument(function, "the lease takes ", lease, " slots, more than the arena's ",
                  state.arena.num_slots(), "; raise arena_pages or lower need or cached_slots");
  }
}

// Pools of dense layers, as StorageState makes them: on the GPU in granules, on the host in pages
// of the system.
void plan_pools(const KvCacheManagerConfig& config, MemoryUse& use) {
  const StorageLayout layout(storage_config(config));
  const std::int64_t page = static_cast<std::int64_t>(system_page_bytes());
  for (std::int32_t level = 0; level < layout.num_levels(); ++level) {
    const std::int64_t quota = layout.config().cache_tiers[static_cast<std::size_t>(level)].quota;
    const std::vector<std::int64_t> slots = layout.slots_for_quota(level, quota);
    for (std::size_t g = 0; g < slots.size(); ++g) {
      const PoolGroupDesc& group = layout.pool_groups()[g];
      if (group.level != level || group.is_sparse) continue;
      if (group.is_cold) {
        use.cold_bytes += round_up(std::max(group.slot_bytes.front() * slots[g], page), page);
      } else {
        use.dense_bytes += layout.get_num_bytes(static_cast<std::int32_t>(g), slots[g]);
      }
    }
  }
}

}  // namespace

MemoryUse planned_memory(const KvCacheManagerConfig& config) {
  check(config);
  MemoryUse use;
  use.host_bytes = history_bytes(config);
  for (const SelectionGroupConfig& group : config.groups) {
    for (std::size_t member = 0; member < group.layers.size(); ++member) {
      use.arena_bytes = capped_sum(use.arena_bytes, Arena::member_bytes(config, group));
    }
    use.metadata_bytes += Arena::entries_bytes(config) + Arena::last_bytes(config);
  }
  if (!config.dense_layers.empty()) plan_pools(config, use);
  return use;
}

KvCacheManager::KvCacheManager(const KvCacheManagerConfig& config,
                               const KvCacheManagerOptions& options)
    : state_(std::make_shared<ManagerState>(checked(config), backend_for(config.device), options)) {
}
KvCacheManager::KvCacheManager(std::shared_ptr<ManagerState> state) : state_(std::move(state)) {}
KvCacheManager::~KvCacheManager() = default;

std::shared_ptr<KvCache> KvCacheManager::create_kv_cache(const KvCacheOptions& options) {
  const auto held = state_->lock_for("KvCacheManager.create_kv_cache");
  check_options(*state_, options);
  return std::make_shared<KvCache>(std::make_shared<Request>(state_, options));
}

std::shared_ptr<Batch> KvCacheManager::create_batch(const BatchOptions& options) {
  const auto held = state_->lock_for("KvCacheManager.create_batch");
  check("KvCacheManager.create_batch", state_->config, options);
  return std::make_shared<Batch>(std::make_shared<BatchState>(state_, options));
}

const KvCacheManagerConfig& KvCacheManager::config() const { return state_->config; }
std::int32_t KvCacheManager::num_groups() const { return state_->num_groups(); }
const std::vector<std::int32_t>& KvCacheManager::layers() const { return state_->layers; }
std::int32_t KvCacheManager::trash_slot() const { return state_->arena.num_slots(); }

std::int32_t KvCacheManager::group_of(std::int32_t layer) const {
  return state_->layer_groups[find_layer(*state_, "KvCacheManager.group_of", layer)];
}

MemoryView KvCacheManager::arena(std::int32_t layer) const {
  const std::size_t index = find_layer(*state_, "KvCacheManager.arena", layer);
  const std::int32_t group = state_->layer_groups[index];
  const auto first = std::find(state_->layer_groups.begin(), state_->layer_groups.end(), group);
  const auto member = static_cast<std::int32_t>(index) -
                      static_cast<std::int32_t>(first - state_->layer_groups.begin());
  const UnitLayout& layout = config().groups[static_cast<std::size_t>(group)].layout;
  return view_of(state_->arena.memory(group, member),
                 {config().arena_pages + 1, layout.page_bytes(config().units_per_page())});
}

MemoryView KvCacheManager::host_history(std::int32_t group) const {
  state_->check_group("KvCacheManager.host_history", group);
  return state_->history.pool(group);
}

std::vector<std::string> KvCacheManager::warnings() const { return state_->storage->warnings(); }

std::shared_ptr<const Storage> KvCacheManager::storage() const { return state_->storage; }

MemoryUse KvCacheManager::memory_use() const {
  MemoryUse use;
  use.host_bytes = state_->history.bytes();
  for (std::int32_t group = 0; group < num_groups(); ++group) {
    const auto members =
        static_cast<std::int32_t>(config().groups[static_cast<std::size_t>(group)].layers.size());
    for (std::int32_t member = 0; member < members; ++member) {
      use.arena_bytes += static_cast<std::int64_t>(state_->arena.memory(group, member)->bytes());
    }
    use.metadata_bytes += state_->arena.metadata_bytes(group);
  }
  const std::vector<PoolGroupDesc>& descs = state_->storage->layout().pool_groups();
  for (std::size_t g = 0; g < descs.size(); ++g) {
    if (descs[g].is_sparse) continue;
    (descs[g].is_cold ? use.cold_bytes : use.dense_bytes) +=
        state_->storage->state()->pool_groups[g].mapped_bytes();
  }
  return use;
}

Occupancy KvCacheManager::occupancy() const {
  const auto held = state_->lock();
  const LeaseAllocator& leases = state_->arena.leases();
  return {state_->history.num_free_pages(), leases.num_free_slots(), leases.largest_free_run(),
          leases.num_free_ids()};
}

std::vector<PoolGroupUse> KvCacheManager::pool_group_use() const {
  const auto held = state_->lock();
  std::vector<PoolGroupUse> all;
  const std::vector<PoolGroupDesc>& descs = state_->storage->layout().pool_groups();
  for (std::size_t g = 0; g < descs.size(); ++g) {
    PoolGroupUse use{state_->storage->state()->statistics(static_cast<std::int32_t>(g)),
                     descs[g].level, 0};
    const auto total = static_cast<double>(std::max<std::int64_t>(use.slots.total, 1));
    use.utilization = static_cast<double>(use.slots.unavailable) / total;
    all.push_back(std::move(use));
  }
  return all;
}

CopyStatistics KvCacheManager::get_and_reset_copy_statistics() {
  const auto held = state_->lock();
  return std::exchange(state_->copies, {});
}

std::string KvCacheManager::poison_reason() const {
  const auto held = state_->lock();
  return state_->poison;
}

}  // namespace sparse_kvcm
