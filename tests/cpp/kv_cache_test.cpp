// A request: resume, suspend, close, and what it shows.
#include "engine_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

class KvCacheTest : public EngineTest {};

TEST_F(KvCacheTest, ANewRequestIsSuspendedAndTakesNoMemory) {
  const std::vector<std::int64_t> fresh = occupancy();
  const KvCachePtr kv = request({kNeed, -1});
  EXPECT_EQ(occupancy(), fresh);
  EXPECT_EQ(kv->state(), KvCacheState::kSuspended);
  EXPECT_EQ(kv->need(), kNeed);
  EXPECT_EQ(kv->length(), 0);
  EXPECT_EQ(kv->committed_length(), 0);
  EXPECT_EQ(kv->watermark(), 0);
  EXPECT_EQ(kv->lease(), std::nullopt);
  EXPECT_EQ(kv->row(), std::nullopt);
  EXPECT_TRUE(kv->host_pages().empty());
}

// --- resume ---

TEST_F(KvCacheTest, ResumeTakesAnEmptyLease) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);
  ASSERT_TRUE(kv->resume(0));
  EXPECT_EQ(kv->state(), KvCacheState::kActive);
  ASSERT_TRUE(kv->lease());
  EXPECT_EQ(kv->lease()->cached_slots, kCached);
  EXPECT_EQ(kv->lease()->window_slots, kWindow);
  EXPECT_EQ(kv->window_begin(), 5);
  EXPECT_EQ(kv->decode_entries(0), std::vector<DecodedEntry>(kCached));
}

TEST_F(KvCacheTest, ResumeOfAnActiveRequestIsANoOp) {
  const KvCachePtr kv = active(5);
  const Snapshot before = snapshot();
  EXPECT_TRUE(kv->resume(0));
  EXPECT_EQ(first_difference(before, snapshot()), "");
}

TEST_F(KvCacheTest, ResumeAnswersFalseWhenLeaseIdsAreOut) {
  for (std::int32_t n = 0; n < 4; ++n) active(0, 1);
  const KvCachePtr kv = request({1, -1});
  const Snapshot before = snapshot();
  EXPECT_FALSE(kv->resume(0));
  EXPECT_EQ(first_difference(before, snapshot()), "");
  requests[2]->close();
  EXPECT_TRUE(kv->resume(0));
}

TEST_F(KvCacheTest, ResumeAnswersFalseWhenNoRunOfTheArenaIsLongEnough) {
  KvCacheManagerConfig c = config();
  c.arena_pages = 9;  // two leases of 4 pages and one page
  make(c);
  const KvCachePtr first = active(5);
  active(5);
  const KvCachePtr kv = request({kNeed, -1});
  const Snapshot before = snapshot();
  EXPECT_FALSE(kv->resume(0));
  EXPECT_EQ(first_difference(before, snapshot()), "");
  first->suspend(0);
  EXPECT_TRUE(kv->resume(0));
}

TEST_F(KvCacheTest, ResumeOfAClosedRequestIsRefused) {
  const KvCachePtr kv = request({kNeed, -1});
  kv->close();
  expect_refused<InvalidState>("KvCache.resume", [&] { (void)kv->resume(0); });
}

TEST_F(KvCacheTest, ANeedThatFitsTheLeaseIsAllWindow) {
  const KvCachePtr fits = active(3, kCached + kWindow);
  EXPECT_EQ(fits->lease()->cached_slots, 0);
  EXPECT_EQ(fits->lease()->window_slots, kCached + kWindow);
  const KvCachePtr odd = active(3, 5);
  EXPECT_EQ(odd->lease()->cached_slots, 0);
  EXPECT_EQ(odd->lease()->window_slots, 2 * kPage);
  const KvCachePtr past = active(3, kCached + kWindow + 1);
  EXPECT_EQ(past->lease()->cached_slots, kCached);
}

TEST_F(KvCacheTest, ResumeLoadsAnAllWindowLease) {
  const KvCachePtr kv = active(11, kCached + kWindow);
  EXPECT_EQ(kv->window_begin(), 0);
  for (std::int32_t o = 0; o < 11; ++o)
    for (const std::int32_t group : {0, 1})
      EXPECT_TRUE(bytes->group_holds(group, kv->lease()->base + o, tag(*kv, o)));
}

