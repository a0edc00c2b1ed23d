// Requests with dense layers: pages, suspension, utilisation. Batches: dense_batch_test.cpp.
#include <algorithm>
#include <numeric>

#include "dense_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

using DenseRequestTest = DenseTest;

// --- resize ---

TEST_F(DenseRequestTest, PagesFollowTheTokensOfEachLayerGroup) {
  const KvCachePtr kv = prefilled(22);
  const std::vector<std::int32_t> all = kv->get_base_page_indices(group_of(100));
  const std::vector<std::int32_t> window = kv->get_base_page_indices(group_of(101));
  const std::vector<std::int32_t> sinks = kv->get_base_page_indices(group_of(102));
  EXPECT_EQ(std::ranges::count(all, -1), 0);
  EXPECT_EQ(all.size(), 6U);
  // The next query, 22, reads tokens 15 to 22 and, with sinks, 19 to 22 and 0 to 3.
  const auto there = [](const std::vector<std::int32_t>& table) {
    std::vector<std::int32_t> those;
    for (std::int32_t p = 0; p < std::ssize(table); ++p)
      if (table[static_cast<std::size_t>(p)] >= 0) those.push_back(p);
    return those;
  };
  EXPECT_EQ(there(window), (std::vector<std::int32_t>{3, 4, 5}));
  EXPECT_EQ(there(sinks), (std::vector<std::int32_t>{0, 4, 5}));
  EXPECT_EQ(kv->capacity(), 22);
  EXPECT_EQ(kv->history_length(), 22);
}

TEST_F(DenseRequestTest, IndexBuffersStayEqualToTheTables) {
  const KvCachePtr kv = request({kNeed, -1});
  std::vector<std::vector<std::int32_t>> buffers(
      static_cast<std::size_t>(batch->num_layer_groups()), std::vector<std::int32_t>(12, 77));
  for (std::int32_t g = 0; g < batch->num_layer_groups(); ++g)
    kv->set_base_page_index_buf(g, buffers[static_cast<std::size_t>(g)], nullptr);
  const auto expect_equal = [&] {
    for (std::int32_t g = 0; g < batch->num_layer_groups(); ++g) {
      std::vector<std::int32_t> expected = kv->get_base_page_indices(g);
      expected.resize(12, -1);
      EXPECT_EQ(buffers[static_cast<std::size_t>(g)], expected) << "layer group " << g;
    }
  };
  expect_equal();
  import(*kv, 21);
  EXPECT_TRUE(kv->resume(0));
  EXPECT_TRUE(kv->resize(26, 21, 0));
  expect_equal();
  EXPECT_TRUE(kv->resize(21, 21, 0));
  expect_equal();
  batch->add(*kv);
  for (int i = 0; i < 6; ++i) decode({0});
  expect_equal();
  kv->suspend(0);
  expect_equal();
  EXPECT_TRUE(kv->resume(0));
  expect_equal();
  kv->close();
  for (const std::vector<std::int32_t>& buffer : buffers)
    EXPECT_EQ(buffer, std::vector<std::int32_t>(12, -1));
}

TEST_F(DenseRequestTest, AnIndexBufferIsLeftAloneOnceItsRequestIsClosedInAStep) {
  const KvCachePtr kv = seated(21);
  std::vector<std::int32_t> buffer(12, 77);
  kv->set_base_page_index_buf(group_of(100), buffer, nullptr);
  open();
  kv->close();
  EXPECT_EQ(buffer, std::vector<std::int32_t>(12, -1));
  std::ranges::fill(buffer, 77);
  record({});
  EXPECT_EQ(buffer, std::vector<std::int32_t>(12, 77));
}

TEST_F(DenseRequestTest, AnIndexBufferThatIsTooShortIsRefused) {
  const KvCachePtr kv = request({kNeed, -1});
  std::vector<std::int32_t> buffer(9);
  expect_refused<InvalidArgument>("KvCache.set_base_page_index_buf", [&] {
    kv->set_base_page_index_buf(group_of(100), buffer, nullptr);
  });
}

