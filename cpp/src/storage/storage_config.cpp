#include "sparse_kvcm/storage_config.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <span>

#include "core/check.hpp"
#include "storage/config_check.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "StorageConfig";
constexpr std::int64_t kMaxPageBytes = std::int64_t{1} << 40;  // sums of slots stay in 64 bits
constexpr std::int32_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

// "layers[2].buffers[0].role", made only when something is wrong with it.
std::string item(const char* list, std::size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

void check_tiers(const std::vector<CacheTierConfig>& tiers) {
  if (tiers.empty() || tiers.size() > 2) {
    fail_argument(kFunction, "cache_tiers must have 1 or 2 tiers, got ", tiers.size());
  }
  for (std::size_t level = 0; level < tiers.size(); ++level) {
    const CacheTierConfig& tier = tiers[level];
    const bool gpu = tier.tier == CacheTier::kGpuMem;
    if (gpu != (level == kGpuLevel)) {
      fail_argument(kFunction, item("cache_tiers", level), ".tier must be ",
                    level == kGpuLevel ? "GPU_MEM" : "HOST_MEM", ", got ",
                    gpu ? "GPU_MEM" : "HOST_MEM");
    }
    check_range(kFunction, item("cache_tiers", level) + ".quota", tier.quota, std::int64_t{1},
                kMaxTierBytes);
    if (tier.max_quota != 0) {
      check_range(kFunction, item("cache_tiers", level) + ".max_quota", tier.max_quota, tier.quota,
                  kMaxTierBytes);
    }
  }
}

void check_buffer(const StorageConfig& config, const LayerConfig& layer, const std::string& field,
                  const BufferConfig& buffer) {
  if (buffer.role.empty()) fail_argument(kFunction, field, ".role must not be empty");
  const std::int32_t tokens = buffer.tokens_per_block_override.value_or(config.tokens_per_block);
  check_range(kFunction, field + ".tokens_per_block_override", tokens, 1, config.tokens_per_block);
  if (config.tokens_per_block % tokens != 0) {
    fail_argument(kFunction, field, ".tokens_per_block_override must divide tokens_per_block ",
                  config.tokens_per_block, ", got ", tokens);
  }
  check_range(kFunction, field + ".page_bytes", buffer.page_bytes, std::int64_t{1},
              kMaxPageBytes / (config.tokens_per_block / tokens));
  if (buffer.is_sparse != layer.buffers.front().is_sparse) {
    fail_argument(kFunction, field, ".is_sparse must be that of the layer's other buffers, ",
                  buffer.is_sparse ? "False" : "True", ": a layer is sparse or dense as a whole");
  }
  if (buffer.is_sparse && config.cache_tiers.size() <= kSparseHistoryLevel) {
    fail_argument(kFunction, field,
                  ".is_sparse needs a HOST_MEM tier for the history; add one to cache_tiers");
  }
}

void check_window(const LayerConfig& layer, const std::string& field) {
  if (layer.sliding_window_size) {
    check_range(kFunction, field + ".sliding_window_size", *layer.sliding_window_size, 1,
                kMaxTokens);
    if (layer.buffers.front().is_sparse) {
      fail_argument(kFunction, field,
                    ".sliding_window_size must be None in a sparse layer, whose selection takes "
                    "the place of a window, got ",
                    *layer.sliding_window_size);
    }
  }
  if (layer.num_sink_tokens) {
    if (!layer.sliding_window_size) {
      fail_argument(kFunction, field, ".num_sink_tokens needs a sliding_window_size, got ",
                    *layer.num_sink_tokens);
    }
    check_range(kFunction, field + ".num_sink_tokens", *layer.num_sink_tokens, 0, kMaxTokens);
  }
}

void check_layers(const StorageConfig& config) {
  if (config.layers.empty()) fail_argument(kFunction, "layers must not be empty");
  std::set<std::int32_t> ids;
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    const std::string field = item("layers", i);
    check_range(kFunction, field + ".layer_id", layer.layer_id, 0,
                std::numeric_limits<std::int32_t>::max());
    if (!ids.insert(layer.layer_id).second) {
      fail_argument(kFunction, field, ".layer_id ", layer.layer_id, " is taken by another layer");
    }
    if (layer.buffers.empty()) fail_argument(kFunction, field, ".buffers must not be empty");
    std::set<std::string> roles;
    for (std::size_t b = 0; b < layer.buffers.size(); ++b) {
      check_buffer(config, layer, field + "." + item("buffers", b), layer.buffers[b]);
      if (!roles.insert(layer.buffers[b].role).second) {
        fail_argument(kFunction, field, ".", item("buffers", b), ".role \"", layer.buffers[b].role,
                      "\" is taken by another buffer of the layer");
      }
    }
    check_window(layer, field);
  }
}