TEST_F(KvCacheTest, AnAllWindowLeaseNeverMisses) {
  const KvCachePtr kv = seated(11, kCached + kWindow);
  grow({{0, 13}});
  open();
  launch(0, {0, 5, 10, 12});
  EXPECT_EQ(*batch->outputs(0).miss_counts + *batch->outputs(0).hit_counts, 0);
  record({0});
  EXPECT_EQ(kv->window_begin(), 0);
}

TEST_F(KvCacheTest, ALeaseGenerationIsNeverUsedTwice) {
  const KvCachePtr kv = active(5);
  const std::uint64_t generation = kv->lease()->generation;
  kv->suspend(0);
  ASSERT_TRUE(kv->resume(0));
  EXPECT_NE(kv->lease()->generation, generation);
}

TEST_F(KvCacheTest, AReleasedLeaseHidesWhatItsLastOwnerLeft) {
  const KvCachePtr first = seated(30);
  open();
  launch(0, {1, 2, 3, 4});
  record({0});
  const std::int32_t base = first->lease()->base;
  first->close();
  const KvCachePtr second = seated(30);
  ASSERT_EQ(second->lease()->base, base);
  open();
  launch(0, {1, 2, 3, 4});
  EXPECT_EQ(*batch->outputs(0).miss_counts, 4);
}

// --- suspend ---

TEST_F(KvCacheTest, SuspendDropsGrowthFlushesTheWindowAndReturnsTheLease) {
  const std::vector<std::int64_t> fresh = occupancy();
  const KvCachePtr kv = seated(5);
  grow({{0, 7}});
  step({0});
  grow({{0, 8}});
  kv->suspend(0);
  EXPECT_EQ(kv->state(), KvCacheState::kSuspended);
  EXPECT_EQ(kv->length(), 7);
  EXPECT_EQ(kv->committed_length(), 7);
  EXPECT_EQ(kv->watermark(), 7);
  EXPECT_EQ(kv->lease(), std::nullopt);
  EXPECT_EQ(kv->row(), std::nullopt);
  expect_history(*kv);
  EXPECT_EQ(occupancy()[1], fresh[1]);
  EXPECT_EQ(batch->add(*active(5)), 0);
}

TEST_F(KvCacheTest, ASuspendedRequestGoesOnWhereItWas) {
  const KvCachePtr kv = seated(20);
  grow({{0, 22}});
  step({0});
  kv->suspend(0);
  bytes->poison_slots(0, manager->trash_slot());
  ASSERT_TRUE(kv->resume(0));
  EXPECT_EQ(kv->window_begin(), 22);
  batch->add(*kv);
  grow({{0, 23}});
  open();
  launch(0, {0, 20, 21, 22});
  record({0});
  EXPECT_EQ(kv->committed_length(), 23);
}

TEST_F(KvCacheTest, SuspendOfASuspendedRequestIsANoOp) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);
  const Snapshot before = snapshot();
  kv->suspend(0);
  EXPECT_EQ(first_difference(before, snapshot()), "");
}

TEST_F(KvCacheTest, SuspendOfAClosedRequestIsRefused) {
  const KvCachePtr kv = active(5);
  kv->close();
  expect_refused<InvalidState>("KvCache.suspend", [&] { kv->suspend(0); });
}

TEST_F(KvCacheTest, SuspendInAnOpenStepIsRefused) {
  const KvCachePtr kv = seated(5);
  batch->publish(0);
  expect_refused<InvalidState>("KvCache.suspend", [&] { kv->suspend(0); });
  batch->remove(*kv);  // still in the step
  expect_refused<InvalidState>("KvCache.suspend", [&] { kv->suspend(0); });
  record({});
  kv->suspend(0);
}

TEST_F(KvCacheTest, SuspendIsRefusedWhenHostHistoryLacksPages) {
  const KvCachePtr kv = seated(kPage);
  fill_host(0);
  for (std::int32_t length = kPage + 1; length <= kPage + kWindow; ++length) {
    grow({{0, length}});
    step({0});
  }
  expect_refused<OutOfPages>("KvCache.suspend", [&] { kv->suspend(0); });
  fillers.pop_back();  // one page; it takes two
  expect_refused<OutOfPages>("KvCache.suspend", [&] { kv->suspend(0); });
  fillers.pop_back();
  kv->suspend(0);
  EXPECT_EQ(kv->watermark(), kPage + kWindow);
  expect_history(*kv);
}

