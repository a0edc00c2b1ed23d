// What follows from a StorageConfig without any memory: groups, pools, addresses within slots, and
// how many slots each pool group needs or gets. The planner and Storage use the same object, so
// planned bytes are allocated bytes.
//
//   layer group   layers with one life cycle; a request has one page table per layer group
//   pool group    layer groups whose slots have the same list of sizes share slots
//   slot          one page of a layer group: one piece in each pool of its pool group
//   pool          one range of addresses, [num_slots, slot_bytes]
//
// Within a layer group, buffers of equal bytes per page are coalesced, in the order of the config;
// the coalesced buffers, largest first, are the slot. A *sparse* layer group has its slots on
// the host, one pool per selection group in the unit-major order of unit_layout.hpp. A *cold* pool
// group holds suspended pages of dense layer groups on the host, each in one piece; layer groups
// with equal bytes share one, whatever their pools on the GPU look like.
//
// Orders of groups and pools are stable for a config but no part of the contract. Immutable, so
// thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sparse_kvcm/page_index.hpp"
#include "sparse_kvcm/page_range.hpp"
#include "sparse_kvcm/storage_config.hpp"

namespace sparse_kvcm {

struct BufferId {
  std::int32_t layer_id = 0;
  std::string role;
  friend auto operator<=>(const BufferId&, const BufferId&) = default;
};

// Buffers of one layer group with equal bytes per page, side by side in a slot.
struct CoalescedBuffer {
  std::int64_t buffer_bytes = 0;  // of one buffer in a page: all its kernel pages
  std::vector<BufferId> buffers;  // in the order in which they lie
  // Most of these buffers that one layer has.
  std::int32_t scratch_pages_per_page = 1;
  [[nodiscard]] std::int64_t slot_bytes() const {
    return buffer_bytes * static_cast<std::int64_t>(buffers.size());
  }
};

struct LayerGroupDesc {
  LifeCycle life_cycle;
  std::vector<std::int32_t> layers;   // in the order of the config
  std::vector<CoalescedBuffer> slot;  // largest first; by buffer, also where is_sparse
  std::int32_t pool_group = -1;       // where its pages live
  std::int32_t cold_pool_group = -1;  // where suspended ones go; -1 if sparse or without a host
};

struct PoolGroupDesc {
  std::int32_t level = kGpuLevel;
  bool is_sparse = false;
  bool is_cold = false;
  std::vector<std::int32_t> layer_groups;
  std::vector<std::int64_t> slot_bytes;  // of each pool
};

// Where one buffer lies, the pool's base aside.
struct BufferPlace {
  std::int32_t layer_group = 0;
  std::int32_t pool_group = 0;
  std::int32_t pool = 0;         // within the pool group
  bool is_sparse = false;        // then the fields below describe the arena's side: no kernel index
  std::int64_t page_bytes = 0;   // BufferConfig::page_bytes: the stride of its page indices
  PageIndexConverter converter;  // mode PER_LAYER
  [[nodiscard]] std::int64_t offset_bytes() const {  // within the slot
    return page_bytes * converter.expansion * converter.position;
  }
};

class StorageLayout {
 public:
  // Throws InvalidArgument for a bad config, also if the number of weights in initial_pool_ratio
  // is not that of the pool groups.
  explicit StorageLayout(StorageConfig config);

  [[nodiscard]] const StorageConfig& config() const { return config_; }
  [[nodiscard]] std::int32_t num_levels() const;
  [[nodiscard]] const std::vector<LayerGroupDesc>& layer_groups() const { return layer_groups_; }
  // Those of dense layer groups, then the sparse one, then cold ones.
  [[nodiscard]] const std::vector<PoolGroupDesc>& pool_groups() const { return pool_groups_; }
  // Throws InvalidArgument for an unknown layer, or role of it.
  [[nodiscard]] std::int32_t get_layer_group_id(std::int32_t layer_id) const;
  [[nodiscard]] const BufferPlace& place(std::int32_t layer_id, std::string_view role) const;
  [[nodiscard]] std::vector<BufferId> all_buffer_ids() const;
  // The layers of each layer group.
  [[nodiscard]] std::vector<std::vector<std::int32_t>> layer_grouping() const;

  // Scratch pages of a request, in a layer group, and the slots that `num_pages` of them share.
  // Empty and 0 unless the config has swa_scratch_reuse and the group a window.
  [[nodiscard]] PageRange scratch_range(std::int32_t layer_group, const KvCacheDesc& request) const;
  [[nodiscard]] std::int32_t scratch_slots(std::int32_t layer_group, std::int32_t num_pages) const;

