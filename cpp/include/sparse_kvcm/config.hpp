// Configuration of a KvCacheManager: what is stored, and how much memory it gets.
//
// A manager without groups is *resident*: all its layers are dense, and stay on the GPU. It has no
// arena, no leases and no host history; units, needs and lengths follow the tokens. Then `groups`
// is empty and cached_slots, window_slots, arena_pages, host_pages and max_leases are 0.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sparse_kvcm/storage_config.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

struct KvCacheManagerConfig {
  Device device;
  std::int32_t tokens_per_block = 64;  // page size in tokens, in [1, 65536]
  std::int32_t tokens_per_unit = 1;    // 1 (DSA) or the compress ratio (V4: 4); divides the above
  std::vector<SelectionGroupConfig> groups;  // >= 1; none in a resident manager
  // Slots of a lease. Multiples of units_per_page(); cached_slots <= 65,535, window_slots <=
  // kMaxUnits.
  std::int32_t cached_slots = 0;  // N, >= every top_k
  std::int32_t window_slots = 0;  // W, >= 1 page: most units that can be newer than the watermark
  // Most units that one row may grow by in one step; columns of write_slots. In [1, window_slots],
  // or any number >= 1 in a resident manager.
  std::int32_t max_new_units = 1;
  std::int64_t arena_pages = 0;  // arena pages per member layer, all leases together, >= 1;
                                 // (arena_pages + 1) * units_per_page() <= 2^31 - 1
  std::int64_t host_pages = 0;   // host history pages per selection group, in [1, 2^31 - 1]
  std::int32_t max_leases = 0;   // most leases at a time, in [1, 2^31 - 1]

  // Layers whose pages stay on the GPU: indexer keys, windows, compressor states. None of them
  // sparse, ids apart from those of groups. At least one in a resident manager. Empty for a manager
  // of sparse layers alone, which needs nothing of what follows.
  std::vector<LayerConfig> dense_layers;
  std::int64_t gpu_quota = 0;   // bytes of their pools, > 0 with dense_layers; raised to the floors
  std::int64_t cold_quota = 0;  // pinned host bytes for their pages while suspended; likewise
  // As in StorageConfig.
  double max_util_for_resume = 0.97;
  std::vector<BatchDesc> constraints;
  std::optional<BatchDesc> typical_step;
  std::vector<double> initial_pool_ratio;
  std::optional<SwaScratchReuseConfig> swa_scratch_reuse;
  bool enable_stats = true;

  [[nodiscard]] std::int32_t units_per_page() const { return tokens_per_block / tokens_per_unit; }
  [[nodiscard]] bool is_resident() const { return groups.empty(); }
};

// What a KvCacheManager is told about its own making.
struct KvCacheManagerOptions {
  FillProgress progress;  // over the pools of all groups; may be empty
};

// Options of one request.
struct KvCacheOptions {
  std::int32_t need = 0;           // most units it will ever have, in [1, kMaxUnits], and at most
                                   // 2^31 - 1 tokens
  std::int32_t cached_slots = -1;  // N of its leases, a multiple of a page; -1 = the manager's, and
                                   // the only value in a resident one
};

// Throws InvalidArgument, naming the first field that is wrong, its limits and its value.
void check(const KvCacheManagerConfig& config);

// The storage that such a manager has: each member layer a sparse layer with one buffer "KEY", or
// one per role of its group, then the dense layers, and a host tier for exactly `host_pages` pages
// of history beside the cold pools. A resident manager has a host tier only with a cold_quota.
// Throws InvalidArgument as check() does.
[[nodiscard]] StorageConfig storage_config(const KvCacheManagerConfig& config);

}  // namespace sparse_kvcm
