// reserve_history, write_history, commit_history: units that arrive in layer-major pages.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine_fixture.hpp"
#include "manager/request.hpp"

namespace sparse_kvcm::testing {
namespace {

class KvCacheReceiveTest : public EngineTest {
 protected:
  // Pages of one group as a prefill's pools hold them, units [first, first + count).
  struct Source {
    std::vector<std::vector<std::byte>> memory;
    std::vector<RegionPages> regions;
    HistoryPages pages;
  };

  Source source(const KvCache& cache, std::int32_t group, std::int32_t first, std::int32_t count,
                std::int32_t units_per_page) {
    Source made;
    std::vector<UnitTag> tags;
    for (std::int32_t u = 0; u < count; ++u) tags.push_back(tag(cache, first + u));
    const auto& region_bytes =
        manager->config().groups[static_cast<std::size_t>(group)].layout.region_bytes();
    for (std::int32_t l = bytes->first_layer(group); l < bytes->last_layer(group); ++l) {
      const std::vector<std::byte> rows = bytes->rows(l, tags, 0);
      const std::int64_t unit = bytes->unit_bytes(l);
      std::int64_t begin = 0;
      for (const std::int32_t size : region_bytes) {
        std::vector<std::byte> dense;
        for (std::int32_t u = 0; u < count; ++u) {
          const auto from = rows.begin() + u * unit + begin;
          dense.insert(dense.end(), from, from + size);
        }
        begin += size;
        made.regions.push_back({dense.data(), std::int64_t{units_per_page} * size});
        made.memory.push_back(std::move(dense));
      }
    }
    made.pages = {first, count, units_per_page, made.regions};
    return made;
  }

