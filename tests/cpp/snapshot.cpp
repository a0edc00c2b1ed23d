#include "snapshot.hpp"

#include <cstring>
#include <functional>
#include <numeric>
#include <string_view>

namespace sparse_kvcm::testing {
namespace {

RequestView view(const KvCache& cache, std::int32_t num_groups, std::int32_t num_layer_groups) {
  RequestView v;
  v.state = cache.state();
  v.numbers = {cache.need(),      cache.length(),        cache.committed_length(),
               cache.watermark(), cache.window_begin(),  cache.row().value_or(-1),
               cache.capacity(),  cache.history_length()};
  for (std::int32_t group = 0; group < num_layer_groups; ++group)
    v.tables.push_back(cache.get_base_page_indices(group));
  v.lease = cache.lease();
  v.host_pages = cache.host_pages();
  if (v.state == KvCacheState::kActive)
    for (std::int32_t group = 0; group < num_groups; ++group)
      v.entries.push_back(cache.decode_entries(group));
  return v;
}

BatchView view(const Batch& batch) {
  const RowState* states = batch.row_states_address();
  const std::int32_t* tables = batch.page_table_address(0);
  const std::int32_t* counts = batch.page_counts_address(0);
  const std::int64_t num_tables = std::int64_t{batch.num_layer_groups()} * batch.max_rows();
  return {batch.clock(),
          batch.step_open(),
          batch.dirty_rows(),
          {states, states + batch.max_rows()},
          {tables, tables + num_tables * batch.max_pages()},
          {counts, counts + num_tables}};
}

std::uint64_t hash(const MemoryView& memory) {
  const std::int64_t bytes = std::accumulate(memory.shape.begin(), memory.shape.end(),
                                             std::int64_t{1}, std::multiplies<>());
  return std::hash<std::string_view>{}(
      {reinterpret_cast<const char*>(memory.data), static_cast<std::size_t>(bytes)});
}

}  // namespace

std::vector<std::int64_t> numbers(const Occupancy& o) {
  return {o.free_host_pages, o.free_arena_slots, o.largest_free_arena_run, o.free_leases};
}

Snapshot take_snapshot(const KvCacheManager& manager, const std::vector<KvCachePtr>& requests,
                       const std::vector<BatchPtr>& batches, WithBytes with_bytes) {
  Snapshot s;
  s.occupancy = numbers(manager.occupancy());
  const auto num_layer_groups =
      static_cast<std::int32_t>(manager.storage()->layout().layer_groups().size());
  for (const PoolGroupUse& use : manager.pool_group_use()) s.free_slots.push_back(use.slots.free);
  for (const KvCachePtr& cache : requests)
    s.requests.push_back(view(*cache, manager.num_groups(), num_layer_groups));
  for (const BatchPtr& batch : batches) s.batches.push_back(view(*batch));
  if (with_bytes == WithBytes::kNo) return s;
  for (const std::int32_t layer : manager.layers())
    s.bytes = s.bytes * 31 + hash(manager.arena(layer));
  for (std::int32_t g = 0; g < manager.num_groups(); ++g)
    s.bytes = s.bytes * 31 + hash(manager.host_history(g));
  const std::vector<PoolGroupDesc>& groups = manager.storage()->layout().pool_groups();
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t pool = 0; pool < groups[g].slot_bytes.size() && !groups[g].is_sparse; ++pool) {
      const MemoryView memory = manager.storage()->pool_memory(static_cast<std::int32_t>(g),
                                                               static_cast<std::int32_t>(pool));
      if (memory.data != nullptr) s.bytes = s.bytes * 31 + hash(memory);
    }
  return s;
}

std::string first_difference(const Snapshot& before, const Snapshot& after) {
  if (before.occupancy != after.occupancy) return "occupancy";
  if (before.free_slots != after.free_slots) return "free slots";
  for (std::size_t i = 0; i < before.requests.size(); ++i) {
    const RequestView& a = before.requests[i];
    const RequestView& b = after.requests[i];
    const std::string who = "request " + std::to_string(i);
    if (a.state != b.state) return who + ": state";
    if (a.numbers != b.numbers) return who + ": lengths or row";
    if (a.lease != b.lease) return who + ": lease";
    if (a.host_pages != b.host_pages) return who + ": host pages";
    if (a.tables != b.tables) return who + ": page tables";
    if (a.entries != b.entries) return who + ": entries";
  }
  for (std::size_t i = 0; i < before.batches.size(); ++i) {
    const BatchView& a = before.batches[i];
    const BatchView& b = after.batches[i];
    const std::string who = "batch " + std::to_string(i);
    if (a.clock != b.clock) return who + ": clock";
    if (a.step_open != b.step_open) return who + ": step_open";
    if (a.dirty_rows != b.dirty_rows) return who + ": dirty rows";
    if (a.row_states != b.row_states) return who + ": row states on the device";
    if (a.page_tables != b.page_tables) return who + ": page tables on the device";
    if (a.page_counts != b.page_counts) return who + ": page counts on the device";
  }
  if (before.bytes != after.bytes) return "bytes of the arena, of host history or of pools";
  return {};
}

}  // namespace sparse_kvcm::testing
