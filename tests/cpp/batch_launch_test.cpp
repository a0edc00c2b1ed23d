// Launches of a Batch: resolve and fetch, what they refuse, and what the device reports.
#include "engine_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

using Ints = std::vector<std::int32_t>;

class BatchLaunchTest : public EngineTest {
 protected:
  void resolve_with(std::int32_t group, std::int32_t b, std::int32_t k, std::int64_t stride) {
    const Ints cells(64, -1);
    batch->resolve(group, cells.data(), b, cells.data(), k, stride, {}, 0);
  }
  void fetch_with(std::int32_t group, std::int32_t b, std::int32_t k) {
    const Ints cells(64, -1);
    batch->fetch(group, cells.data(), b, k, {}, 0);
  }
};

TEST_F(BatchLaunchTest, ResolveRefusesABadGroupWidthOrRowCount) {
  seated(30);
  open();
  for (const std::int32_t group : {-1, 2})
    expect_refused<InvalidArgument>("Batch.resolve", [&] { resolve_with(group, 1, 1, 1); });
  for (const std::int32_t b : {-1, 5})
    expect_refused<InvalidArgument>("Batch.resolve", [&] { resolve_with(0, b, 1, 1); });
  for (const std::int32_t k : {-1, 0, kTopK + 1})
    expect_refused<InvalidArgument>("Batch.resolve", [&] { resolve_with(0, 1, k, 8); });
  expect_refused<InvalidArgument>("Batch.resolve", [&] { resolve_with(0, 2, 4, 3); });
}

TEST_F(BatchLaunchTest, FetchRefusesABadGroupWidthOrRowCount) {
  seated(30);
  open();
  for (const std::int32_t group : {-1, 2})
    expect_refused<InvalidArgument>("Batch.fetch", [&] { fetch_with(group, 1, 1); });
  for (const std::int32_t b : {-1, 5})
    expect_refused<InvalidArgument>("Batch.fetch", [&] { fetch_with(0, b, 1); });
  for (const std::int32_t k : {-1, 0, kTopK + 1})
    expect_refused<InvalidArgument>("Batch.fetch", [&] { fetch_with(0, 1, k); });
}

TEST_F(BatchLaunchTest, OutputsRefusesABadGroup) {
  for (const std::int32_t group : {-1, 2})
    expect_refused<InvalidArgument>("Batch.outputs", [&] { (void)batch->outputs(group); });
}

TEST_F(BatchLaunchTest, ALaunchOfNoRowsDoesNothing) {
  seated(30);
  open();
  const Snapshot before = snapshot();
  resolve_with(0, 0, 1, 1);
  fetch_with(0, 0, 1);
  EXPECT_EQ(first_difference(before, snapshot()), "");
}

TEST_F(BatchLaunchTest, AMissIsFetchedIntoEveryMemberLayer) {
  const KvCachePtr kv = seated(30);
  open();
  const Resolved got = resolve(0, 0, {17});
  EXPECT_EQ(got.misses, 1);
  EXPECT_FALSE(bytes->holds(0, got.slots[0], tag(*kv, 17)));
  fetch(0, 0, 1);
  EXPECT_TRUE(bytes->holds(0, got.slots[0], tag(*kv, 17)));
  EXPECT_TRUE(bytes->holds(1, got.slots[0], tag(*kv, 17)));
  EXPECT_FALSE(bytes->holds(2, got.slots[0], tag(*kv, 17)));  // the other group's
}

TEST_F(BatchLaunchTest, AFetchForSomeLayersWritesThoseAlone) {
  constexpr std::int32_t kLayers = 4;
  const Ints layers = {7, 3, 9, 1};
  KvCacheManagerConfig some = config();
  some.groups = {{layers, kTopK, UnitLayout({12, 4})}};
  for (std::uint32_t subset = 1; subset < 1U << kLayers; ++subset) {
    make(some);
    const KvCachePtr kv = seated(30);
    open();
    const std::int32_t slot = resolve(0, 0, {17}).slots[0];
    const UnitTag old{99, 17, 2};
    bytes->write_group(0, slot, old);
    Ints wanted;
    Ints others;
    for (std::int32_t m = 0; m < kLayers; ++m) {
      ((subset >> m & 1U) != 0 ? wanted : others).push_back(layers[static_cast<std::size_t>(m)]);
    }
    const std::int32_t row = 0;
    batch->fetch(0, &row, 1, 1, wanted, {}, 0);
    for (std::int32_t m = 0; m < kLayers; ++m) {
      const bool is_wanted = (subset >> m & 1U) != 0;
      EXPECT_TRUE(bytes->holds(m, slot, is_wanted ? tag(*kv, 17) : old)) << subset << ", " << m;
    }
    if (!others.empty()) batch->fetch(0, &row, 1, 1, others, {}, 0);
    EXPECT_TRUE(bytes->group_holds(0, slot, tag(*kv, 17))) << subset;
  }
}