void check_regions(const StorageConfig& config, const LayerConfig& layer, const UnitLayout& layout,
                   const std::string& field) {
  const std::int32_t units = config.tokens_per_block / config.tokens_per_unit;
  const std::vector<BufferConfig>& buffers = layer.buffers;
  if (buffers.size() == 1 && buffer_bytes(config, buffers[0]) == layout.page_bytes(units)) {
    return;
  }
  bool equal = buffers.size() == layout.region_bytes().size();
  for (std::size_t r = 0; equal && r < buffers.size(); ++r) {
    equal = buffer_bytes(config, buffers[r]) == std::int64_t{layout.region_bytes()[r]} * units;
  }
  if (!equal) {
    fail_argument(kFunction, "the buffers of layer ", layer.layer_id,
                  " must be the regions of the layout of ", field, ": one of ",
                  layout.page_bytes(units), " bytes per page, or one per region of ", units,
                  " times its bytes");
  }
}

void check_selection_groups(const StorageConfig& config) {
  std::map<std::int32_t, const LayerConfig*> left;  // sparse layers without a group so far
  for (const LayerConfig& layer : config.layers) {
    if (layer.buffers.front().is_sparse) left.emplace(layer.layer_id, &layer);
  }
  for (std::size_t g = 0; g < config.selection_groups.size(); ++g) {
    const SelectionGroupConfig& group = config.selection_groups[g];
    const std::string field = item("selection_groups", g);
    if (group.layers.empty()) fail_argument(kFunction, field, ".layers must not be empty");
    check_range(kFunction, field + ".top_k", group.top_k, 1, kMaxCachedSlots);
    for (const std::int32_t id : group.layers) {
      const auto layer = left.find(id);
      if (layer == left.end()) {
        fail_argument(kFunction, field, ".layers must be sparse layers, each in one group, got ",
                      id);
      }
      check_regions(config, *layer->second, group.layout, field);
      left.erase(layer);
    }
    static_cast<void>(pack_host_row(group.layout, static_cast<std::int32_t>(group.layers.size())));
  }
  if (!left.empty()) {
    fail_argument(kFunction, "selection_groups must have every sparse layer, got none with layer ",
                  left.begin()->first);
  }
}

void check_ratio(const std::vector<double>& ratio) {
  double sum = 0;
  for (std::size_t g = 0; g < ratio.size(); ++g) {
    if (!(ratio[g] > 0) || ratio[g] > 1) {
      fail_argument(kFunction, item("initial_pool_ratio", g), " must be in (0, 1], got ", ratio[g]);
    }
    sum += ratio[g];
  }
  if (!ratio.empty() && std::abs(sum - 1) > 1e-6) {
    fail_argument(kFunction, "initial_pool_ratio must sum to 1 within 1e-6, got ", sum);
  }
}

}  // namespace

std::int32_t expansion_of(const StorageConfig& config, const BufferConfig& buffer) {
  return config.tokens_per_block /
         buffer.tokens_per_block_override.value_or(config.tokens_per_block);
}

std::int64_t buffer_bytes(const StorageConfig& config, const BufferConfig& buffer) {
  return buffer.page_bytes * expansion_of(config, buffer);
}

void check_page(const char* function, std::int32_t tokens_per_block, std::int32_t tokens_per_unit) {
  check_range(function, "tokens_per_block", tokens_per_block, 1, kMaxPageTokens);
  check_range(function, "tokens_per_unit", tokens_per_unit, 1, tokens_per_block);
  if (tokens_per_block % tokens_per_unit != 0) {
    fail_argument(function, "tokens_per_unit must divide tokens_per_block ", tokens_per_block,
                  ", got ", tokens_per_unit);
  }
}

void check_batch(const char* function, const std::string& field, const BatchDesc& batch) {
  if (batch.kv_caches.empty()) fail_argument(function, field, ".kv_caches must not be empty");
  for (std::size_t i = 0; i < batch.kv_caches.size(); ++i) {
    const KvCacheDesc& request = batch.kv_caches[i];
    if (request.history_length < 0 || request.history_length > request.capacity) {
      fail_argument(function, field, ".", item("kv_caches", i),
                    ".history_length must be in [0, capacity ", request.capacity, "], got ",
                    request.history_length);
    }
  }
  if (batch.system_prompt_length < 0) {
    fail_argument(function, field, ".system_prompt_length must be >= 0, got ",
                  batch.system_prompt_length);
  }
}

void check(const StorageConfig& config) {
  check_page(kFunction, config.tokens_per_block, config.tokens_per_unit);
  check_tiers(config.cache_tiers);
  check_layers(config);
  check_selection_groups(config);
  const double util = config.max_util_for_resume;
  if (!(util >= kLeastUtilForResume && util <= 1)) {
    fail_argument(kFunction, "max_util_for_resume must be in [", kLeastUtilForResume, ", 1], got ",
                  util);
  }
  for (std::size_t i = 0; i < config.constraints.size(); ++i) {
    check_batch(kFunction, item("constraints", i), config.constraints[i]);
  }
  if (config.typical_step) check_batch(kFunction, "typical_step", *config.typical_step);
  if (config.suspended) check_batch(kFunction, "suspended", *config.suspended);
  check_ratio(config.initial_pool_ratio);
  if (config.max_host_pages)
    check_range(kFunction, "max_host_pages", *config.max_host_pages, 1, kMaxTokens);
  if (config.swa_scratch_reuse) {
    check_range(kFunction, "swa_scratch_reuse.max_rewind_len",
                config.swa_scratch_reuse->max_rewind_len, 0, kMaxTokens);
  }
}

}  // namespace sparse_kvcm
