// A device that fails at every point of every call, with dense layers: what failed has changed
// nothing, nothing leaks, and the next call works. A device that fails for good poisons the
// manager.
#include <algorithm>
#include <functional>

#include "dense_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

class DenseFailureTest : public DenseTest {
 protected:
  Snapshot states() const {
    Snapshot s = take_snapshot(*manager, requests, batches, WithBytes::kNo);
    for (RequestView& view : s.requests) view.entries.clear();
    return s;
  }
  // Runs `call` with a fault after 0, 1, 2, ... device calls until it comes through. After each
  // fault all is as before. Returns the number of faults.
  std::int32_t fail_everywhere(const std::function<void()>& call) {
    for (std::int32_t calls = 0;; ++calls) {
      const Snapshot before = states();
      backend->fail_after(calls);
      try {
        call();
      } catch (const DeviceFault&) {
        backend->withdraw();
        EXPECT_EQ(first_difference(before, states()), "") << "fault " << calls;
        EXPECT_EQ(manager->poison_reason(), "");
        continue;
      }
      EXPECT_TRUE(backend->withdraw());
      return calls;
    }
  }
};

TEST_F(DenseFailureTest, AFailedSuspendReservesNothingAndMovesNothing) {
  const KvCachePtr kv = seated(22);
  for (int i = 0; i < 3; ++i) decode({0});
  EXPECT_GE(fail_everywhere([&] { kv->suspend(0); }), 6);
  EXPECT_TRUE(kv->resume(0));
  EXPECT_TRUE(holds_pages(*kv));
  expect_history(*kv);
}

TEST_F(DenseFailureTest, AFailedResumeTakesNothing) {
  const KvCachePtr kv = prefilled(11, kCached + kWindow);  // all window: it loads units too
  kv->suspend(0);
  EXPECT_GE(fail_everywhere([&] { EXPECT_TRUE(kv->resume(0)); }), 6);
  EXPECT_TRUE(holds_pages(*kv));
}

TEST_F(DenseFailureTest, AFailedResizeTakesNothing) {
  const KvCachePtr other = prefilled(30);
  other->close();  // so that slots come back with events
  const KvCachePtr kv = prefilled(3);
  std::int32_t faults = fail_everywhere([&] { EXPECT_TRUE(kv->resize(30, 3, 0)); });
  faults += fail_everywhere([&] { EXPECT_TRUE(kv->resize(30, 30, 0)); });
  EXPECT_GE(faults, 2);
  EXPECT_GE(kv->get_base_page_indices(group_of(100)).back(), 0);
}

TEST_F(DenseFailureTest, AFailedBatchedResizeLeavesTheRowsBehindTheFaultAsTheyWere) {
  seated(20);
  seated(20);
  decode({0, 1});
  for (std::int32_t calls = 0;; ++calls) {
    const std::int32_t first = at_row(0).history_length();
    backend->fail_after(calls);
    try {
      const auto results =
          batch->resize_tokens(std::vector<RowTokens>{{0, first + 1}, {1, first + 1}}, 0);
      EXPECT_EQ(results, (std::vector<ResizeResult>(2, ResizeResult::kOk)));
      if (backend->withdraw() && calls > 0) break;
    } catch (const DeviceFault&) {
      backend->withdraw();
      EXPECT_EQ(at_row(1).length(), first);
      EXPECT_TRUE(at_row(0).length() == first || at_row(0).length() == first + 1);
      grow_tokens({{0, first + 1}, {1, first + 1}});
    }
    write_pages(at_row(0));
    write_pages(at_row(1));
    step({0, 1});
    ASSERT_NO_FATAL_FAILURE(expect_device_tables());
  }
}

