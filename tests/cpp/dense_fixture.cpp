#include "dense_fixture.hpp"

#include <algorithm>

namespace sparse_kvcm::testing {

KvCacheManagerConfig DenseTest::dense_config() {
  constexpr std::int64_t kBytes = std::int64_t{64} << 10;
  const std::vector<BufferConfig> two = {{"KEY", 2 * kBytes, {}, false},
                                         {"STATE", kBytes, {}, false}};
  KvCacheManagerConfig c = config();
  c.dense_layers = {
      {100, {{"INDEX_KEY", 2 * kBytes, {}, false}}, {}, {}}, {101, two, 8, {}}, {102, two, 4, 4}};
  c.gpu_quota = 1;
  return c;
}

void DenseTest::use_dense(const KvCacheManagerConfig& config) {
  pages.reset();
  use(make_manager(config, backend));
  pages = std::make_unique<PageBytes>(*manager, backend);
}

KvCachePtr DenseTest::prefilled(std::int32_t history, std::int32_t need) {
  const KvCachePtr cache = request({need, -1});
  if (history > 0) import(*cache, history);
  EXPECT_TRUE(cache->resume(0));
  EXPECT_TRUE(cache->resize(history, history, 0));
  write_pages(*cache);
  return cache;
}

KvCachePtr DenseTest::seated(std::int32_t history, std::int32_t need) {
  const KvCachePtr cache = prefilled(history, need);
  batch->add(*cache);
  return cache;
}

void DenseTest::grow_tokens(const std::vector<RowTokens>& capacities) {
  for (const ResizeResult result : batch->resize_tokens(capacities, 0))
    EXPECT_EQ(result, ResizeResult::kOk);
  for (const RowTokens& wanted : capacities) write_pages(at_row(wanted.row));
}

void DenseTest::decode(const std::vector<std::int32_t>& rows) {
  std::vector<RowTokens> capacities;
  for (const std::int32_t row : rows) capacities.push_back({row, at_row(row).history_length() + 1});
  grow_tokens(capacities);
  step(rows);
}

KvCache& DenseTest::at_row(std::int32_t row) const {
  return **std::ranges::find_if(requests, [&](const KvCachePtr& c) { return c->row() == row; });
}

std::uint32_t DenseTest::index_of(const KvCache& cache) const {
  const auto found =
      std::ranges::find_if(requests, [&](const KvCachePtr& c) { return c.get() == &cache; });
  return static_cast<std::uint32_t>(found - requests.begin());
}

std::int32_t DenseTest::group_of(std::int32_t layer) const {
  return manager->storage()->layout().get_layer_group_id(layer);
}

std::vector<std::int32_t> DenseTest::device_table(std::int32_t layer_group,
                                                  std::int32_t row) const {
  const std::int32_t* table = batch->page_table_address(layer_group) + row * batch->max_pages();
  return {table, table + batch->max_pages()};
}

void DenseTest::expect_device_tables() const {
  for (std::int32_t row = 0; row < batch->max_rows(); ++row) {
    const auto seated_here =
        std::ranges::find_if(requests, [&](const KvCachePtr& c) { return c->row() == row; });
    for (std::int32_t group = 0; group < batch->num_layer_groups(); ++group) {
      std::vector<std::int32_t> expected;
      if (seated_here != requests.end()) expected = (*seated_here)->get_base_page_indices(group);
      EXPECT_EQ(batch->page_counts_address(group)[row], std::ssize(expected))
          << "row " << row << ", layer group " << group;
      expected.resize(static_cast<std::size_t>(batch->max_pages()), -1);
      EXPECT_EQ(device_table(group, row), expected) << "row " << row << ", layer group " << group;
    }
  }
}

std::vector<std::int64_t> DenseTest::free_slots() const {
  std::vector<std::int64_t> free;
  for (const PoolGroupUse& use : manager->pool_group_use()) free.push_back(use.slots.free);
  return free;
}

}  // namespace sparse_kvcm::testing
