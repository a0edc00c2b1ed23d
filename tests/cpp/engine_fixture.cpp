#include "engine_fixture.hpp"

#include <algorithm>

namespace sparse_kvcm::testing {

KvCacheManagerConfig EngineTest::config() {
  KvCacheManagerConfig c;
  c.tokens_per_block = kPage;
  c.groups = {{{7, 3}, kTopK, UnitLayout({12, 4})}, {{5}, kTopK, UnitLayout({16})}};
  c.cached_slots = kCached;
  c.window_slots = kWindow;
  c.max_new_units = 2;
  c.arena_pages = 16;
  c.host_pages = 30;
  c.max_leases = 4;
  return c;
}

void EngineTest::make(const KvCacheManagerConfig& config) {
  use(std::make_unique<KvCacheManager>(config));
}

void EngineTest::use(std::unique_ptr<KvCacheManager> new_manager) {
  batch.reset();
  batches.clear();
  requests.clear();
  fillers.clear();
  manager = std::move(new_manager);
  bytes = std::make_unique<UnitBytes>(*manager);
  bytes->poison_slots(0, manager->trash_slot());
  for (std::int32_t page = 0; page < manager->config().host_pages; ++page)
    bytes->poison_host_page(page);
  batch = make_batch({4, 64, kNoSlot});
}

BatchPtr EngineTest::make_batch(const BatchOptions& options) {
  batches.push_back(manager->create_batch(options));
  return batches.back();
}

KvCachePtr EngineTest::request(const KvCacheOptions& options) {
  requests.push_back(manager->create_kv_cache(options));
  return requests.back();
}

KvCachePtr EngineTest::active(std::int32_t history, std::int32_t need) {
  const KvCachePtr cache = request({need, -1});
  if (history > 0) import(*cache, history);
  EXPECT_TRUE(cache->resume(0));
  return cache;
}

KvCachePtr EngineTest::seated(std::int32_t history, std::int32_t need) {
  const KvCachePtr cache = active(history, need);
  batch->add(*cache);
  return cache;
}

void EngineTest::import(KvCache& cache, std::int32_t num_units) {
  std::vector<UnitTag> tags;
  for (std::int32_t n = 0; n < num_units; ++n)
    tags.push_back(tag(cache, cache.committed_length() + n));
  std::vector<std::vector<std::byte>> rows;
  std::vector<UnitRows> layers;
  for (std::int32_t layer = 0; layer < bytes->num_layers(); ++layer) {
    rows.push_back(bytes->rows(layer, tags, 0));
    layers.push_back({rows.back().data(), bytes->unit_bytes(layer)});
  }
  cache.import_history(layers, num_units, 0);
}

void EngineTest::fill_host(std::int64_t left) {
  while (manager->occupancy().free_host_pages > left) {
    const KvCachePtr filler = manager->create_kv_cache({kPage, -1});
    import(*filler, kPage);
    fillers.push_back(filler);
  }
}

void EngineTest::grow(const std::vector<RowLength>& lengths) {
  for (const ResizeResult result : batch->resize(lengths)) EXPECT_EQ(result, ResizeResult::kOk);
}

void EngineTest::open() {
  batch->publish(0);
  batch->wait_ready(0);
}

EngineTest::Resolved EngineTest::resolve(std::int32_t group, std::int32_t row,
                                         const std::vector<std::int32_t>& selection) {
  const auto k = static_cast<std::int32_t>(selection.size());
  const ResolveOutputs out = batch->outputs(group);
  std::fill_n(out.slots, k, 77);
  std::fill_n(out.write_slots, manager->config().max_new_units, 77);
  *out.miss_counts = *out.hit_counts = 77;
  *out.errors = 77;
  batch->resolve(group, &row, 1, selection.data(), k, k, {}, 0);
  return {{out.slots, out.slots + k},
          {out.write_slots, out.write_slots + manager->config().max_new_units},
          *out.miss_counts,
          *out.hit_counts,
          *out.errors};
}

void EngineTest::fetch(std::int32_t group, std::int32_t row, std::size_t k) {
  batch->fetch(group, &row, 1, static_cast<std::int32_t>(k), {}, 0);
}

void EngineTest::launch(std::int32_t row, const std::vector<std::int32_t>& selection) {
  const auto seated_here = [&](const KvCachePtr& cache) {
    return cache->row() == row && cache->lease() &&
           cache->lease()->id == batch->row_states_address()[row].lease_id;
  };
  const auto cache = std::find_if(requests.begin(), requests.end(), seated_here);
  ASSERT_NE(cache, requests.end());
  for (std::int32_t group = 0; group < manager->num_groups(); ++group) {
    const Resolved got = resolve(group, row, selection);
    EXPECT_EQ(got.error, 0U);
    fetch(group, row, selection.size());
    const std::int32_t committed = (*cache)->committed_length();
    for (std::int32_t o = committed; o < (*cache)->length(); ++o)
      bytes->write_group(group, got.write_slots[static_cast<std::size_t>(o - committed)],
                         tag(**cache, o));
    for (std::size_t j = 0; j < selection.size(); ++j)
      if (selection[j] >= 0) {
        EXPECT_TRUE(bytes->group_holds(group, got.slots[j], tag(**cache, selection[j])))
            << "row " << row << ", group " << group << ", ordinal " << selection[j];
      }
  }
}

void EngineTest::step(const std::vector<std::int32_t>& rows) {
  open();
  for (const std::int32_t row : rows) launch(row);
  record(rows);
}

UnitTag EngineTest::tag(const KvCache& cache, std::int32_t ordinal) const {
  std::uint32_t id = 0;
  while (id < requests.size() && requests[id].get() != &cache) ++id;
  return {id, ordinal, 1};
}

void EngineTest::expect_history(const KvCache& cache) const {
  const std::vector<std::int32_t> pages = cache.host_pages();
  for (std::int32_t o = 0; o < cache.watermark(); ++o)
    for (std::int32_t group = 0; group < manager->num_groups(); ++group)
      EXPECT_TRUE(bytes->host_holds(group, pages[static_cast<std::size_t>(o / kPage)], o % kPage,
                                    tag(cache, o)))
          << "group " << group << ", ordinal " << o;
}

Snapshot EngineTest::snapshot() const {
  return take_snapshot(*manager, requests, batches, WithBytes::kYes);
}

}  // namespace sparse_kvcm::testing
