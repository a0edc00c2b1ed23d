// Steps of dense layers whose pages lie in scratch: they can be planned anew, aborted and
// suspended, and whatever happens there is a page for everything that is readable.
#include <algorithm>

#include "dense_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

// A window of one token, so that every page of a long step but its last is scratch.
class DenseScratchTest : public DenseTest {
 protected:
  static constexpr std::int32_t kWindowLayer = 101;

  DenseScratchTest() {
    KvCacheManagerConfig c = dense_config();
    c.dense_layers = {{100, {{"INDEX_KEY", 64 << 10, {}, false}}, {}, {}},
                      {kWindowLayer, {{"KEY", 64 << 10, {}, false}}, 1, {}}};
    c.gpu_quota = 16 << 20;
    c.cold_quota = 16 << 20;
    c.window_slots = 3 * kWindow;
    c.max_new_units = 3 * kWindow;
    c.swa_scratch_reuse = SwaScratchReuseConfig{1};
    use_dense(c);
  }
  // A request whose step [0, tokens) is a chunk of a prefill.
  KvCachePtr in_chunk(std::int32_t tokens) {
    const KvCachePtr cache = request({kNeed, -1});
    EXPECT_TRUE(cache->resume(0));
    EXPECT_TRUE(cache->resize(tokens, 0, 0));
    return cache;
  }
  [[nodiscard]] std::vector<std::int32_t> window_pages(const KvCache& cache) const {
    return cache.get_base_page_indices(group_of(kWindowLayer));
  }
  // Pages of the window layer that have a slot.
  [[nodiscard]] std::vector<std::int32_t> there(const KvCache& cache) const {
    const std::vector<std::int32_t> slots = window_pages(cache);
    std::vector<std::int32_t> found;
    for (std::int32_t page = 0; page < std::ssize(slots); ++page) {
      if (slots[static_cast<std::size_t>(page)] >= 0) found.push_back(page);
    }
    return found;
  }
  // As a row that names its wish again before the step.
  ResizeResult resize_row(std::int32_t tokens) {
    return batch->resize_tokens(std::vector<RowTokens>{{0, tokens}}, 0).front();
  }
};

using Pages = std::vector<std::int32_t>;

TEST_F(DenseScratchTest, ARowMayChangeItsWishWhilePagesAreInScratch) {
  const std::vector<std::int64_t> fresh = free_slots();
  const KvCachePtr kv = seated(14);
  const Pages before = window_pages(*kv);
  ASSERT_EQ(resize_row(26), ResizeResult::kOk);
  EXPECT_EQ(there(*kv), (Pages{3, 6}));
  EXPECT_EQ(resize_row(25), ResizeResult::kOk);
  EXPECT_EQ(resize_row(18), ResizeResult::kOk);
  EXPECT_EQ(there(*kv), (Pages{3, 4}));
  EXPECT_EQ(resize_row(14), ResizeResult::kOk);
  EXPECT_EQ(window_pages(*kv), before);
  EXPECT_EQ(kv->length(), 14);
  open();
  expect_device_tables();
  kv->close();
  batch->abort_step(0);
  EXPECT_EQ(free_slots(), fresh);
}

TEST_F(DenseScratchTest, ARowThatWishesForTooMuchKeepsItsStepInScratch) {
  const KvCachePtr kv = seated(14);
  const KvCachePtr hog = request({1 << 12, -1});
  ASSERT_TRUE(hog->resume(0));
  ASSERT_EQ(resize_row(26), ResizeResult::kOk);
  const Pages before = window_pages(*kv);
  std::int32_t tokens = 0;
  while (hog->resize(tokens + 4, 0, 0)) tokens += 4;
  EXPECT_EQ(resize_row(38), ResizeResult::kOutOfPages);
  EXPECT_EQ(window_pages(*kv), before);
  EXPECT_EQ(kv->length(), 26);
}

TEST_F(DenseScratchTest, AWishThatTheDeviceFailsChangesNothing) {
  const KvCachePtr kv = seated(14);
  ASSERT_EQ(resize_row(26), ResizeResult::kOk);
  open();
  batch->abort_step(0);
  for (std::int32_t calls = 0;; ++calls) {
    const Snapshot before = snapshot();
    backend->fail_after(calls);
    try {
      EXPECT_EQ(resize_row(15), ResizeResult::kOk);
    } catch (const DeviceFault&) {
      backend->withdraw();
      EXPECT_EQ(first_difference(before, snapshot()), "") << "fault " << calls;
      continue;
    }
    EXPECT_TRUE(backend->withdraw());
    EXPECT_GE(calls, 1);
    break;
  }
}

TEST_F(DenseScratchTest, AnAbortedStepInScratchIsPlannedAnew) {
  const KvCachePtr kv = seated(14);
  ASSERT_EQ(resize_row(26), ResizeResult::kOk);
  open();
  batch->abort_step(0);
  EXPECT_EQ(resize_row(15), ResizeResult::kOk);
  EXPECT_EQ(there(*kv), (Pages{3}));
  open();
  expect_device_tables();
}

TEST_F(DenseScratchTest, AFailedChunkOfAPrefillIsTriedAgain) {
  const KvCachePtr kv = in_chunk(40);
  EXPECT_EQ(there(*kv), (Pages{9}));
  EXPECT_TRUE(kv->resize(40, 0, 0));
  EXPECT_TRUE(kv->resize(20, 0, 0));
  EXPECT_EQ(there(*kv), (Pages{4}));
  EXPECT_TRUE(kv->resize(40, 20, 0));
  EXPECT_TRUE(kv->resize(36, 20, 0));
  EXPECT_EQ(there(*kv), (Pages{8}));
}

TEST_F(DenseScratchTest, TokensThatAreInScratchAreNotComputed) {
  const KvCachePtr kv = in_chunk(32);
  for (const std::int32_t history : {1, 20, 30, 33}) {
    expect_refused<InvalidArgument>("KvCache.resize", [&] { (void)kv->resize(36, history, 0); });
  }
  EXPECT_TRUE(kv->resize(36, 31, 0));
}

TEST_F(DenseScratchTest, ASuspendWithinAChunkLeavesNoHoleInTheWindow) {
  const KvCachePtr kv = in_chunk(40);
  import(*kv, 10);  // the rest is still to come
  kv->suspend(0);
  ASSERT_TRUE(kv->resume(0));
  EXPECT_THROW(batch->add(*kv), InvalidState);
  ASSERT_TRUE(kv->resize(12, 10, 0));
  EXPECT_EQ(there(*kv), (Pages{2}));
  batch->add(*kv);
}

TEST_F(DenseScratchTest, ARequestWhoseTokensAreInScratchDoesNotSit) {
  const KvCachePtr kv = in_chunk(40);
  import(*kv, 10);
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
  expect_refused<InvalidArgument>("KvCache.resize", [&] { (void)kv->resize(12, 10, 0); });
  import(*kv, 30);
  EXPECT_EQ(batch->add(*kv), 0);
}

TEST_F(DenseScratchTest, AnImportIntoScratchOfASeatedRequestIsRefused) {
  const KvCachePtr kv = seated(14);
  ASSERT_EQ(resize_row(26), ResizeResult::kOk);
  open();
  batch->abort_step(0);
  EXPECT_THROW(import(*kv, 4), InvalidState);
  EXPECT_EQ(kv->history_length(), 14);
}

}  // namespace
}  // namespace sparse_kvcm::testing
