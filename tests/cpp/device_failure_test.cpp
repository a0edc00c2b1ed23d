// A device that fails in the middle of a call, at every point of it.
//
// publish promises: no step is open, the clock is as before, every row is dirty. The other calls
// leave the request and the Batch as they were, and can be made again.
#include <algorithm>
#include <functional>

#include "engine_fixture.hpp"
#include "faulty_backend.hpp"

namespace sparse_kvcm::testing {
namespace {

class DeviceFailureTest : public EngineTest {
 protected:
  DeviceFailureTest() { use(make_manager(config(), backend_)); }

  // Runs `call` with a fault after 0, 1, 2, ... device calls until it comes through without one.
  // `prepare` comes before each try, `check` after each fault. Returns the number of faults.
  std::int32_t fail_everywhere(const std::function<void()>& prepare,
                               const std::function<void()>& call,
                               const std::function<void()>& check) {
    for (std::int32_t calls = 0;; ++calls) {
      prepare();
      backend_->fail_after(calls);
      try {
        call();
      } catch (const DeviceFault&) {
        check();
        continue;
      }
      EXPECT_TRUE(backend_->withdraw());
      return calls;
    }
  }
  // The same for a call that must leave everything as it was, entries apart where it empties them.
  std::int32_t fail_everywhere_unchanged(const std::function<void()>& call) {
    Snapshot before;
    return fail_everywhere([&] { before = states(); }, call,
                           [&] { EXPECT_EQ(first_difference(before, states()), ""); });
  }
  Snapshot states() const {
    Snapshot s = take_snapshot(*manager, requests, batches, WithBytes::kNo);
    for (RequestView& view : s.requests) view.entries.clear();
    return s;
  }

