// Steps of a Batch: resize, publish, wait_ready, record_read, abort_step.
#include "engine_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

using Rows = std::vector<std::int32_t>;
using Results = std::vector<ResizeResult>;

class BatchStepTest : public EngineTest {
 protected:
  Results resize(const std::vector<RowLength>& lengths) { return batch->resize(lengths); }
};

// --- resize ---

TEST_F(BatchStepTest, ResizeSetsTheLengthAndTakesHostPagesAtOnce) {
  const KvCachePtr kv = seated(kPage);
  EXPECT_EQ(resize({{0, kPage + 2}}), Results{ResizeResult::kOk});
  EXPECT_EQ(kv->length(), kPage + 2);
  EXPECT_EQ(kv->committed_length(), kPage);
  EXPECT_EQ(kv->host_pages().size(), 2U);
}

TEST_F(BatchStepTest, ResizeBackDropsTheGrowthAndItsPages) {
  const KvCachePtr kv = seated(kPage);
  const std::vector<std::int64_t> before = occupancy();
  grow({{0, kPage + 2}});
  grow({{0, kPage}});
  EXPECT_EQ(kv->length(), kPage);
  EXPECT_EQ(occupancy(), before);
}

TEST_F(BatchStepTest, ResizeRefusesOneRowWithoutAffectingTheOthers) {
  const KvCachePtr at_need = seated(kNeed);
  const KvCachePtr other = seated(5);
  const KvCachePtr greedy = seated(5);
  EXPECT_EQ(resize({{0, kNeed + 1}, {1, 7}, {2, 8}}),
            (Results{ResizeResult::kPastNeed, ResizeResult::kOk, ResizeResult::kPastNewUnits}));
  EXPECT_EQ(at_need->length(), kNeed);
  EXPECT_EQ(other->length(), 7);
  EXPECT_EQ(greedy->length(), 5);
}

TEST_F(BatchStepTest, ResizeStopsOneWindowPastTheWatermarkWhenHostHistoryIsFull) {
  const KvCachePtr kv = seated(2 * kPage);  // its pages are full
  fill_host(0);
  for (std::int32_t length = 2 * kPage + 1; length <= 2 * kPage + kWindow; ++length) {
    grow({{0, length}});
    step({0});
  }
  EXPECT_EQ(kv->watermark(), 2 * kPage);
  EXPECT_EQ(kv->committed_length(), 2 * kPage + kWindow);
  EXPECT_EQ(resize({{0, 2 * kPage + kWindow + 1}}), Results{ResizeResult::kPastWindow});
  EXPECT_EQ(kv->length(), 2 * kPage + kWindow);
  EXPECT_EQ(kv->host_pages().size(), 2U);
}

TEST_F(BatchStepTest, ARowThatWasRefusedLeavesFreePagesToTheOthers) {
  const KvCachePtr kv = seated(2 * kPage);
  fill_host(0);
  for (std::int32_t length = 2 * kPage + 1; length <= 2 * kPage + kWindow; ++length) {
    grow({{0, length}});
    step({0});
  }
  EXPECT_EQ(resize({{0, kNeed + 1}}), Results{ResizeResult::kPastNeed});
  fillers.pop_back();
  EXPECT_EQ(resize({{0, kNeed + 1}}), Results{ResizeResult::kPastNeed});
  EXPECT_EQ(manager->occupancy().free_host_pages, 1);
  EXPECT_EQ(resize({{0, 2 * kPage + kWindow + 1}}), Results{ResizeResult::kOk});
}

TEST_F(BatchStepTest, ResizeToACommittedLengthIsAlwaysPossible) {
  seated(2 * kPage);
  fill_host(0);
  EXPECT_EQ(resize({{0, 2 * kPage}}), Results{ResizeResult::kOk});
}

TEST_F(BatchStepTest, ResizeOfNoRowsIsANoOp) {
  const Snapshot before = snapshot();
  EXPECT_TRUE(resize({}).empty());
  EXPECT_EQ(first_difference(before, snapshot()), "");
}

TEST_F(BatchStepTest, ResizeRefusesRowsThatItCannotName) {
  seated(5);
  seated(5);
  for (const std::int32_t row : {-1, 2, 4})  // out of range, unseated, out of range
    expect_refused<InvalidArgument>("Batch.resize", [&] { resize({{0, 6}, {row, 6}}); });
  expect_refused<InvalidArgument>("Batch.resize", [&] { resize({{0, 6}, {1, 6}, {0, 6}}); });
}

TEST_F(BatchStepTest, ResizeRefusesALengthBelowTheCommittedOne) {
  seated(5);
  seated(5);
  expect_refused<InvalidArgument>("Batch.resize", [&] { resize({{1, 6}, {0, 4}}); });
  expect_refused<InvalidArgument>("Batch.resize", [&] { resize({{1, 6}, {0, -1}}); });
}