  // Slots that `batch` takes in each pool group, those of sparse and cold ones too: every request
  // as if suspended. [num_pool_groups]. Throws InvalidArgument for a bad batch.
  [[nodiscard]] std::vector<std::int64_t> count_slots(const BatchDesc& batch) const;

  // The least slots of each pool group: one request that decodes, with its windows at their
  // widest, and every constraint, at a utilisation of max_util_for_resume at most; 1 in cold ones.
  [[nodiscard]] std::vector<std::int64_t> min_slots() const;
  // The slots that suspended requests (StorageConfig::suspended) have in each cold pool group, >=
  // 1; 0 in others.
  [[nodiscard]] std::vector<std::int64_t> cold_slots() const;
  // The share of its tier's bytes that each pool group is to have; sums to 1 per level. On the GPU
  // from initial_pool_ratio, else typical_step, else constraints, else a request of 2,049 tokens
  // with a history of 2,048; on the host from the last three, and cold_slots().
  [[nodiscard]] std::vector<double> pool_ratio() const;

  // The unit in which a level's pools map memory: 2 MiB for a configured quota below 2 GiB, doubled
  // with it up to 32 MiB from 16 GiB on.
  [[nodiscard]] std::int64_t granule_bytes(std::int32_t level) const;
  // Bytes that `num_slots` slots of a pool group take, in granules per pool.
  [[nodiscard]] std::int64_t get_num_bytes(std::int32_t pool_group, std::int64_t num_slots) const;
  // The least quota of a level, in bytes: min_slots() of its pool groups, >= 1 granule per pool.
  [[nodiscard]] std::int64_t min_quota(std::int32_t level) const;
  // What `quota` becomes: whole granules, at least min_quota(). Throws InvalidArgument unless quota
  // is in [1, 2^60], as slots_for_quota does.
  [[nodiscard]] std::int64_t effective_quota(std::int32_t level, std::int64_t quota) const;
  // Slots of each pool group of `level` under `quota` bytes, made effective first; 0 in those of
  // other levels. Their bytes sum to at most that quota. Cold pool groups beside history stop at
  // the granules of cold_slots() (StorageConfig::suspended).
  [[nodiscard]] std::vector<std::int64_t> slots_for_quota(std::int32_t level,
                                                          std::int64_t quota) const;

  // The longest sequence, at most `upper`, that fits beside `batch_size` - 1 requests of one token
  // into `totals` slots per pool group, at all lengths on the way there, at max_util_for_resume:
  // prefilled in steps as long as the longest of constraints and typical_step, in whole pages, with
  // scratch as it is shared, then decoded. Cold pool groups do not count. 0 if none does.
  // Throws InvalidArgument if batch_size < 1, upper < 0 or totals has another size.
  [[nodiscard]] std::int32_t clamp_max_seq_len(const std::vector<std::int64_t>& totals,
                                               std::int32_t batch_size, std::int32_t upper) const;

 private:
  void group_layers();
  void add_pool_groups();
  void add_cold_pool_groups();
  void add_places();
  void check_level(const char* function, std::int32_t level) const;
  [[nodiscard]] std::int64_t count_slots_of(std::int32_t layer_group, const BatchDesc& batch) const;
  [[nodiscard]] std::int64_t prefill_step() const;
  [[nodiscard]] std::int64_t most_slots(std::int32_t layer_group, std::int32_t length,
                                        std::int64_t step) const;
  [[nodiscard]] std::vector<BatchDesc> typical_batches() const;
  [[nodiscard]] BatchDesc suspended() const;
  [[nodiscard]] std::vector<std::int64_t> cold_slots_of(const BatchDesc& suspended) const;
  [[nodiscard]] std::vector<std::int64_t> typical_slots() const;
  void leave_rest_to_history(std::int64_t granules, std::int64_t granule,
                             std::vector<std::int64_t>& slots) const;

  StorageConfig config_;
  std::vector<LayerGroupDesc> layer_groups_;
  std::vector<PoolGroupDesc> pool_groups_;
  std::map<std::int32_t, std::int32_t> groups_of_layers_;
  std::map<BufferId, BufferPlace> places_;
};

// Where sparse layers have their history, whatever the config.
[[nodiscard]] constexpr CacheTier sparse_backing_medium() { return CacheTier::kHostMem; }

// n slots fit into `total` at this utilisation. The one comparison behind resume, floors and clamp.
[[nodiscard]] constexpr bool fits(std::int64_t n, std::int64_t total, double max_util) {
  return static_cast<double>(n) <= static_cast<double>(total) * max_util;
}

}  // namespace sparse_kvcm
