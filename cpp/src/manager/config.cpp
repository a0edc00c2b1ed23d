#include "sparse_kvcm/config.hpp"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "sparse_kvcm/storage_layout.hpp"
#include "storage/config_check.hpp"
#include "storage/granule.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "KvCacheManagerConfig";

void check_multiple(const char* field, std::int32_t value, std::int32_t page) {
  if (value % page != 0) {
    fail_argument(kFunction, field, " must be a multiple of the page's units ", page, ", got ",
                  value);
  }
}

void check_groups(const KvCacheManagerConfig& config) {
  std::set<std::int32_t> layers;
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const SelectionGroupConfig& group = config.groups[g];
    if (group.layers.empty()) fail_argument(kFunction, "groups[", g, "].layers must not be empty");
    for (const std::int32_t layer : group.layers) {
      if (layer < 0) {
        fail_argument(kFunction, "groups[", g, "].layers must be >= 0, got ", layer);
      }
      if (!layers.insert(layer).second) {
        fail_argument(kFunction, "layer ", layer, " of groups[", g, "] is named twice");
      }
    }
    if (group.top_k < 1 || group.top_k > config.cached_slots) {
      fail_argument(kFunction, "groups[", g, "].top_k must be in [1, cached_slots ",
                    config.cached_slots, "], got ", group.top_k);
    }
    const std::size_t regions = group.layout.region_bytes().size();
    if (!group.roles.empty() && group.roles.size() != regions) {
      fail_argument(kFunction, "groups[", g, "].roles must name each of the ", regions,
                    " regions of its layout, or none, got ", group.roles.size());
    }
    const HostRowLayout row =
        pack_host_row(group.layout, static_cast<std::int32_t>(group.layers.size()));
    const std::int64_t page_bytes = row.unit_bytes * config.units_per_page();
    check_range<std::int64_t>(kFunction, "host_pages", config.host_pages, 1,
                              std::numeric_limits<std::int64_t>::max() / page_bytes);
  }
}

// Sizes of what it does not have are mistakes: somebody thinks that it offloads.
void check_resident(const KvCacheManagerConfig& config) {
  if (config.dense_layers.empty()) {
    fail_argument(kFunction, "groups must not be empty without dense_layers, got neither");
  }
  const std::pair<const char*, std::int64_t> sizes[] = {{"cached_slots", config.cached_slots},
                                                        {"window_slots", config.window_slots},
                                                        {"arena_pages", config.arena_pages},
                                                        {"host_pages", config.host_pages},
                                                        {"max_leases", config.max_leases}};
  for (const auto& [field, value] : sizes) {
    if (value == 0) continue;
    fail_argument(kFunction, field, " must be 0 without groups, whose history it would size, got ",
                  value);
  }
  check_range<std::int64_t>(kFunction, "max_new_units", config.max_new_units, 1, kMaxUnits);
}

// What check(StorageConfig) does not know by these names.
void check_dense(const KvCacheManagerConfig& config) {
  const bool any = !config.dense_layers.empty();
  check_range<std::int64_t>(kFunction, "gpu_quota", config.gpu_quota, any ? 1 : 0,
                            any ? kMaxTierBytes : 0);
  check_range<std::int64_t>(kFunction, "cold_quota", config.cold_quota, 0, any ? kMaxTierBytes : 0);
  for (std::size_t i = 0; i < config.dense_layers.size(); ++i) {
    const LayerConfig& layer = config.dense_layers[i];
    for (const BufferConfig& buffer : layer.buffers) {
      if (!buffer.is_sparse) continue;
      fail_argument(kFunction, "dense_layers[", i, "] must have no sparse buffer, got \"",
                    buffer.role, "\"; sparse layers are members of groups");
    }
    for (const SelectionGroupConfig& group : config.groups) {
      if (std::ranges::count(group.layers, layer.layer_id) == 0) continue;
      fail_argument(kFunction, "dense_layers[", i,
                    "].layer_id must not be that of a member layer, "
                    "got ",
                    layer.layer_id);
    }
  }
}

// Bytes of a slot in each cold pool.
std::vector<std::int64_t> cold_slot_bytes(const StorageConfig& storage) {
  const StorageLayout layout(storage);
  std::vector<std::int64_t> bytes;
  for (const PoolGroupDesc& group : layout.pool_groups()) {
    if (group.is_cold) bytes.push_back(group.slot_bytes.front());
  }
  return bytes;
}

