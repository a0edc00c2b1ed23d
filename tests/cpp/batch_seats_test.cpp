// Seats of a Batch: add, remove, close.
#include <limits>

#include "engine_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

class BatchSeatsTest : public EngineTest {};

TEST_F(BatchSeatsTest, AddReturnsTheFirstFreeRow) {
  const KvCachePtr first = active(5);
  const KvCachePtr second = active(5);
  EXPECT_EQ(batch->add(*first, 1), 1);
  EXPECT_EQ(batch->add(*second), 0);
  EXPECT_EQ(batch->add(*active(5)), 2);
  EXPECT_EQ(first->row(), 1);
  EXPECT_EQ(second->row(), 0);
}

TEST_F(BatchSeatsTest, AddReusesTheRowOfARemovedRequest) {
  const KvCachePtr first = seated(5);
  seated(5);
  batch->remove(*first);
  EXPECT_EQ(first->row(), std::nullopt);
  EXPECT_EQ(batch->add(*active(5)), 0);
}

TEST_F(BatchSeatsTest, AddingAgainReturnsTheSameRow) {
  const KvCachePtr kv = active(5);
  EXPECT_EQ(batch->add(*kv, 2), 2);
  EXPECT_EQ(batch->add(*kv), 2);
  EXPECT_EQ(batch->add(*kv, 2), 2);
  EXPECT_EQ(batch->add(*active(5)), 0);
}

TEST_F(BatchSeatsTest, AddRefusesAnotherRowForASeatedRequest) {
  const KvCachePtr kv = seated(5);
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv, 3); });
}

TEST_F(BatchSeatsTest, AddRefusesARequestThatIsNotActive) {
  const KvCachePtr kv = request({kNeed, -1});
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv, 0); });
  kv->close();
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
}

TEST_F(BatchSeatsTest, AddRefusesARequestOfAnotherManager) {
  KvCacheManager other(config());
  const KvCachePtr kv = other.create_kv_cache({kNeed, -1});
  ASSERT_TRUE(kv->resume(0));
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
  EXPECT_EQ(kv->row(), std::nullopt);
}

TEST_F(BatchSeatsTest, AddRefusesARequestThatSitsInAnotherBatch) {
  const KvCachePtr kv = seated(5);
  const BatchPtr other = make_batch({2, 64, kNoSlot});
  expect_refused<InvalidState>("Batch.add", [&] { other->add(*kv); });
  expect_refused<InvalidState>("Batch.add", [&] { other->add(*kv, 1); });
}

TEST_F(BatchSeatsTest, AddRefusesARequestInAnotherBatchsOpenStep) {
  const KvCachePtr kv = seated(5);
  open();
  batch->remove(*kv);
  const BatchPtr other = make_batch({2, 64, kNoSlot});
  expect_refused<InvalidState>("Batch.add", [&] { other->add(*kv); });
  record({});
  EXPECT_EQ(other->add(*kv), 0);
}

TEST_F(BatchSeatsTest, AddRefusesAFullBatch) {
  const BatchPtr small = make_batch({1, 64, kNoSlot});
  small->add(*active(5));
  const KvCachePtr kv = active(5);
  expect_refused<InvalidState>("Batch.add", [&] { small->add(*kv); });
}

TEST_F(BatchSeatsTest, AddRefusesANeedAboveMaxUnits) {
  const BatchPtr small = make_batch({2, kNeed - 1, kNoSlot});
  const KvCachePtr kv = active(5);
  expect_refused<InvalidArgument>("Batch.add", [&] { small->add(*kv); });
  EXPECT_EQ(small->add(*active(5, kNeed - 1)), 0);
}

TEST_F(BatchSeatsTest, AddRefusesRowsOutsideTheBatch) {
  const KvCachePtr kv = active(5);
  for (const std::int32_t row : {-1, -2, 4, std::numeric_limits<std::int32_t>::min(),
                                 std::numeric_limits<std::int32_t>::max()})
    expect_refused<InvalidArgument>("Batch.add", [&] { batch->add(*kv, row); });
  EXPECT_EQ(batch->add(*kv, 3), 3);
}

TEST_F(BatchSeatsTest, AddRefusesARequestWhoseUnitsAreBehindItsTokens) {
  const KvCachePtr kv = active(3);
  ASSERT_TRUE(kv->resize(20, 9, 0));
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
  import(*kv, 6);
  EXPECT_EQ(batch->add(*kv), 0);
}