TEST_F(BatchLaunchTest, FetchRefusesLayersThatAreNotTheGroupsOrRepeat) {
  seated(30);
  open();
  const std::int32_t row = 0;
  for (const Ints& layers : {Ints{5}, Ints{7, 5}, Ints{-1}, Ints{7, 7}, Ints{3, 7, 3}}) {
    expect_refused<InvalidArgument>("Batch.fetch",
                                    [&] { batch->fetch(0, &row, 1, 1, layers, {}, 0); });
  }
}

TEST_F(BatchLaunchTest, AWindowUnitIsReadWithoutAFetchEvenAfterItsFlush) {
  const KvCachePtr kv = seated(30);
  grow({{0, 31}});
  step({0});
  open();
  ASSERT_EQ(kv->watermark(), 31);
  const Resolved got = resolve(0, 0, {30});
  EXPECT_EQ(got.misses + got.hits, 0);
  EXPECT_EQ(got.slots[0], kv->lease()->base + kCached + 30 % kWindow);
  EXPECT_TRUE(bytes->group_holds(0, got.slots[0], tag(*kv, 30)));
}

TEST_F(BatchLaunchTest, WriteSlotsNameTheNewUnitsAndThenNothing) {
  const KvCachePtr kv = seated(30);
  grow({{0, 31}});
  open();
  const std::int32_t slot = kv->lease()->base + kCached + 30 % kWindow;
  EXPECT_EQ(resolve(0, 0, {-1}).write_slots, (Ints{slot, kNoSlot}));
}

TEST_F(BatchLaunchTest, WriteSlotsThatNameNoUnitCanBeTheTrashSlot) {
  const std::int32_t trash = manager->trash_slot();
  batch = make_batch({4, 64, trash});
  seated(30);
  grow({{0, 31}});
  open();
  EXPECT_EQ(resolve(0, 0, {-1}).write_slots[1], trash);
  EXPECT_EQ(resolve(0, kPaddingRow, {3}).write_slots, (Ints{trash, trash}));
  EXPECT_EQ(resolve(0, 2, {3}).write_slots, (Ints{trash, trash}));
  record({0});
  EXPECT_EQ(resolve(0, 0, {3}).write_slots, (Ints{trash, trash}));  // stale
}

TEST_F(BatchLaunchTest, PaddingRowsAreBlankAndNoError) {
  seated(30);
  open();
  const Resolved got = resolve(0, kPaddingRow, {1, 2});
  EXPECT_EQ(got.slots, (Ints{kNoSlot, kNoSlot}));
  EXPECT_EQ(got.misses + got.hits, 0);
  EXPECT_EQ(got.error, 0U);
  record({});
  const StepErrors errors = batch->take_errors();
  EXPECT_TRUE(errors.rows.empty());
  EXPECT_EQ(errors.batch, 0U);
}

TEST_F(BatchLaunchTest, InvalidRowsAreBlankAndABatchError) {
  seated(30);
  for (const std::int32_t row : {1, 4, 1 << 30, -2}) {
    open();
    EXPECT_EQ(resolve(0, row, {1}).slots, Ints{kNoSlot});
    EXPECT_EQ(resolve(1, row, {1}).error, 0U);
    record({});
    const StepErrors errors = batch->take_errors();
    EXPECT_TRUE(errors.rows.empty());
    EXPECT_EQ(errors.batch, kBatchErrorRow);
  }
}

TEST_F(BatchLaunchTest, BeforeTheFirstPublishNobodyIsSeatedOnTheDevice) {
  seated(30);
  EXPECT_EQ(resolve(0, 0, {1}).error, 0U);
  step({});
  const StepErrors errors = batch->take_errors();
  EXPECT_TRUE(errors.rows.empty());
  EXPECT_EQ(errors.batch, kBatchErrorRow);
}

TEST_F(BatchLaunchTest, OutputsFallBackToTheBatchsOwn) {
  const KvCachePtr kv = seated(30);
  open();
  Ints slots(2, 77);
  ResolveOutputs mine;
  mine.slots = slots.data();
  const Ints rows = {0};
  const Ints selection = {4, 9};
  batch->resolve(0, rows.data(), 1, selection.data(), 2, 2, mine, 0);
  EXPECT_EQ(*batch->outputs(0).miss_counts, 2);
  batch->fetch(0, rows.data(), 1, 2, mine, 0);
  EXPECT_TRUE(bytes->group_holds(0, slots[0], tag(*kv, 4)));
  EXPECT_TRUE(bytes->group_holds(0, slots[1], tag(*kv, 9)));
}