TEST_F(DenseRequestTest, HistoryNeverGoesBack) {
  const KvCachePtr kv = prefilled(22);
  EXPECT_TRUE(kv->resize(24, 22, 0));
  expect_refused<InvalidArgument>("KvCache.resize", [&] { (void)kv->resize(24, 21, 0); });
  expect_refused<InvalidArgument>("KvCache.resize", [&] { (void)kv->resize(21, 22, 0); });
}

TEST_F(DenseRequestTest, ACapacityPastTheNeedIsRefused) {
  const KvCachePtr kv = prefilled(22);
  expect_refused<InvalidArgument>("KvCache.resize", [&] { (void)kv->resize(kNeed + 1, 22, 0); });
}

TEST_F(DenseRequestTest, AResizeThatFindsTooFewPagesChangesNothing) {
  const KvCachePtr kv = prefilled(22);
  const KvCachePtr other = prefilled(30);
  const Snapshot before = snapshot();
  EXPECT_FALSE(kv->resize(40, 22, 0));  // 10 pages of layer 100 beside 8; there are 16
  Snapshot after = snapshot();
  EXPECT_EQ(first_difference(before, after), "");
  EXPECT_TRUE(holds_pages(*kv));
  EXPECT_TRUE(kv->resize(32, 22, 0));
}

TEST_F(DenseRequestTest, AResizeWhileSuspendedIsRefused) {
  const KvCachePtr kv = prefilled(22);
  kv->suspend(0);
  expect_refused<InvalidState>("KvCache.resize", [&] { (void)kv->resize(23, 22, 0); });
}

// --- resume ---

TEST_F(DenseRequestTest, ResumeIsRefusedBeyondTheUtilisationAndChangesNothing) {
  const KvCachePtr kv = prefilled(30);  // 8 pages of layer 100
  kv->suspend(0);
  const KvCachePtr other = prefilled(32);  // 8 of 16
  const Snapshot before = snapshot();
  EXPECT_FALSE(kv->resume(0));  // 16 of 16 would be in use; max_util_for_resume is 0.97
  EXPECT_EQ(first_difference(before, snapshot()), "");
  EXPECT_TRUE(other->resize(32, 32, 0));
  other->close();
  EXPECT_TRUE(kv->resume(0));
  EXPECT_TRUE(holds_pages(*kv));
}

TEST_F(DenseRequestTest, AFullPoolGroupHoldsUpRequestsWithoutPagesToo) {
  const KvCachePtr full = prefilled(40);
  EXPECT_TRUE(full->resize(40, 40, 0));
  const KvCachePtr other = prefilled(24);  // 16 of 16
  const KvCachePtr fresh = request({kNeed, -1});
  EXPECT_FALSE(fresh->resume(0));
  other->close();
  EXPECT_TRUE(fresh->resume(0));
}

// --- suspend ---

TEST_F(DenseRequestTest, SuspendAndResumeKeepEveryByteWhateverIsInTheSlotsMeanwhile) {
  const KvCachePtr kv = seated(22);
  for (int i = 0; i < 5; ++i) decode({0});
  EXPECT_TRUE(kv->resize(27, 27, 0));  // what is stale has gone
  const std::vector<std::int64_t> with = free_slots();
  const std::vector<std::vector<std::int32_t>> tables = {kv->get_base_page_indices(group_of(100)),
                                                         kv->get_base_page_indices(group_of(101)),
                                                         kv->get_base_page_indices(group_of(102))};
  kv->suspend(0);
  EXPECT_EQ(kv->row(), std::nullopt);
  for (const std::int32_t group : pages->dense_groups()) {
    const std::vector<std::int32_t> table = kv->get_base_page_indices(group);
    EXPECT_EQ(std::ranges::count(table, -1), std::ssize(table));
    for (std::int32_t slot = 0; slot < kSlots; ++slot) pages->poison(group, slot);
  }
  EXPECT_TRUE(kv->resume(0));
  EXPECT_EQ(free_slots(), with);
  EXPECT_TRUE(holds_pages(*kv));
  for (const std::int32_t layer : {100, 101, 102}) {
    const std::vector<std::int32_t>& before = tables[static_cast<std::size_t>(layer - 100)];
    const std::vector<std::int32_t> table = kv->get_base_page_indices(group_of(layer));
    ASSERT_EQ(table.size(), before.size());
    for (std::size_t page = 0; page < table.size(); ++page)
      EXPECT_EQ(table[page] >= 0, before[page] >= 0) << "layer " << layer << ", page " << page;
  }
  batch->add(*kv);
  for (int i = 0; i < 5; ++i) decode({0});
  EXPECT_TRUE(holds_pages(*kv));
  expect_history(*kv);
}