TEST_F(BatchSeatsTest, AddRefusesAnOccupiedRow) {
  seated(5);
  const KvCachePtr kv = active(5);
  expect_refused<InvalidArgument>("Batch.add", [&] { batch->add(*kv, 0); });
}

TEST_F(BatchSeatsTest, AddDuringAnOpenStepTakesPartFromTheNextPublishOn) {
  const KvCachePtr first = seated(5);
  open();
  const KvCachePtr second = seated(5);
  EXPECT_EQ(second->row(), 1);
  EXPECT_LT(batch->row_states_address()[1].lease_id, 0);
  EXPECT_EQ(resolve(0, 1, {0}).slots[0], kNoSlot);  // nobody there yet
  expect_refused<InvalidArgument>("Batch.record_read", [&] { record({1}); });
  launch(0);
  record({0});
  EXPECT_EQ(batch->publish(0), std::vector<std::int32_t>{1});
  EXPECT_EQ(batch->row_states_address()[1].lease_id, second->lease()->id);
}

TEST_F(BatchSeatsTest, ARequestAddedDuringAnOpenStepMaySuspend) {
  seated(5);
  open();
  const KvCachePtr late = seated(5);
  late->suspend(0);
  EXPECT_EQ(late->state(), KvCacheState::kSuspended);
  EXPECT_EQ(late->row(), std::nullopt);
}

TEST_F(BatchSeatsTest, AddEmptiesALeaseThatAnotherBatchUsedLast) {
  const KvCachePtr kv = seated(30);
  open();
  launch(0, {1, 2, 3, 4});
  record({0});
  batch->remove(*kv);
  // Clocks differ: at the clock of its last resolve there, the row must not look resolved here.
  const BatchPtr old = batch;
  batch = make_batch({2, 64, kNoSlot});
  bytes->poison_slots(kv->lease()->base, kCached);
  batch->add(*kv);
  open();
  EXPECT_EQ(batch->clock(), old->clock());
  launch(0, {1, 2, 3, 4});
  EXPECT_EQ(*batch->outputs(0).miss_counts, 4);
}

TEST_F(BatchSeatsTest, ARequestThatComesBackToItsBatchKeepsItsEntries) {
  const KvCachePtr kv = seated(30);
  open();
  launch(0, {1, 2, 3, 4});
  record({0});
  batch->remove(*kv);
  batch->add(*kv, 2);
  open();
  launch(2, {1, 2, 3, 4});
  EXPECT_EQ(*batch->outputs(0).hit_counts, 4);
}

TEST_F(BatchSeatsTest, RemoveKeepsLeaseAndPendingGrowth) {
  const KvCachePtr kv = seated(5);
  grow({{0, 7}});
  const auto lease = kv->lease();
  batch->remove(*kv);
  EXPECT_EQ(kv->lease(), lease);
  EXPECT_EQ(kv->length(), 7);
  EXPECT_EQ(batch->add(*kv, 3), 3);
  step({3});
  EXPECT_EQ(kv->committed_length(), 7);
}

TEST_F(BatchSeatsTest, RemoveRefusesARequestThatDoesNotSitHere) {
  const KvCachePtr kv = active(5);
  expect_refused<InvalidState>("Batch.remove", [&] { batch->remove(*kv); });
  const BatchPtr other = make_batch({2, 64, kNoSlot});
  other->add(*kv);
  expect_refused<InvalidState>("Batch.remove", [&] { batch->remove(*kv); });
}

TEST_F(BatchSeatsTest, RemoveDuringAnOpenStepStillCommitsItsGrowth) {
  const KvCachePtr kv = seated(5);
  grow({{0, 7}});
  open();
  launch(0);
  batch->remove(*kv);
  record({0});
  EXPECT_EQ(kv->committed_length(), 7);
}

TEST_F(BatchSeatsTest, RemoveDuringAnOpenStepStillReturnsItsGrowthOnAbort) {
  const KvCachePtr kv = seated(5);
  grow({{0, 7}});
  open();
  batch->remove(*kv);
  batch->abort_step(0);
  EXPECT_EQ(kv->length(), 5);
}