TEST_F(BatchLaunchTest, AnOrdinalOutOfRangeIsReportedWhenTheStepCloses) {
  seated(30);
  open();
  EXPECT_EQ(resolve(1, 0, {30, 5}).error, kErrorRange);
  fetch(1, 0, 2);
  EXPECT_TRUE(batch->take_errors().rows.empty());
  record({});
  const StepErrors errors = batch->take_errors();
  ASSERT_EQ(errors.rows.size(), 1U);
  EXPECT_EQ(errors.rows[0].row, 0);
  EXPECT_EQ(errors.rows[0].group, 1);
  EXPECT_EQ(errors.rows[0].bits, kErrorRange);
  EXPECT_EQ(errors.rows[0].clock, batch->clock());
  EXPECT_TRUE(batch->take_errors().rows.empty());  // once
}

TEST_F(BatchLaunchTest, AnAbortedStepReportsItsErrorsToo) {
  seated(30);
  open();
  resolve(0, 0, {-7});
  batch->abort_step(0);
  ASSERT_EQ(batch->take_errors().rows.size(), 1U);
}

TEST_F(BatchLaunchTest, AReplayWithoutAPublishIsStaleAndReportedOneStepLater) {
  const KvCachePtr kv = seated(30);
  open();
  launch(0, {1, 2});
  record({0});
  const Snapshot before = snapshot();
  const Resolved got = resolve(0, 0, {3, 4});
  EXPECT_EQ(got.slots, (Ints{kNoSlot, kNoSlot}));
  EXPECT_EQ(got.write_slots, (Ints{kNoSlot, kNoSlot}));
  EXPECT_EQ(got.misses + got.hits, 0);
  EXPECT_EQ(got.error, kErrorStale);
  EXPECT_EQ(first_difference(before, snapshot()), "");
  EXPECT_TRUE(batch->take_errors().rows.empty());
  step({0});
  const StepErrors errors = batch->take_errors();
  ASSERT_EQ(errors.rows.size(), 1U);
  EXPECT_EQ(errors.rows[0].bits, kErrorStale);
  EXPECT_EQ(errors.rows[0].clock, batch->clock());
}

TEST_F(BatchLaunchTest, ALaunchBetweenPublishAndWaitReadyIsStale) {
  seated(30);
  batch->publish(0);
  EXPECT_EQ(resolve(0, 0, {3}).error, kErrorStale);
  batch->wait_ready(0);
  launch(0, {3});  // served now
  record({0});
  ASSERT_EQ(batch->take_errors().rows.size(), 1U);
}

TEST_F(BatchLaunchTest, ASecondResolveOfARowInOneStepIsStale) {
  seated(30);
  open();
  launch(0, {1, 2});
  const Snapshot before = snapshot();
  EXPECT_EQ(resolve(0, 0, {3}).error, kErrorStale);
  EXPECT_EQ(first_difference(before, snapshot()), "");
  record({0});
  ASSERT_EQ(batch->take_errors().rows.size(), 1U);
}

TEST_F(BatchLaunchTest, ErrorsComeOldestFirst) {
  seated(30);
  seated(30);
  for (const std::int32_t row : {1, 0}) {
    open();
    resolve(0, row, {99});
    record({});
  }
  const StepErrors errors = batch->take_errors();
  ASSERT_EQ(errors.rows.size(), 2U);
  EXPECT_EQ(errors.rows[0].row, 1);
  EXPECT_EQ(errors.rows[1].row, 0);
  EXPECT_EQ(errors.rows[0].clock + 1, errors.rows[1].clock);
}

TEST_F(BatchLaunchTest, ErrorsThatNobodyTakesAreNotLost) {
  seated(30);
  seated(30);
  for (std::int32_t n = 0; n < 300; ++n) {
    open();
    resolve(0, n < 299 ? 0 : 1, {99});
    record({});
  }
  std::uint32_t rows_seen = 0;
  for (std::int32_t n = 0; n < 3; ++n) {
    for (const StepError& error : batch->take_errors().rows) rows_seen |= 1U << error.row;
    step({});
  }
  EXPECT_EQ(rows_seen, 3U);
}

TEST_F(BatchLaunchTest, ARowClosedInTheStepIsReadableUntilItEnds) {
  const KvCachePtr kv = seated(30);
  open();
  const UnitTag unit = tag(*kv, 12);
  kv->close();
  const Resolved got = resolve(0, 0, {12});
  fetch(0, 0, 1);
  EXPECT_TRUE(bytes->group_holds(0, got.slots[0], unit));
  record({});
}

}  // namespace
}  // namespace sparse_kvcm::testing
