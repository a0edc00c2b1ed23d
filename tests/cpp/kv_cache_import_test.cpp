// import_history: prompts and received transfers.
#include "engine_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

class KvCacheImportTest : public EngineTest {
 protected:
  KvCacheImportTest() {
    for (std::int32_t layer = 0; layer < 3; ++layer)
      good_.push_back({zeros_.data(), bytes->unit_bytes(layer)});
  }

  std::vector<std::byte> zeros_ = std::vector<std::byte>(4096);
  std::vector<UnitRows> good_;
};

TEST_F(KvCacheImportTest, AppendsToHostHistory) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);
  import(*kv, 6);
  EXPECT_EQ(kv->length(), 11);
  EXPECT_EQ(kv->committed_length(), 11);
  EXPECT_EQ(kv->watermark(), 11);
  EXPECT_EQ(kv->host_pages().size(), 3U);
  expect_history(*kv);
}

TEST_F(KvCacheImportTest, RowsMayBeWiderThanUnits) {
  const KvCachePtr kv = request({kNeed, -1});
  std::vector<UnitTag> tags;
  for (std::int32_t o = 0; o < 6; ++o) tags.push_back(tag(*kv, o));
  std::vector<std::vector<std::byte>> rows;
  std::vector<UnitRows> layers;
  for (std::int32_t layer = 0; layer < 3; ++layer) {
    rows.push_back(bytes->rows(layer, tags, 12 * layer));
    layers.push_back({rows.back().data(), bytes->unit_bytes(layer) + 12 * layer});
  }
  kv->import_history(layers, 6, 0);
  expect_history(*kv);
}

TEST_F(KvCacheImportTest, TheSourceMayBeReusedWhenTheCallReturns) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);  // its rows are gone by now
  ASSERT_TRUE(kv->resume(0));
  batch->add(*kv);
  open();
  launch(0, {0, 1, 4});
}

TEST_F(KvCacheImportTest, AnActiveRequestFetchesWhatWasImportedAndKeepsItsEntries) {
  const KvCachePtr kv = seated(20);
  open();
  launch(0, {1, 2});
  record({0});
  import(*kv, 10);
  EXPECT_EQ(kv->window_begin(), 30);
  open();
  launch(0, {1, 2, 25, 29});
  EXPECT_EQ(*batch->outputs(0).hit_counts, 2);
  EXPECT_EQ(*batch->outputs(0).miss_counts, 2);
}

TEST_F(KvCacheImportTest, WhatTheWindowHeldBeforeAnImportIsFetchedAfterIt) {
  const KvCachePtr kv = seated(20);
  grow({{0, 21}});
  step({0});
  batch->publish(0);  // flushes unit 20
  record({});
  import(*kv, 3);
  EXPECT_EQ(kv->window_begin(), 24);
  open();
  launch(0, {20});
  EXPECT_EQ(*batch->outputs(0).miss_counts, 1);
}

TEST_F(KvCacheImportTest, AnAllWindowLeaseIsLoadedAtOnce) {
  const KvCachePtr kv = seated(3, kCached + kWindow);
  import(*kv, 7);
  EXPECT_EQ(kv->window_begin(), 0);
  for (std::int32_t o = 0; o < 10; ++o)
    for (const std::int32_t group : {0, 1})
      EXPECT_TRUE(bytes->group_holds(group, kv->lease()->base + o, tag(*kv, o)));
}

TEST_F(KvCacheImportTest, ARequestWithoutHistoryGrowsFromNothing) {
  const KvCachePtr kv = seated(0);
  grow({{0, 1}});
  open();
  launch(0, {0});
  record({0});
  EXPECT_EQ(kv->committed_length(), 1);
}

TEST_F(KvCacheImportTest, ImportOfNoUnitsChangesNothing) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);
  const Snapshot before = snapshot();
  kv->import_history(good_, 0, 0);
  EXPECT_EQ(first_difference(before, snapshot()), "");
}

TEST_F(KvCacheImportTest, RefusesAWrongNumberOfLayers) {
  const KvCachePtr kv = request({kNeed, -1});
  good_.pop_back();
  expect_refused<InvalidArgument>("KvCache.import_history",
                                  [&] { kv->import_history(good_, 4, 0); });
  expect_refused<InvalidArgument>("KvCache.import_history", [&] { kv->import_history({}, 4, 0); });
}

TEST_F(KvCacheImportTest, RefusesNullData) {
  const KvCachePtr kv = request({kNeed, -1});
  good_[2].data = nullptr;
  expect_refused<InvalidArgument>("KvCache.import_history",
                                  [&] { kv->import_history(good_, 4, 0); });
}

TEST_F(KvCacheImportTest, RefusesAStrideShorterThanAUnit) {
  const KvCachePtr kv = request({kNeed, -1});
  for (const std::int64_t stride : {std::int64_t{15}, std::int64_t{0}, std::int64_t{-16}}) {
    good_[1].row_stride = stride;
    expect_refused<InvalidArgument>("KvCache.import_history",
                                    [&] { kv->import_history(good_, 4, 0); });
  }
}

TEST_F(KvCacheImportTest, RefusesUnitsPastTheNeedAndNegativeOnes) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);
  for (const std::int32_t units : {kNeed - 4, kMaxUnits, -1})
    expect_refused<InvalidArgument>("KvCache.import_history",
                                    [&] { kv->import_history(good_, units, 0); });
  import(*kv, kNeed - 5);
  EXPECT_EQ(kv->length(), kNeed);
}

TEST_F(KvCacheImportTest, AllOfItOrNothingWhenHostHistoryIsFull) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);
  fill_host(1);
  expect_refused<OutOfPages>("KvCache.import_history",
                             [&] { kv->import_history(good_, 2 * kPage, 0); });
  import(*kv, 2 * kPage - 5 + kPage);
  expect_history(*kv);
}

TEST_F(KvCacheImportTest, IsRefusedWhenClosed) {
  const KvCachePtr kv = request({kNeed, -1});
  kv->close();
  expect_refused<InvalidState>("KvCache.import_history", [&] { kv->import_history(good_, 4, 0); });
}

TEST_F(KvCacheImportTest, IsRefusedInAnOpenStep) {
  const KvCachePtr kv = seated(5);
  batch->publish(0);
  expect_refused<InvalidState>("KvCache.import_history", [&] { kv->import_history(good_, 4, 0); });
}

TEST_F(KvCacheImportTest, IsRefusedWithGrowthPending) {
  const KvCachePtr kv = seated(5);
  grow({{0, 6}});
  expect_refused<InvalidState>("KvCache.import_history", [&] { kv->import_history(good_, 4, 0); });
}

TEST_F(KvCacheImportTest, IsRefusedWithTheWatermarkBelowTheCommittedLength) {
  const KvCachePtr kv = seated(5);
  grow({{0, 6}});
  step({0});
  expect_refused<InvalidState>("KvCache.import_history", [&] { kv->import_history(good_, 4, 0); });
}

}  // namespace
}  // namespace sparse_kvcm::testing
