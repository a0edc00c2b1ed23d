// A manager without groups: all layers are dense and stay on the GPU, and units follow the tokens.
#include <algorithm>
#include <functional>

#include "dense_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

class ResidentTest : public DenseTest {
 protected:
  ResidentTest() { use_dense(resident_config()); }

  static KvCacheManagerConfig resident_config() {
    KvCacheManagerConfig c = dense_config();
    c.groups.clear();
    c.cached_slots = c.window_slots = c.max_leases = 0;
    c.arena_pages = c.host_pages = 0;
    return c;
  }
  // ACTIVE, its `history` tokens computed and written.
  KvCachePtr ready(std::int32_t history, std::int32_t need = kNeed) {
    const KvCachePtr cache = request({need, -1});
    EXPECT_TRUE(cache->resume(0));
    EXPECT_TRUE(cache->resize(history, history, 0));
    write_pages(*cache);
    return cache;
  }
  KvCachePtr sitting(std::int32_t history) {
    const KvCachePtr cache = ready(history);
    batch->add(*cache);
    return cache;
  }
  void grow_by_one(const std::vector<std::int32_t>& rows) {
    std::vector<RowTokens> capacities;
    for (const std::int32_t row : rows)
      capacities.push_back({row, at_row(row).history_length() + 1});
    grow_tokens(capacities);
  }
  void decode(const std::vector<std::int32_t>& rows) {
    grow_by_one(rows);
    open();
    record(rows);
  }
  void expect_no_history() const {
    const MemoryUse use = manager->memory_use();
    EXPECT_EQ(use.arena_bytes + use.metadata_bytes + use.host_bytes, 0);
  }
  // All lengths but the pending growth.
  static void expect_computed(const KvCache& cache, std::int32_t tokens, std::int32_t units) {
    EXPECT_EQ(cache.history_length(), tokens);
    EXPECT_EQ(cache.committed_length(), units);
    EXPECT_LE(cache.window_begin(), cache.watermark());
    EXPECT_LE(cache.watermark(), units);
    EXPECT_FALSE(cache.lease());
    EXPECT_TRUE(cache.host_pages().empty());
  }
};

