// Grouping and places. Everything is found in one pass over the config and a few over the groups:
// 78 layers with their buffers are a matter of microseconds.
#include "sparse_kvcm/storage_layout.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "storage/config_check.hpp"

namespace sparse_kvcm {
namespace {

LifeCycle life_cycle_of(const LayerConfig& layer) {
  return {layer.sliding_window_size, layer.num_sink_tokens.value_or(0),
          layer.buffers.front().is_sparse};
}

// Bytes of one page of a sparse layer group in each selection group's pool.
std::vector<std::int64_t> sparse_slot_bytes(const StorageConfig& config) {
  const std::int32_t units = config.tokens_per_block / config.tokens_per_unit;
  std::vector<std::int64_t> bytes;
  for (const SelectionGroupConfig& group : config.selection_groups) {
    const auto members = static_cast<std::int32_t>(group.layers.size());
    bytes.push_back(pack_host_row(group.layout, members).unit_bytes * units);
  }
  return bytes;
}

// REQUIRES: a sparse layer of a checked config.
std::int32_t selection_group_of(const StorageConfig& config, std::int32_t layer_id) {
  const auto group = std::ranges::find_if(config.selection_groups, [&](const auto& candidate) {
    return std::ranges::find(candidate.layers, layer_id) != candidate.layers.end();
  });
  return static_cast<std::int32_t>(group - config.selection_groups.begin());
}

std::vector<std::int64_t> dense_slot_bytes(const LayerGroupDesc& group) {
  std::vector<std::int64_t> bytes;
  bytes.reserve(group.slot.size());
  for (const CoalescedBuffer& buffer : group.slot) bytes.push_back(buffer.slot_bytes());
  return bytes;
}

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

// Adds the layer's buffers to those of equal size.
void coalesce(const StorageConfig& config, const LayerConfig& layer, LayerGroupDesc& group) {
  group.layers.push_back(layer.layer_id);
  std::map<std::int64_t, std::int32_t> of_layer;
  for (const BufferConfig& buffer : layer.buffers) {
    const std::int64_t bytes = buffer_bytes(config, buffer);
    auto found = std::ranges::find(group.slot, bytes, &CoalescedBuffer::buffer_bytes);
    if (found == group.slot.end()) {
      group.slot.push_back({bytes, {}, 1});
      found = std::prev(group.slot.end());
    }
    found->buffers.push_back({layer.layer_id, buffer.role});
    found->scratch_pages_per_page = std::max(found->scratch_pages_per_page, ++of_layer[bytes]);
  }
}

}  // namespace

StorageLayout::StorageLayout(StorageConfig config) : config_(std::move(config)) {
  check(config_);
  group_layers();
  add_pool_groups();
  add_places();
  if (config_.cache_tiers.size() > kSparseHistoryLevel) add_cold_pool_groups();
  const auto homes =
      static_cast<std::size_t>(std::ranges::count(pool_groups_, false, &PoolGroupDesc::is_cold));
  const std::size_t weights = config_.initial_pool_ratio.size();
  if (weights != 0 && weights != homes) {
    fail_argument("StorageConfig", "initial_pool_ratio must have one weight per pool group, ",
                  homes, ", got ", weights);
  }
}

void StorageLayout::group_layers() {
  for (const LayerConfig& layer : config_.layers) {
    const LifeCycle life_cycle = life_cycle_of(layer);
    auto group = std::ranges::find(layer_groups_, life_cycle, &LayerGroupDesc::life_cycle);
    if (group == layer_groups_.end()) {
      layer_groups_.push_back({life_cycle, {}, {}, -1, -1});
      group = std::prev(layer_groups_.end());
    }
    coalesce(config_, layer, *group);
    groups_of_layers_.emplace(layer.layer_id,
                              static_cast<std::int32_t>(group - layer_groups_.begin()));
  }
  for (LayerGroupDesc& group : layer_groups_) {
    std::ranges::stable_sort(group.slot, std::greater{}, [](const CoalescedBuffer& buffer) {
      return std::pair(buffer.slot_bytes(), buffer.buffer_bytes);
    });
  }
}

// Dense groups before the sparse one, which is the only one with its life cycle.
void StorageLayout::add_pool_groups() {
  for (const bool sparse : {false, true}) {
    for (std::size_t g = 0; g < layer_groups_.size(); ++g) {
      LayerGroupDesc& group = layer_groups_[g];
      if (group.life_cycle.is_sparse != sparse) continue;
      const std::vector<std::int64_t> bytes =
          sparse ? sparse_slot_bytes(config_) : dense_slot_bytes(group);
      auto pools = std::ranges::find_if(pool_groups_, [&](const PoolGroupDesc& known) {
        return known.is_sparse == sparse && known.slot_bytes == bytes;
      });
      if (pools == pool_groups_.end()) {
        pool_groups_.push_back(
            {sparse ? kSparseHistoryLevel : kGpuLevel, sparse, false, {}, bytes});
        pools = std::prev(pool_groups_.end());
      }
      pools->layer_groups.push_back(static_cast<std::int32_t>(g));
      group.pool_group = static_cast<std::int32_t>(pools - pool_groups_.begin());
    }
  }
}

void StorageLayout::add_places() {
  for (const LayerConfig& layer : config_.layers) {
    for (const BufferConfig& buffer : layer.buffers) {
      BufferPlace place;
      place.layer_group = groups_of_layers_.at(layer.layer_id);
      place.page_bytes = buffer.page_bytes;
      place.is_sparse = buffer.is_sparse;
      place.converter.expansion = expansion_of(config_, buffer);
      place.converter.mode = PageIndexMode::kPerLayer;
      places_.emplace(BufferId{layer.layer_id, buffer.role}, place);
    }
  }
  for (const LayerGroupDesc& group : layer_groups_) {
    for (std::size_t pool = 0; pool < group.slot.size(); ++pool) {
      const CoalescedBuffer& coalesced = group.slot[pool];
      for (std::size_t i = 0; i < coalesced.buffers.size(); ++i) {
        BufferPlace& place = places_.at(coalesced.buffers[i]);
        place.pool_group = group.pool_group;
        place.pool = static_cast<std::int32_t>(pool);
        place.converter.scale = static_cast<std::int32_t>(coalesced.buffers.size());
        place.converter.position = static_cast<std::int32_t>(i);
        place.converter.scratch_pages_per_page = coalesced.scratch_pages_per_page;
      }
    }
  }
  // A sparse layer's pages lie in its selection group's pool, whatever buffers they have.
  for (auto& [id, place] : places_) {
    if (place.is_sparse) place.pool = selection_group_of(config_, id.layer_id);
  }
}

void StorageLayout::add_cold_pool_groups() {
  for (std::size_t g = 0; g < layer_groups_.size(); ++g) {
    LayerGroupDesc& group = layer_groups_[g];
    if (group.life_cycle.is_sparse) continue;
    const std::vector<std::int64_t> bytes{sum(dense_slot_bytes(group))};
    auto pools = std::ranges::find_if(pool_groups_, [&](const PoolGroupDesc& known) {
      return known.is_cold && known.slot_bytes == bytes;
    });
    if (pools == pool_groups_.end()) {
      pool_groups_.push_back({kSparseHistoryLevel, false, true, {}, bytes});
      pools = std::prev(pool_groups_.end());
    }
    pools->layer_groups.push_back(static_cast<std::int32_t>(g));
    group.cold_pool_group = static_cast<std::int32_t>(pools - pool_groups_.begin());
  }
}

std::int32_t StorageLayout::num_levels() const {
  return static_cast<std::int32_t>(config_.cache_tiers.size());
}

std::int32_t StorageLayout::get_layer_group_id(std::int32_t layer_id) const {
  const auto found = groups_of_layers_.find(layer_id);
  if (found == groups_of_layers_.end()) {
    fail_argument("StorageLayout", "layer_id must be one of the config's, got ", layer_id);
  }
  return found->second;
}

const BufferPlace& StorageLayout::place(std::int32_t layer_id, std::string_view role) const {
  static_cast<void>(get_layer_group_id(layer_id));
  const auto found = places_.find({layer_id, std::string(role)});
  if (found == places_.end()) {
    fail_argument("StorageLayout", "role must be one of layer ", layer_id, "'s, got \"", role,
                  "\"");
  }
  return found->second;
}

std::vector<BufferId> StorageLayout::all_buffer_ids() const {
  std::vector<BufferId> ids;
  for (const LayerConfig& layer : config_.layers) {
    for (const BufferConfig& buffer : layer.buffers) ids.push_back({layer.layer_id, buffer.role});
  }
  return ids;
}

std::vector<std::vector<std::int32_t>> StorageLayout::layer_grouping() const {
  std::vector<std::vector<std::int32_t>> groups;
  groups.reserve(layer_groups_.size());
  for (const LayerGroupDesc& group : layer_groups_) groups.push_back(group.layers);
  return groups;
}

PageRange StorageLayout::scratch_range(std::int32_t layer_group, const KvCacheDesc& request) const {
  if (!config_.swa_scratch_reuse) return {};
  const LifeCycle& life_cycle = layer_groups_[static_cast<std::size_t>(layer_group)].life_cycle;
  return scratch_pages(life_cycle, config_.tokens_per_block, request.history_length,
                       request.capacity, config_.swa_scratch_reuse->max_rewind_len);
}

std::int32_t StorageLayout::scratch_slots(std::int32_t layer_group, std::int32_t num_pages) const {
  std::int32_t slots = 0;
  for (const CoalescedBuffer& buffer : layer_groups_[static_cast<std::size_t>(layer_group)].slot) {
    const PageIndexConverter& converter = places_.at(buffer.buffers.front()).converter;
    slots = std::max(slots, converter.scratch_slots(num_pages));
  }
  return slots;
}

}  // namespace sparse_kvcm