TEST_F(DenseFailureTest, ThePublishAfterAFailedOneWritesEveryTable) {
  const KvCachePtr kv = seated(20);
  const KvCachePtr gone = seated(9);
  for (std::int32_t calls = 0;; ++calls) {
    decode({0});
    if (gone->row()) batch->remove(*gone);
    grow_tokens({{0, kv->history_length() + 1}});
    backend->fail_after(calls);
    try {
      batch->publish(0);
    } catch (const DeviceFault&) {
      EXPECT_EQ(batch->dirty_rows(), (std::vector<std::int32_t>{0, 1, 2, 3}));
      for (std::int32_t g = 0; g < batch->num_layer_groups(); ++g) {
        auto* table = const_cast<std::int32_t*>(batch->page_table_address(g));
        std::fill_n(table, 4 * batch->max_pages(), 77);  // what a failed device may have left
      }
      batch->publish(0);
    }
    const bool through = backend->withdraw();
    ASSERT_NO_FATAL_FAILURE(expect_device_tables());
    batch->wait_ready(0);
    launch(0);
    record({0});
    if (through) break;
  }
  EXPECT_TRUE(holds_pages(*kv));
}

TEST_F(DenseFailureTest, StepsCanBeEndedAgain) {
  seated(20);
  grow_tokens({{0, 21}});
  batch->publish(0);
  EXPECT_GE(fail_everywhere([&] { batch->wait_ready(0); }), 1);
  launch(0);
  EXPECT_GE(fail_everywhere([&] { record({0}); }), 1);
  grow_tokens({{0, 22}});
  open();
  EXPECT_GE(fail_everywhere([&] { batch->abort_step(0); }), 1);
  decode({0});
}

TEST_F(DenseFailureTest, CloseReturnsEverythingOnAFailingDeviceToo) {
  for (std::int64_t calls = 0; calls < 8; ++calls) {
    use_dense(dense_config());
    const std::vector<std::int64_t> fresh = free_slots();
    const KvCachePtr asleep = prefilled(9);
    asleep->suspend(0);
    const KvCachePtr in_step = seated(12);
    const KvCachePtr other = prefilled(8);
    open();
    backend->fail_after(calls);
    asleep->close();
    in_step->close();
    batch->close();
    other->close();
    backend->withdraw();
    EXPECT_EQ(free_slots(), fresh) << calls;
  }
}

// --- poison ---

TEST_F(DenseFailureTest, ADeviceThatFailsForGoodPoisonsTheManager) {
  const std::vector<std::int64_t> fresh = free_slots();
  const KvCachePtr kv = seated(22);
  decode({0});
  EXPECT_EQ(manager->poison_reason(), "");
  backend->fail_for_good_after(3);  // some copies are under way
  EXPECT_THROW(kv->suspend(0), DeviceFault);
  const std::string reason = manager->poison_reason();
  EXPECT_NE(reason.find("KvCache.suspend"), std::string::npos) << reason;
  EXPECT_NE(reason.find("the device failed"), std::string::npos) << reason;
  backend->withdraw();  // what is lost stays lost
  EXPECT_THROW(kv->suspend(0), CorruptedError);
  EXPECT_THROW((void)kv->resize(23, 22, 0), CorruptedError);
  EXPECT_THROW(batch->publish(0), CorruptedError);
  EXPECT_THROW((void)batch->resize_tokens({}, 0), CorruptedError);
  EXPECT_THROW((void)manager->create_kv_cache({8, -1}), CorruptedError);
  EXPECT_THROW((void)manager->create_batch({2, 64, kNoSlot}), CorruptedError);
  EXPECT_EQ(kv->state(), KvCacheState::kActive);
  EXPECT_EQ(manager->poison_reason(), reason);
  batch->close();
  kv->close();
  EXPECT_EQ(free_slots(), fresh);
}

TEST_F(DenseFailureTest, AFaultBeforeAnythingHasBegunPoisonsNothing) {
  const KvCachePtr kv = seated(22);
  step({0});
  backend->fail_for_good_after(0);
  EXPECT_THROW(kv->suspend(0), DeviceFault);
  backend->withdraw();
  kv->suspend(0);
}

}  // namespace
}  // namespace sparse_kvcm::testing