TEST_F(DenseRequestTest, SuspendDropsPendingGrowthAndItsPages) {
  const KvCachePtr kv = seated(24);
  const std::vector<std::int64_t> before = free_slots();
  grow_tokens({{0, 26}});
  EXPECT_NE(free_slots(), before);
  kv->suspend(0);
  EXPECT_EQ(kv->capacity(), 24);
  EXPECT_TRUE(kv->resume(0));
  EXPECT_EQ(free_slots(), before);
}

TEST_F(DenseRequestTest, SuspendWithFullColdPoolsLeavesTheRequestActiveAndSaysSo) {
  const KvCachePtr asleep = prefilled(22);  // 3 + 3 of the 10 pages of the windows' cold pool
  asleep->suspend(0);
  const KvCachePtr last = seated(22);
  try {
    last->suspend(0);
    ADD_FAILURE() << "the cold pools had room";
  } catch (const OutOfPages& error) {
    EXPECT_NE(std::string(error.what()).find("cold_quota"), std::string::npos) << error.what();
  }
}

TEST_F(DenseRequestTest, ASuspendThatTheHostCannotTakeReservesNothing) {
  const KvCachePtr asleep = prefilled(22);
  asleep->suspend(0);
  const KvCachePtr kv = seated(22);
  expect_refused<OutOfPages>("KvCache.suspend", [&] { kv->suspend(0); });
  EXPECT_EQ(kv->state(), KvCacheState::kActive);
  decode({0});
  EXPECT_TRUE(holds_pages(*kv));
  asleep->close();
  kv->suspend(0);
  EXPECT_EQ(kv->state(), KvCacheState::kSuspended);
}

TEST_F(DenseRequestTest, ASuspendThatHostHistoryCannotTakeKeepsDensePagesToo) {
  const KvCachePtr kv = seated(24);
  fill_host(0);
  decode({0});
  expect_refused<OutOfPages>("KvCache.suspend", [&] { kv->suspend(0); });
  EXPECT_TRUE(holds_pages(*kv));
}

TEST_F(DenseRequestTest, SparseHistoryCostsASuspendOnlyItsWindow) {
  const KvCachePtr kv = seated(22);
  decode({0});
  decode({0});
  (void)manager->get_and_reset_copy_statistics();
  kv->suspend(0);
  // The first of the two was flushed by the second's publish.
  EXPECT_EQ(manager->get_and_reset_copy_statistics().units_to_host, 1);
}

TEST_F(DenseRequestTest, AClosedSuspendedRequestReturnsItsHostPages) {
  const std::vector<std::int64_t> fresh = free_slots();
  const KvCachePtr kv = prefilled(22);
  kv->suspend(0);
  EXPECT_NE(free_slots(), fresh);
  kv->close();
  EXPECT_EQ(free_slots(), fresh);
}