TEST_F(BatchStepTest, ResizeDuringAnOpenStepIsRefused) {
  seated(5);
  batch->publish(0);
  expect_refused<InvalidState>("Batch.resize", [&] { resize({{0, 6}}); });
}

// --- publish ---

TEST_F(BatchStepTest, PublishOfAnEmptyBatchOpensAStep) {
  const std::uint32_t clock = batch->clock();
  batch->publish(0);
  EXPECT_TRUE(batch->step_open());
  EXPECT_EQ(batch->clock(), clock + 1);
  batch->wait_ready(0);
  record({});
  EXPECT_FALSE(batch->step_open());
}

TEST_F(BatchStepTest, PublishRaisesTheWatermarkToTheCommittedLength) {
  const KvCachePtr kv = seated(5);
  grow({{0, 7}});
  step({0});
  EXPECT_EQ(kv->watermark(), 5);
  batch->publish(0);
  EXPECT_EQ(kv->watermark(), 7);
  expect_history(*kv);
}

TEST_F(BatchStepTest, PublishFlushesLateOncePagesCanBeHad) {
  const KvCachePtr kv = seated(kPage);
  fill_host(0);
  grow({{0, kPage + 2}});
  step({0});
  batch->publish(0);
  EXPECT_EQ(kv->watermark(), kPage);  // nowhere to go
  record({});
  fillers.pop_back();
  EXPECT_EQ(batch->publish(0), Rows{0});
  EXPECT_EQ(kv->watermark(), kPage + 2);
  expect_history(*kv);
}

TEST_F(BatchStepTest, PublishMovesTheWindowWithTheLength) {
  const KvCachePtr kv = seated(5);
  EXPECT_EQ(kv->window_begin(), 5);
  for (std::int32_t length = 6; length <= 5 + kWindow + 3; ++length) {
    grow({{0, length}});
    EXPECT_EQ(kv->window_begin(), std::max(5, length - 1 - kWindow));
    step({0});
    EXPECT_EQ(kv->window_begin(), std::max(5, length - kWindow));
  }
}

TEST_F(BatchStepTest, PublishUploadsWhatChangedAndNothingElse) {
  const KvCachePtr first = seated(5);
  seated(5);
  batch->publish(0);
  record({});
  EXPECT_EQ(batch->dirty_rows(), Rows{});
  EXPECT_EQ(batch->publish(0), Rows{});
  record({});
  grow({{1, 6}});
  EXPECT_EQ(batch->dirty_rows(), Rows{1});
  EXPECT_EQ(batch->publish(0), Rows{1});
  record({});  // takes the growth back
  batch->remove(*first);
  EXPECT_EQ(batch->dirty_rows(), (Rows{0, 1}));
  EXPECT_EQ(batch->publish(0), (Rows{0, 1}));
}

TEST_F(BatchStepTest, PublishWritesRowStatesAndPageTable) {
  const KvCachePtr kv = seated(9);
  grow({{0, 10}});
  batch->publish(0);
  const Lease lease = *kv->lease();
  EXPECT_EQ(batch->row_states_address()[0],
            (RowState{lease.id, lease.base, kCached, kWindow, 10, 9, 9, 9}));
  const std::int32_t* table = batch->page_table_address();
  EXPECT_EQ(Rows(table, table + 3), kv->host_pages());
  EXPECT_EQ(Rows(table + 3, table + batch->max_pages()), Rows(13, kNoPage));
  for (std::int32_t row = 1; row < 4; ++row)
    EXPECT_EQ(batch->row_states_address()[row], RowState{});
}

TEST_F(BatchStepTest, DeviceAddressesStayForTheLifeOfTheBatch) {
  const RowState* states = batch->row_states_address();
  const std::int32_t* table = batch->page_table_address();
  const std::int32_t* slots = batch->outputs(1).slots;
  seated(30);
  step({0});
  EXPECT_EQ(batch->row_states_address(), states);
  EXPECT_EQ(batch->page_table_address(), table);
  EXPECT_EQ(batch->outputs(1).slots, slots);
}

TEST_F(BatchStepTest, PublishDuringAnOpenStepIsRefusedAndChangesNothing) {
  seated(5);
  grow({{0, 6}});
  batch->publish(0);
  seated(7);  // a dirty row
  expect_refused<InvalidState>("Batch.publish", [&] { batch->publish(0); });
  batch->wait_ready(0);
  expect_refused<InvalidState>("Batch.publish", [&] { batch->publish(0); });
}

TEST_F(BatchStepTest, ClocksOfBatchesAreTheirOwn) {
  const BatchPtr other = make_batch({2, 64, kNoSlot});
  step({});
  step({});
  EXPECT_EQ(batch->clock(), other->clock() + 2);
}

// --- wait_ready ---

TEST_F(BatchStepTest, WaitReadyWithoutAnOpenStepIsRefused) {
  expect_refused<InvalidState>("Batch.wait_ready", [&] { batch->wait_ready(0); });
  step({});
  expect_refused<InvalidState>("Batch.wait_ready", [&] { batch->wait_ready(0); });
}