TEST_F(ResidentTest, NothingIsTakenForLeasesAndHistory) {
  expect_no_history();
  EXPECT_EQ(planned_memory(resident_config()), manager->memory_use());
  EXPECT_EQ(occupancy(), (std::vector<std::int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(manager->storage()->config().cache_tiers.size(), 1U);
  EXPECT_TRUE(manager->layers().empty());
  for (const PoolGroupUse& use : manager->pool_group_use()) EXPECT_EQ(use.level, kGpuLevel);
  EXPECT_EQ(batch->memory_use(), planned_batch_memory(manager->config(), {4, 64, kNoSlot}));
}

TEST_F(ResidentTest, AHostTierIsThereForSuspendedPagesAlone) {
  KvCacheManagerConfig config = resident_config();
  config.cold_quota = 1;
  use_dense(config);
  EXPECT_EQ(manager->storage()->config().cache_tiers.size(), 2U);
  expect_no_history();
  for (const PoolGroupUse& use : manager->pool_group_use()) EXPECT_GT(use.slots.total, 0);
}

TEST_F(ResidentTest, UnitsFollowTheTokensOfAPrefill) {
  KvCacheManagerConfig config = resident_config();
  config.tokens_per_unit = 2;
  use_dense(config);
  const KvCachePtr kv = ready(0);
  for (const std::int32_t tokens : {7, 8, 9}) {
    EXPECT_TRUE(kv->resize(tokens + 3, tokens, 0));
    expect_computed(*kv, tokens, tokens / 2);
    EXPECT_EQ(kv->length(), tokens / 2);
    EXPECT_EQ(kv->watermark(), tokens / 2);
  }
  EXPECT_EQ(batch->add(*kv), 0);
  // Tokens 9 and 10: the second of them completes a unit.
  grow_tokens({{0, 10}});
  open();
  record({0});
  expect_computed(*kv, 10, 5);
}

TEST_F(ResidentTest, RowsDecodeAndTablesFollow) {
  const KvCachePtr one = sitting(5);
  const KvCachePtr two = sitting(11);
  for (std::int32_t i = 0; i < 9; ++i) {
    decode({0, 1});
    expect_computed(*one, 6 + i, 6 + i);
    expect_computed(*two, 12 + i, 12 + i);
    expect_device_tables();
    EXPECT_TRUE(holds_pages(*one));
    EXPECT_TRUE(holds_pages(*two));
    const RowState& row = batch->row_states_address()[0];
    EXPECT_EQ(row.lease_id, -1);
    EXPECT_EQ(row.length, 6 + i);
  }
  EXPECT_TRUE(batch->take_errors().rows.empty());
  EXPECT_EQ(batch->take_errors().batch, 0U);
}

TEST_F(ResidentTest, AnAbortedStepGivesGrowthBackAndIsFollowedByAGoodOne) {
  const KvCachePtr one = sitting(8);
  const KvCachePtr two = sitting(8);
  grow_by_one({0, 1});
  open();
  batch->abort_step(0);
  expect_computed(*one, 8, 8);
  EXPECT_EQ(one->length(), 8);
  grow_by_one({0, 1});
  open();
  record({1});  // row 0 was not launched
  expect_computed(*one, 8, 8);
  expect_computed(*two, 9, 9);
  decode({0, 1});
  expect_computed(*one, 9, 9);
  expect_computed(*two, 10, 10);
  expect_device_tables();
}

TEST_F(ResidentTest, GrowthPastTheNeedOrTheStepIsRefusedForThatRow) {
  const KvCachePtr one = ready(6, 7);
  batch->add(*one);
  sitting(6);
  const std::vector<RowTokens> most = {{0, 8}, {1, 9}};
  EXPECT_EQ(batch->resize_tokens(most, 0),
            (std::vector{ResizeResult::kPastNeed, ResizeResult::kPastNewUnits}));
  const std::vector<RowTokens> fits = {{0, 7}, {1, 8}};
  EXPECT_EQ(batch->resize_tokens(fits, 0), (std::vector{ResizeResult::kOk, ResizeResult::kOk}));
}

TEST_F(ResidentTest, WithoutAColdTierSuspendIsRefusedAndTheRequestDecodesOn) {
  const KvCachePtr kv = sitting(9);
  expect_refused<OutOfPages>("KvCache.suspend", [&] { kv->suspend(0); });
  decode({0});
  expect_computed(*kv, 10, 10);
  EXPECT_TRUE(holds_pages(*kv));
}

TEST_F(ResidentTest, WithAColdTierPagesGoAndComeBack) {
  KvCacheManagerConfig config = resident_config();
  config.cold_quota = 1;
  use_dense(config);
  const std::vector<std::int64_t> fresh = free_slots();
  const KvCachePtr kv = sitting(9);
  decode({0});
  grow_by_one({0});  // dropped by suspend
  kv->suspend(0);
  EXPECT_EQ(kv->state(), KvCacheState::kSuspended);
  expect_computed(*kv, 10, 10);
  const KvCachePtr other = sitting(14);  // where the pages were
  EXPECT_TRUE(kv->resume(0));
  EXPECT_TRUE(holds_pages(*kv));
  EXPECT_EQ(batch->add(*kv), 1);
  decode({0, 1});
  expect_computed(*kv, 11, 11);
  EXPECT_TRUE(holds_pages(*kv));
  EXPECT_TRUE(holds_pages(*other));
  expect_device_tables();
  kv->close();
  other->close();
  EXPECT_EQ(free_slots(), fresh);
}

TEST_F(ResidentTest, WhatAStepStillReadsComesBackAtItsEnd) {
  const std::vector<std::int64_t> fresh = free_slots();
  const KvCachePtr kv = sitting(9);
  grow_by_one({0});
  open();
  kv->close();
  EXPECT_NE(free_slots(), fresh);
  record({0});
  EXPECT_EQ(free_slots(), fresh);
}

TEST_F(ResidentTest, ARequestMovesBetweenBatches) {
  const KvCachePtr kv = sitting(9);
  decode({0});
  batch->remove(*kv);
  const BatchPtr second = make_batch({4, 64, kNoSlot});
  EXPECT_EQ(second->add(*kv), 0);
  const std::vector<RowTokens> next = {{0, 11}};
  EXPECT_EQ(second->resize_tokens(next, 0), std::vector{ResizeResult::kOk});
  second->publish(0);
  second->wait_ready(0);
  const std::int32_t row = 0;
  second->record_read({&row, 1}, 0);
  expect_computed(*kv, 11, 11);
}

TEST_F(ResidentTest, CallsOnHistoryAndLeasesAreRefused) {
  const KvCachePtr kv = ready(4);
  expect_refused<InvalidState>("KvCache.import_history", [&] { kv->import_history({}, 1, 0); });
  expect_refused<InvalidState>("Batch.page_table_address",
                               [&] { static_cast<void>(batch->page_table_address()); });
  expect_refused<InvalidArgument>("KvCache.decode_entries",
                                  [&] { static_cast<void>(kv->decode_entries(0)); });
  expect_refused<InvalidArgument>("KvCacheManager.create_kv_cache", [&] {
    static_cast<void>(manager->create_kv_cache({kNeed, kCached}));
  });
  batch->add(*kv);
  open();
  const std::int32_t row = 0;
  const std::int32_t selection = 0;
  expect_refused<InvalidArgument>("Batch.resolve",
                                  [&] { batch->resolve(0, &row, 1, &selection, 1, 1, {}, 0); });
}

TEST_F(ResidentTest, SizesOfWhatItDoesNotHaveAreRefused) {
  using Change = std::function<void(KvCacheManagerConfig&)>;
  const std::vector<std::pair<std::string, Change>> wrong = {
      {"cached_slots must be 0 without groups", [](auto& c) { c.cached_slots = 8; }},
      {"window_slots must be 0 without groups", [](auto& c) { c.window_slots = 8; }},
      {"arena_pages must be 0 without groups", [](auto& c) { c.arena_pages = 1; }},
      {"host_pages must be 0 without groups", [](auto& c) { c.host_pages = 1; }},
      {"max_leases must be 0 without groups", [](auto& c) { c.max_leases = 1; }},
      {"max_new_units must be in [1, ", [](auto& c) { c.max_new_units = 0; }},
      {"gpu_quota must be in [1, ", [](auto& c) { c.gpu_quota = 0; }},
      {"groups must not be empty without dense_layers", [](auto& c) { c.dense_layers.clear(); }}};
  for (const auto& [message, change] : wrong) {
    KvCacheManagerConfig config = resident_config();
    change(config);
    try {
      check(config);
      ADD_FAILURE() << message << ": accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }
}

// --- which tables a publish wrote; for managers with groups too ---

TEST_F(ResidentTest, TableRowsAreThoseWhosePagesAreOthers) {
  const auto written = [&](const std::vector<std::int32_t>& rows) {
    grow_by_one(rows);
    open();
    record(rows);
    return batch->table_rows();
  };
  sitting(4);
  const KvCachePtr two = sitting(6);
  using Rows = std::vector<std::int32_t>;
  EXPECT_EQ(written({0, 1}), (Rows{0, 1, 2, 3}));  // the first publish writes everything
  EXPECT_EQ(written({0, 1}), Rows{});
  EXPECT_EQ(written({0, 1}), Rows{1});  // token 8 begins a page
  EXPECT_EQ(written({0, 1}), Rows{});
  EXPECT_EQ(written({0, 1}), Rows{0});
  batch->remove(*two);
  EXPECT_EQ(written({0}), Rows{1});
  open();
  EXPECT_EQ(batch->table_rows(), Rows{});
}

TEST_F(DenseTest, TableRowsNameThoseOfHostHistoryToo) {
  seated(4);
  decode({0});
  EXPECT_EQ(batch->table_rows(), (std::vector<std::int32_t>{0, 1, 2, 3}));
  for (std::int32_t token = 5; token < 8; ++token) {
    decode({0});
    EXPECT_EQ(batch->table_rows(), std::vector<std::int32_t>{}) << token;
  }
  decode({0});
  EXPECT_EQ(batch->table_rows(), std::vector<std::int32_t>{0});
}

}  // namespace
}  // namespace sparse_kvcm::testing