TEST_F(DenseRequestTest, EqualSlotNumbersOfDifferentTiersAreNotMixedUp) {
  // Slot 0 of each pool group, on the GPU and on the host, at the same time.
  const KvCachePtr kv = prefilled(4);
  kv->suspend(0);
  const KvCachePtr other = prefilled(4);
  EXPECT_EQ(other->get_base_page_indices(group_of(100)), std::vector<std::int32_t>{0});
  EXPECT_TRUE(kv->resume(0));
  EXPECT_TRUE(holds_pages(*kv));
  EXPECT_TRUE(holds_pages(*other));
  EXPECT_NE(kv->get_base_page_indices(group_of(100)), std::vector<std::int32_t>{0});
}

TEST_F(DenseRequestTest, AnyOrderOfAbortSuspendAndCloseLeaksNothing) {
  const std::vector<std::int64_t> fresh = free_slots();
  const std::vector<std::int64_t> fresh_occupancy = occupancy();
  std::vector<int> order = {0, 1, 2, 3};  // abort, suspend, close, close the Batch
  do {
    for (const int begun : {0, 1, 2}) {  // between steps, published, ready
      const KvCachePtr kv = seated(22);
      grow_tokens({{0, 23}});
      if (begun > 0) batch->publish(0);
      if (begun > 1) batch->wait_ready(0);
      for (const int what : order) {
        try {
          if (what == 0) batch->abort_step(0);
          if (what == 1) kv->suspend(0);
          if (what == 2) kv->close();
          if (what == 3) batch->close();
        } catch (const InvalidState&) {  // some orders make no sense
        }
      }
      EXPECT_EQ(free_slots(), fresh);
      EXPECT_EQ(occupancy(), fresh_occupancy);
      batch = make_batch({4, 64, kNoSlot});
    }
  } while (std::ranges::next_permutation(order).found);
}

// --- statistics ---

TEST_F(DenseRequestTest, StatisticsCountPagesPerGroupAndRequestAndCopiesApart) {
  const KvCachePtr kv = prefilled(22);
  const auto all = static_cast<std::size_t>(group_of(100));
  const auto window = static_cast<std::size_t>(group_of(101));
  std::vector<LayerGroupStatistics> mine = kv->get_and_reset_statistics();
  EXPECT_EQ(mine[all], (LayerGroupStatistics{6, 0, 0, 0, 0}));
  EXPECT_EQ(mine[window].num_taken, 3);
  (void)manager->get_and_reset_copy_statistics();
  kv->suspend(0);
  mine = kv->get_and_reset_statistics();
  EXPECT_EQ(mine[all], (LayerGroupStatistics{6, 6, 0, 6, 0}));
  EXPECT_TRUE(kv->resume(0));
  mine = kv->get_and_reset_statistics();
  EXPECT_EQ(mine[all], (LayerGroupStatistics{6, 6, 0, 0, 6}));
  const CopyStatistics copies = manager->get_and_reset_copy_statistics();
  EXPECT_EQ(copies.pages_to_host, 12);
  EXPECT_EQ(copies.pages_to_gpu, 12);
  EXPECT_EQ(copies.bytes_to_host, (6 * 128 + 6 * 192) << 10);
  EXPECT_EQ(copies.bytes_to_host, copies.bytes_to_gpu);
  EXPECT_EQ(manager->get_and_reset_copy_statistics(), CopyStatistics{});
}

TEST_F(DenseRequestTest, UtilisationIsThatOfEachPoolGroup) {
  const KvCachePtr kv = prefilled(22);
  const std::int32_t group = manager->storage()
                                 ->layout()
                                 .layer_groups()[static_cast<std::size_t>(group_of(100))]
                                 .pool_group;
  const PoolGroupUse use = manager->pool_group_use()[static_cast<std::size_t>(group)];
  EXPECT_EQ(use.slots.total, kSlots);
  EXPECT_EQ(use.level, kGpuLevel);
  EXPECT_DOUBLE_EQ(use.utilization, 6.0 / kSlots);
}

}  // namespace
}  // namespace sparse_kvcm::testing