TEST_F(BatchStepTest, SeveralStreamsMayWait) {
  seated(30);
  batch->publish(0);
  batch->wait_ready(0);
  batch->wait_ready(0);
  launch(0, {1, 2, 3, 29});
  record({0});
}

// --- record_read ---

TEST_F(BatchStepTest, RecordReadCommitsTheRowsThatItNames) {
  const KvCachePtr named = seated(5);
  const KvCachePtr left_out = seated(5);
  grow({{0, 7}, {1, 7}});
  open();
  launch(0);
  launch(1);
  record({0});
  EXPECT_EQ(named->committed_length(), 7);
  EXPECT_EQ(left_out->committed_length(), 5);
  EXPECT_EQ(left_out->length(), 5);
  EXPECT_EQ(left_out->watermark(), 5);
  EXPECT_FALSE(batch->step_open());
}

TEST_F(BatchStepTest, RecordReadWithoutGrowthCommitsNothing) {
  const KvCachePtr kv = seated(5);
  step({0});
  EXPECT_EQ(kv->committed_length(), 5);
  EXPECT_EQ(kv->length(), 5);
}

TEST_F(BatchStepTest, RecordReadWithoutAnOpenStepIsRefused) {
  seated(5);
  expect_refused<InvalidState>("Batch.record_read", [&] { record({0}); });
  step({0});
  expect_refused<InvalidState>("Batch.record_read", [&] { record({0}); });
}

TEST_F(BatchStepTest, RecordReadRefusesRowsThatWereNotSeatedAtPublish) {
  seated(5);
  grow({{0, 6}});
  open();
  launch(0);
  seated(5);
  for (const std::int32_t row : {-1, 1, 2, 4})
    expect_refused<InvalidArgument>("Batch.record_read", [&] { record({0, row}); });
  record({0});
}

TEST_F(BatchStepTest, RecordReadRefusesARowThatIsNamedTwice) {
  seated(5);
  grow({{0, 6}});
  open();
  launch(0);
  expect_refused<InvalidArgument>("Batch.record_read", [&] { record({0, 0}); });
}

TEST_F(BatchStepTest, RecordReadSkipsARequestThatHasBeenClosed) {
  const KvCachePtr kv = seated(5);
  const KvCachePtr other = seated(5);
  grow({{0, 6}, {1, 6}});
  open();
  launch(0);
  launch(1);
  kv->close();
  record({0, 1});
  EXPECT_EQ(kv->state(), KvCacheState::kClosed);
  EXPECT_EQ(other->committed_length(), 6);
}

// --- abort_step ---

TEST_F(BatchStepTest, AbortGivesLengthsBackAndEmptiesEntries) {
  const KvCachePtr kv = seated(30);
  open();
  launch(0, {1, 2, 3, 4});
  record({0});
  grow({{0, 32}});
  open();
  const std::uint32_t clock = batch->clock();
  const std::int32_t window_begin = kv->window_begin();
  launch(0, {1, 2, 9, 10});
  bytes->poison_slots(kv->lease()->base, kCached);
  batch->abort_step(0);
  EXPECT_EQ(kv->length(), 30);
  EXPECT_EQ(kv->committed_length(), 30);
  EXPECT_EQ(kv->window_begin(), window_begin);
  EXPECT_EQ(batch->clock(), clock);
  for (const std::int32_t group : {0, 1})
    EXPECT_EQ(kv->decode_entries(group), std::vector<DecodedEntry>(kCached));
  open();
  launch(0, {1, 2, 3, 4});  // fetched again, byte for byte
  EXPECT_EQ(*batch->outputs(0).hit_counts, 0);
}

TEST_F(BatchStepTest, AbortKeepsTheWindowThatAFailedStepMayHaveOverwritten) {
  const KvCachePtr kv = seated(10);
  for (std::int32_t length = 11; length <= 10 + kWindow; ++length) {
    grow({{0, length}});
    step({0});
  }
  EXPECT_EQ(kv->window_begin(), 10);
  grow({{0, 10 + kWindow + 1}});
  open();
  launch(0);  // the new unit lies where unit 10 lay
  batch->abort_step(0);
  EXPECT_EQ(kv->window_begin(), 11);
  open();
  launch(0, {10, 11, 10 + kWindow - 1, -1});  // unit 10 comes from the host now
  EXPECT_EQ(*batch->outputs(0).miss_counts, 1);
}

TEST_F(BatchStepTest, AbortBeforeWaitReadyIsAllowed) {
  const KvCachePtr kv = seated(5);
  grow({{0, 6}});
  batch->publish(0);
  batch->abort_step(0);
  EXPECT_EQ(kv->length(), 5);
  step({0});
}

TEST_F(BatchStepTest, AbortWithoutAnOpenStepIsRefused) {
  seated(5);
  expect_refused<InvalidState>("Batch.abort_step", [&] { batch->abort_step(0); });
}

}  // namespace
}  // namespace sparse_kvcm::testing