  void write(KvCache& cache, std::int32_t group, std::int32_t first, std::int32_t count,
             std::int32_t units_per_page = kPage) {
    cache.write_history(group, source(cache, group, first, count, units_per_page).pages);
  }
  void write_all(KvCache& cache, std::int32_t first, std::int32_t count) {
    for (const std::int32_t group : {0, 1}) write(cache, group, first, count);
  }
  // ACTIVE, with `count` received units.
  KvCachePtr received(std::int32_t count, std::int32_t need = kNeed) {
    const KvCachePtr kv = request({need, -1});
    EXPECT_TRUE(kv->resume(0));
    EXPECT_TRUE(kv->reserve_history(count));
    write_all(*kv, 0, count);
    kv->commit_history(0);
    return kv;
  }
};

TEST_F(KvCacheReceiveTest, PagesOfAnySizeInAnyOrderBecomeHostRows) {
  for (const std::int32_t page : {1, 3, kPage, kPage + 1, 32}) {
    const KvCachePtr kv = request({kNeed, -1});
    ASSERT_TRUE(kv->reserve_history(22));
    for (const std::int32_t group : {1, 0}) {
      write(*kv, group, 9, 13, page);
      write(*kv, group, 0, 9, page);
    }
    kv->commit_history(0);
    EXPECT_EQ(kv->watermark(), 22);
    EXPECT_EQ(kv->history_length(), 22);
    expect_history(*kv);
    kv->close();
  }
}

TEST_F(KvCacheReceiveTest, NobodyCanReadUnitsBeforeTheyAreCommitted) {
  const KvCachePtr kv = request({kNeed, -1});
  ASSERT_TRUE(kv->reserve_history(9));
  write_all(*kv, 0, 9);
  EXPECT_TRUE(kv->is_receiving());
  EXPECT_EQ(kv->watermark(), 0);
  EXPECT_EQ(kv->length(), 0);
  kv->commit_history(0);
  EXPECT_FALSE(kv->is_receiving());
  EXPECT_EQ(kv->length(), 9);
}

TEST_F(KvCacheReceiveTest, TheNewestUnitsLandInTheWindowAndOthersAreFetched) {
  const KvCachePtr kv = received(22);
  EXPECT_EQ(kv->window_begin(), 22 - kWindow);
  batch->add(*kv);
  open();
  launch(*kv->row(), {21, 22 - kWindow, 3});
  EXPECT_EQ(*batch->outputs(0).miss_counts, 1);
  record({*kv->row()});
}

TEST_F(KvCacheReceiveTest, AHistoryShorterThanTheWindowLandsThereWhole) {
  const KvCachePtr kv = received(3);
  EXPECT_EQ(kv->window_begin(), 0);
  batch->add(*kv);
  open();
  launch(*kv->row(), {0, 2});
  EXPECT_EQ(*batch->outputs(0).miss_counts, 0);
}

TEST_F(KvCacheReceiveTest, AnAllWindowLeaseIsLoadedWhole) {
  const KvCachePtr kv = received(kCached + 1, kCached + kWindow);
  EXPECT_EQ(kv->window_begin(), 0);
  for (std::int32_t o = 0; o <= kCached; ++o)
    for (const std::int32_t group : {0, 1})
      EXPECT_TRUE(bytes->group_holds(group, kv->lease()->base + o, tag(*kv, o)));
}

TEST_F(KvCacheReceiveTest, WhatIsReceivedBehindAHistoryKeepsItsWindow) {
  const KvCachePtr kv = active(5);
  ASSERT_TRUE(kv->reserve_history(kWindow - 1));
  write_all(*kv, 5, kWindow - 1);
  kv->commit_history(0);
  EXPECT_EQ(kv->window_begin(), 5);  // where the lease began
  expect_history(*kv);
  batch->add(*kv);
  open();
  launch(*kv->row(), {4, 5, 5 + kWindow - 2});
  EXPECT_EQ(*batch->outputs(0).miss_counts, 1);
}

TEST_F(KvCacheReceiveTest, AReceivedRequestDecodesAndSuspends) {
  const KvCachePtr kv = received(22);
  batch->add(*kv);
  for (std::int32_t n = 23; n < 23 + 2 * kWindow; ++n) {
    grow({{*kv->row(), n}});
    step({*kv->row()});
  }
  kv->suspend(0);
  EXPECT_EQ(kv->watermark(), 22 + 2 * kWindow);
  expect_history(*kv);
}

TEST_F(KvCacheReceiveTest, ReserveTakesPagesAtOnceOrNone) {
  const KvCachePtr kv = request({kNeed, -1});
  fill_host(2);
  const Snapshot before = snapshot();
  EXPECT_FALSE(kv->reserve_history(2 * kPage + 1));
  EXPECT_EQ(first_difference(before, snapshot()), "");
  EXPECT_FALSE(kv->is_receiving());
  EXPECT_TRUE(kv->reserve_history(2 * kPage));
  EXPECT_EQ(manager->occupancy().free_host_pages, 0);
}

TEST_F(KvCacheReceiveTest, CloseGivesReservedPagesBack) {
  const std::vector<std::int64_t> before = occupancy();
  const KvCachePtr kv = request({kNeed, -1});
  ASSERT_TRUE(kv->resume(0));
  ASSERT_TRUE(kv->reserve_history(22));
  write(*kv, 0, 4, 9);
  kv->close();
  EXPECT_EQ(occupancy(), before);
}

TEST_F(KvCacheReceiveTest, PagesThatAreWrittenGoBackWhenTheLastWriterIsOut) {
  const std::vector<std::int64_t> before = occupancy();
  const KvCachePtr kv = request({kNeed, -1});
  ASSERT_TRUE(kv->reserve_history(22));
  const std::shared_ptr<Request> inside = kv->request();
  const Source one = source(*kv, 0, 0, 4, kPage);
  const Source other = source(*kv, 0, 4, 4, kPage);
  static_cast<void>(inside->begin_write(0, one.pages));
  static_cast<void>(inside->begin_write(0, other.pages));
  kv->close();
  inside->end_write();
  EXPECT_EQ(occupancy()[0], before[0] - 6);
  inside->drop_write(0, other.pages);
  EXPECT_EQ(occupancy(), before);
}

TEST_F(KvCacheReceiveTest, CommitIsRefusedUntilEveryUnitIsThereOnce) {
  const KvCachePtr kv = request({kNeed, -1});
  ASSERT_TRUE(kv->reserve_history(9));
  const auto refused = [&] {
    expect_refused<InvalidState>("KvCache.commit_history", [&] { kv->commit_history(0); });
  };
  refused();
  write(*kv, 0, 0, 9);
  write(*kv, 1, 0, 8);
  refused();
  const Source last = source(*kv, 1, 8, 1, kPage);
  static_cast<void>(kv->request()->begin_write(1, last.pages));
  refused();  // under way
  kv->request()->drop_write(1, last.pages);
  refused();  // and failed
  write(*kv, 1, 8, 1);
  kv->commit_history(0);
  expect_history(*kv);
  refused();  // it is not receiving any more
}

// Else some written twice would stand for others that never came.
TEST_F(KvCacheReceiveTest, AUnitIsWrittenOnce) {
  const KvCachePtr kv = request({kNeed, -1});
  ASSERT_TRUE(kv->reserve_history(9));
  write(*kv, 0, 0, 4);
  for (const auto& [first, units] :
       std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 4}, {3, 1}, {3, 6}, {0, 9}}) {
    const Source again = source(*kv, 0, first, units, kPage);
    expect_refused<InvalidArgument>("KvCache.write_history",
                                    [&] { kv->write_history(0, again.pages); });
  }
  write(*kv, 1, 0, 9);
  expect_refused<InvalidState>("KvCache.commit_history", [&] { kv->commit_history(0); });
  write(*kv, 0, 4, 5);
  kv->commit_history(0);
  expect_history(*kv);
}