  std::shared_ptr<FaultyBackend> backend_ = std::make_shared<FaultyBackend>();
};

TEST_F(DeviceFailureTest, AFailedPublishOpensNoStepKeepsTheClockAndMakesEveryRowDirty) {
  const KvCachePtr kv = seated(30);
  const KvCachePtr other = seated(9);
  std::int32_t length = 30;
  std::uint32_t clock = 0;
  const auto prepare = [&] {
    if (batch->step_open()) record({});
    grow({{0, ++length}, {1, 9}});
    step({0, 1});  // leaves a unit to flush
    grow({{0, length + 1}});
    clock = batch->clock();
  };
  const auto check_fault = [&] {
    EXPECT_FALSE(batch->step_open());
    EXPECT_EQ(batch->clock(), clock);
    EXPECT_EQ(batch->dirty_rows(), (std::vector<std::int32_t>{0, 1, 2, 3}));
    EXPECT_EQ(kv->length(), length + 1);
    EXPECT_EQ(kv->committed_length(), length);
    expect_history(*kv);
    expect_refused<InvalidState>("Batch.wait_ready", [&] { batch->wait_ready(0); });
    grow({{0, length}});
  };
  EXPECT_GE(fail_everywhere(prepare, [&] { batch->publish(0); }, check_fault), 3);
  batch->wait_ready(0);
  launch(0, {1, 20, length - 1, length});
  record({0});
  EXPECT_EQ(kv->committed_length(), length + 1);
  EXPECT_EQ(other->committed_length(), 9);
}

TEST_F(DeviceFailureTest, ThePublishAfterAFailedOneUploadsEverything) {
  const KvCachePtr kv = seated(30);
  const KvCachePtr gone = seated(9);
  step({0});
  batch->remove(*gone);
  backend_->fail_after(0);
  EXPECT_THROW(batch->publish(0), DeviceFault);
  auto* table = const_cast<std::int32_t*>(batch->page_table_address());
  std::fill_n(table, 4 * batch->max_pages(), 77);  // what a failed device may have left
  EXPECT_EQ(batch->publish(0), (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(batch->row_states_address()[0].lease_id, kv->lease()->id);
  EXPECT_EQ(batch->row_states_address()[1], RowState{});
  EXPECT_EQ(std::vector<std::int32_t>(table, table + 8), kv->host_pages());
  EXPECT_EQ(std::count(table, table + 4 * batch->max_pages(), 77), 0);
}

TEST_F(DeviceFailureTest, AFailedWaitReadyCanBeRepeated) {
  seated(30);
  batch->publish(0);
  EXPECT_GE(fail_everywhere_unchanged([&] { batch->wait_ready(0); }), 1);
  launch(0, {1, 2});
  record({0});
}

TEST_F(DeviceFailureTest, AFailedRecordReadCanBeRepeated) {
  const KvCachePtr kv = seated(30);
  grow({{0, 31}});
  open();
  launch(0, {1, 2});
  EXPECT_GE(fail_everywhere_unchanged([&] { record({0}); }), 1);
  EXPECT_EQ(kv->committed_length(), 31);
  step({0});
}

TEST_F(DeviceFailureTest, AFailedAbortCanBeRepeated) {
  const KvCachePtr kv = seated(30);
  grow({{0, 31}});
  open();
  launch(0, {1, 2});
  EXPECT_GE(fail_everywhere_unchanged([&] { batch->abort_step(0); }), 1);
  EXPECT_EQ(kv->length(), 30);
  EXPECT_EQ(kv->decode_entries(1), std::vector<DecodedEntry>(kCached));
  step({0});
}

TEST_F(DeviceFailureTest, AFailedSuspendLeavesTheRequestActive) {
  const KvCachePtr kv = seated(2 * kPage);
  grow({{0, 2 * kPage + 2}});
  step({0});
  EXPECT_GE(fail_everywhere_unchanged([&] { kv->suspend(0); }), 1);
  EXPECT_EQ(kv->watermark(), 2 * kPage + 2);
  expect_history(*kv);
}

TEST_F(DeviceFailureTest, AFailedResumeTakesNoLease) {
  const KvCachePtr kv = active(11, kCached + kWindow);
  kv->suspend(0);
  EXPECT_GE(fail_everywhere_unchanged([&] { (void)kv->resume(0); }), 1);
  for (std::int32_t o = 0; o < 11; ++o)
    EXPECT_TRUE(bytes->group_holds(0, kv->lease()->base + o, tag(*kv, o)));
}

TEST_F(DeviceFailureTest, AFailedImportAppendsNothing) {
  const KvCachePtr kv = active(5, kCached + kWindow);
  EXPECT_GE(fail_everywhere_unchanged([&] { import(*kv, 7); }), 1);
  EXPECT_EQ(kv->length(), 12);
  expect_history(*kv);
}

TEST_F(DeviceFailureTest, AFailedWriteOrCommitOfReceivedUnitsCanBeRepeated) {
  seated(30);
  step({0});  // so that there is device work to wait for
  const KvCachePtr kv = active(0);
  ASSERT_TRUE(kv->reserve_history(7));
  const std::vector<std::byte> zeros(512);
  const std::vector<RegionPages> regions(4, {zeros.data(), 64});
  const auto write = [&](std::int32_t group, std::size_t num_regions) {
    kv->write_history(group, {0, 7, kPage, {regions.data(), num_regions}});
  };
  EXPECT_GE(fail_everywhere_unchanged([&] { write(0, 4); }), 1);
  write(1, 1);
  EXPECT_GE(fail_everywhere_unchanged([&] { kv->commit_history(0); }), 1);
  EXPECT_EQ(kv->watermark(), 7);
  EXPECT_EQ(kv->window_begin(), 0);
}

TEST_F(DeviceFailureTest, AFailedBatchLeavesTheManagerUsable) {
  EXPECT_GE(fail_everywhere_unchanged([&] { (void)manager->create_batch({2, 64, kNoSlot}); }), 1);
  seated(30);
  step({0});
}

TEST_F(DeviceFailureTest, CloseReturnsEverythingOnAFailingDeviceToo) {
  for (std::int64_t calls = 0; calls < 6; ++calls) {
    use(make_manager(config(), backend_));
    const std::vector<std::int64_t> fresh = occupancy();
    const KvCachePtr in_step = seated(30);
    const KvCachePtr other = seated(30);
    open();
    backend_->fail_after(calls);
    in_step->close();
    batch->close();
    other->close();
    backend_->withdraw();
    EXPECT_EQ(occupancy(), fresh) << calls;
  }
}

TEST_F(DeviceFailureTest, PublishDuringCaptureIsRefused) {
  seated(30);
  grow({{0, 31}});
  backend_->set_capturing(Stream{5});
  expect_refused<InvalidState>("Batch.publish", [&] { batch->publish(5); });
  batch->publish(0);
}

}  // namespace
}  // namespace sparse_kvcm::testing