// What each member layer keeps per page.
std::vector<BufferConfig> member_buffers(const SelectionGroupConfig& group, std::int32_t units) {
  if (group.roles.empty()) return {{"KEY", group.layout.page_bytes(units), {}, true}};
  std::vector<BufferConfig> buffers;
  for (std::size_t r = 0; r < group.roles.size(); ++r) {
    const std::int64_t bytes = std::int64_t{group.layout.region_bytes()[r]} * units;
    buffers.push_back({group.roles[r], bytes, {}, true});
  }
  return buffers;
}

// The storage's layers and options, with quotas that are still to be found.
StorageConfig layers_and_options(const KvCacheManagerConfig& config) {
  StorageConfig storage;
  storage.device = config.device;
  storage.tokens_per_block = config.tokens_per_block;
  storage.tokens_per_unit = config.tokens_per_unit;
  storage.selection_groups = config.groups;
  for (const SelectionGroupConfig& group : config.groups) {
    const std::vector<BufferConfig> buffers = member_buffers(group, config.units_per_page());
    for (const std::int32_t layer : group.layers)
      storage.layers.push_back({layer, buffers, {}, {}});
  }
  storage.layers.insert(storage.layers.end(), config.dense_layers.begin(),
                        config.dense_layers.end());
  storage.max_util_for_resume = config.max_util_for_resume;
  storage.constraints = config.constraints;
  storage.typical_step = config.typical_step;
  storage.initial_pool_ratio = config.initial_pool_ratio;
  storage.swa_scratch_reuse = config.swa_scratch_reuse;
  storage.enable_stats = config.enable_stats;
  storage.cache_tiers = {{CacheTier::kGpuMem, std::max<std::int64_t>(config.gpu_quota, 1), 0}};
  if (!config.is_resident()) storage.max_host_pages = static_cast<std::int32_t>(config.host_pages);
  if (!config.is_resident() || config.cold_quota > 0) {
    storage.cache_tiers.push_back({CacheTier::kHostMem, 1, 0});
  }
  return storage;
}

// Of a manager with groups.
void check_sparse(const KvCacheManagerConfig& config) {
  const std::int32_t page = config.units_per_page();
  if (page > kMaxCachedSlots) {
    fail_argument(kFunction, "tokens_per_block / tokens_per_unit must be <= ", kMaxCachedSlots,
                  ", the most cached slots, got ", page);
  }
  check_range<std::int64_t>(kFunction, "cached_slots", config.cached_slots, page, kMaxCachedSlots);
  check_multiple("cached_slots", config.cached_slots, page);
  check_range<std::int64_t>(kFunction, "window_slots", config.window_slots, page, kMaxUnits);
  check_multiple("window_slots", config.window_slots, page);
  check_range<std::int64_t>(kFunction, "max_new_units", config.max_new_units, 1,
                            config.window_slots);
  // The trash page needs slot numbers too.
  check_range<std::int64_t>(kFunction, "arena_pages", config.arena_pages, 1,
                            kMaxArenaSlots / page - 1);
  check_range<std::int64_t>(kFunction, "host_pages", config.host_pages, 1, kMaxHostPages);
  check_range<std::int64_t>(kFunction, "max_leases", config.max_leases, 1,
                            std::numeric_limits<std::int32_t>::max());
  check_groups(config);
}

}  // namespace

void check(const KvCacheManagerConfig& config) {
  check_page(kFunction, config.tokens_per_block, config.tokens_per_unit);
  config.is_resident() ? check_resident(config) : check_sparse(config);
  check_dense(config);
  check(layers_and_options(config));
}

StorageConfig storage_config(const KvCacheManagerConfig& config) {
  check(config);
  StorageConfig storage = layers_and_options(config);
  std::vector<std::int64_t> page_bytes;  // of host history, by group
  for (const SelectionGroupConfig& group : config.groups) {
    const auto members = static_cast<std::int32_t>(group.layers.size());
    page_bytes.push_back(pack_host_row(group.layout, members).unit_bytes * config.units_per_page());
  }
  if (storage.cache_tiers.size() <= kSparseHistoryLevel) return storage;
  std::vector<std::int64_t> cold;
  if (!config.dense_layers.empty()) cold = cold_slot_bytes(storage);
  // Granules grow with the quota, so ask until it stays.
  std::int64_t& quota = storage.cache_tiers[kSparseHistoryLevel].quota;
  for (std::int64_t before = 0; before != quota;) {
    before = quota;
    const std::int64_t granule = granule_for(quota);
    const std::int64_t cold_granules =
        std::max(granules_for(cold, 1, granule), ceil_div(config.cold_quota, granule));
    quota = (granules_for(page_bytes, config.host_pages, granule) + cold_granules) * granule;
  }
  return storage;
}

}  // namespace sparse_kvcm