TEST_F(KvCacheReceiveTest, OtherCallsAreRefusedWhileReceiving) {
  const KvCachePtr kv = active(5);
  ASSERT_TRUE(kv->reserve_history(9));
  expect_refused<InvalidState>("KvCache.reserve_history",
                               [&] { static_cast<void>(kv->reserve_history(1)); });
  expect_refused<InvalidState>("KvCache.resize", [&] { static_cast<void>(kv->resize(6, 5, 0)); });
  expect_refused<InvalidState>("KvCache.suspend", [&] { kv->suspend(0); });
  expect_refused<InvalidState>("KvCache.import_history", [&] { kv->import_history({}, 0, 0); });
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
}

TEST_F(KvCacheReceiveTest, ReserveIsRefusedForUnitsPastTheNeedAndInTheWrongState) {
  const KvCachePtr kv = seated(5);
  const auto reserve = [&](std::int32_t n) { static_cast<void>(kv->reserve_history(n)); };
  expect_refused<InvalidState>("KvCache.reserve_history", [&] { reserve(1); });
  batch->remove(*kv);
  for (const std::int32_t n : {0, -1, kNeed - 4, kMaxUnits})
    expect_refused<InvalidArgument>("KvCache.reserve_history", [&] { reserve(n); });
  kv->close();
  expect_refused<InvalidState>("KvCache.reserve_history", [&] { reserve(1); });
}

TEST_F(KvCacheReceiveTest, WriteIsRefusedForWhatIsNotReservedOrDoesNotFit) {
  const KvCachePtr kv = active(5);
  const Source good = source(*kv, 0, 5, 2 * kPage, kPage);
  const auto refused = [&](std::int32_t group, const HistoryPages& pages) {
    expect_refused<InvalidArgument>("KvCache.write_history",
                                    [&] { kv->write_history(group, pages); });
  };
  expect_refused<InvalidState>("KvCache.write_history", [&] { kv->write_history(0, good.pages); });
  ASSERT_TRUE(kv->reserve_history(2 * kPage));
  for (const std::int32_t group : {-1, 1, 2}) refused(group, good.pages);
  for (const auto& [first, units] : std::vector<std::pair<std::int32_t, std::int32_t>>{
           {4, 1}, {6, 2 * kPage}, {5, -1}, {kMaxUnits, 1}, {5, 0x7FFFFFFF}}) {
    refused(0, {first, units, kPage, good.regions});
  }
  for (const std::int32_t page : {0, -1, kMaxPageTokens + 1})
    refused(0, {5, 1, page, good.regions});
  std::vector<RegionPages> bad = good.regions;
  bad[3].page_stride -= 1;
  refused(0, {5, kPage + 1, kPage, bad});
  bad = good.regions;
  bad[2].data = nullptr;
  refused(0, {5, 1, kPage, bad});
  kv->write_history(0, good.pages);
  write(*kv, 1, 5, 2 * kPage);
  kv->commit_history(0);
  expect_history(*kv);
}

}  // namespace
}  // namespace sparse_kvcm::testing