TEST_F(BatchSeatsTest, ANewOccupantOfARemovedRowIsNotCommittedByTheOldStep) {
  const KvCachePtr first = seated(5);
  grow({{0, 6}});
  const KvCachePtr second = seated(9);
  grow({{1, 10}});
  batch->remove(*second);  // keeps its pending growth
  open();
  launch(0);
  batch->remove(*first);
  ASSERT_EQ(batch->add(*second, 0), 0);
  record({0});
  EXPECT_EQ(first->committed_length(), 6);
  EXPECT_EQ(second->committed_length(), 9);
  EXPECT_EQ(second->length(), 10);
}

TEST_F(BatchSeatsTest, ARemovedRowIsUnseatedOnTheDeviceAfterTheNextPublish) {
  const KvCachePtr kv = seated(5);
  step({0});
  batch->remove(*kv);
  EXPECT_EQ(batch->publish(0), std::vector<std::int32_t>{0});
  batch->wait_ready(0);
  EXPECT_EQ(batch->row_states_address()[0], RowState{});
  EXPECT_EQ(resolve(0, 0, {0}).slots[0], kNoSlot);
  record({});
  EXPECT_EQ(batch->take_errors().batch, kBatchErrorRow);
}

TEST_F(BatchSeatsTest, AClosedRequestFreesItsRow) {
  const KvCachePtr kv = seated(5);
  kv->close();
  EXPECT_EQ(kv->row(), std::nullopt);
  EXPECT_EQ(batch->add(*active(5)), 0);
}

TEST_F(BatchSeatsTest, CloseDetachesWithoutClosingTheRequests) {
  const KvCachePtr kv = seated(5);
  grow({{0, 6}});
  batch->close();
  EXPECT_EQ(kv->state(), KvCacheState::kActive);
  EXPECT_EQ(kv->row(), std::nullopt);
  EXPECT_EQ(kv->length(), 6);
  EXPECT_EQ(make_batch({1, 64, kNoSlot})->add(*kv), 0);
}

TEST_F(BatchSeatsTest, CloseAbortsAnOpenStep) {
  const KvCachePtr kv = seated(30);
  grow({{0, 31}});
  open();
  launch(0, {1, 2});
  batch->close();
  batch->close();
  EXPECT_FALSE(batch->step_open());
  EXPECT_EQ(kv->length(), 30);
  EXPECT_EQ(kv->decode_entries(0), std::vector<DecodedEntry>(kCached));
  kv->suspend(0);
  EXPECT_EQ(kv->state(), KvCacheState::kSuspended);
}

TEST_F(BatchSeatsTest, DestructionCloses) {
  const KvCachePtr kv = seated(5);
  grow({{0, 6}});
  open();
  batches.clear();
  batch.reset();
  EXPECT_EQ(kv->row(), std::nullopt);
  EXPECT_EQ(kv->length(), 5);
  kv->suspend(0);
}

TEST_F(BatchSeatsTest, ClosedRequestsOfAClosedStepReturnTheirMemory) {
  const std::vector<std::int64_t> fresh = occupancy();
  const KvCachePtr kv = seated(5);
  open();
  kv->close();
  EXPECT_NE(occupancy(), fresh);
  batch->close();
  EXPECT_EQ(occupancy(), fresh);
}

TEST_F(BatchSeatsTest, EveryCallOnAClosedBatchIsRefused) {
  const KvCachePtr kv = active(5);
  batch->close();
  const std::int32_t row = 0;
  const RowLength length{0, 5};
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv, 0); });
  expect_refused<InvalidState>("Batch.remove", [&] { batch->remove(*kv); });
  expect_refused<InvalidState>("Batch.resize", [&] { batch->resize({&length, 1}); });
  expect_refused<InvalidState>("Batch.publish", [&] { batch->publish(0); });
  expect_refused<InvalidState>("Batch.wait_ready", [&] { batch->wait_ready(0); });
  expect_refused<InvalidState>("Batch.resolve",
                               [&] { batch->resolve(0, &row, 1, &row, 1, 1, {}, 0); });
  expect_refused<InvalidState>("Batch.fetch", [&] { batch->fetch(0, &row, 1, 1, {}, 0); });
  expect_refused<InvalidState>("Batch.record_read", [&] { record({}); });
  expect_refused<InvalidState>("Batch.abort_step", [&] { batch->abort_step(0); });
  expect_refused<InvalidState>("Batch.take_errors", [&] { (void)batch->take_errors(); });
}

}  // namespace
}  // namespace sparse_kvcm::testing