// --- close ---

TEST_F(KvCacheTest, CloseReturnsEverything) {
  const std::vector<std::int64_t> fresh = occupancy();
  const KvCachePtr kv = seated(5);
  grow({{0, 7}});
  kv->close();
  EXPECT_EQ(kv->state(), KvCacheState::kClosed);
  EXPECT_EQ(kv->lease(), std::nullopt);
  EXPECT_EQ(kv->row(), std::nullopt);
  EXPECT_TRUE(kv->host_pages().empty());
  EXPECT_EQ(occupancy(), fresh);
  kv->close();
  EXPECT_EQ(occupancy(), fresh);
}

TEST_F(KvCacheTest, DestructionCloses) {
  const std::vector<std::int64_t> fresh = occupancy();
  seated(5);
  requests.clear();
  EXPECT_EQ(occupancy(), fresh);
}

TEST_F(KvCacheTest, CloseInAnOpenStepReturnsMemoryWhenTheStepEnds) {
  const std::vector<std::int64_t> fresh = occupancy();
  const KvCachePtr kv = seated(5);
  open();
  const std::vector<std::int64_t> used = occupancy();
  kv->close();
  EXPECT_EQ(kv->state(), KvCacheState::kClosed);
  EXPECT_EQ(occupancy(), used);
  record({0});
  EXPECT_EQ(occupancy(), fresh);
}

TEST_F(KvCacheTest, DestructionInAnOpenStepReturnsMemoryWhenTheStepEnds) {
  const std::vector<std::int64_t> fresh = occupancy();
  seated(5);
  open();
  requests.clear();
  EXPECT_NE(occupancy(), fresh);
  batch->abort_step(0);
  EXPECT_EQ(occupancy(), fresh);
}

// --- what it shows ---

TEST_F(KvCacheTest, HostPagesAreOnePerStartedPage) {
  for (const std::int32_t units : {1, kPage - 1, kPage, kPage + 1, 2 * kPage}) {
    const KvCachePtr kv = request({kNeed, -1});
    import(*kv, units);
    EXPECT_EQ(kv->host_pages().size(), static_cast<std::size_t>((units + kPage - 1) / kPage));
  }
}

TEST_F(KvCacheTest, DecodeEntriesShowsWhatResolveWrote) {
  const KvCachePtr kv = seated(30);
  open();
  launch(0, {17, 3});
  const std::uint32_t clock = batch->clock();
  std::vector<DecodedEntry> expected(kCached);
  expected[0] = {false, clock, false, 3};  // ascending ordinals take ascending slots
  expected[1] = {false, clock, false, 17};
  EXPECT_EQ(kv->decode_entries(0), expected);
  record({0});
  open();
  launch(0, {3});
  expected[0] = {false, clock + 1, true, 3};
  EXPECT_EQ(kv->decode_entries(0), expected);
}

TEST_F(KvCacheTest, DecodeEntriesRefusesABadGroupAndARequestWithoutLease) {
  const KvCachePtr kv = active(5);
  for (const std::int32_t group : {-1, 2})
    expect_refused<InvalidArgument>("KvCache.decode_entries",
                                    [&] { (void)kv->decode_entries(group); });
  kv->suspend(0);
  expect_refused<InvalidState>("KvCache.decode_entries", [&] { (void)kv->decode_entries(0); });
  kv->close();
  expect_refused<InvalidState>("KvCache.decode_entries", [&] { (void)kv->decode_entries(0); });
}

TEST_F(KvCacheTest, ARequestOutlivesItsManagerAndItsBatch) {
  const KvCachePtr kv = seated(30);
  manager.reset();
  batches.clear();
  batch.reset();
  EXPECT_EQ(kv->committed_length(), 30);
  EXPECT_EQ(kv->decode_entries(0).size(), static_cast<std::size_t>(kCached));
  kv->suspend(0);
  EXPECT_TRUE(kv->resume(0));
}

}  // namespace
}  // namespace sparse_kvcm::testing
