// Batches over dense and sparse layer groups: tables, what a publish uploads, results per row.
#include <algorithm>

#include "counting_backend.hpp"
#include "dense_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int64_t kRowStateWords = 8;

class DenseBatchTest : public DenseTest {
 protected:
  DenseBatchTest() {
    backend = counter;
    use_dense(dense_config());
  }
  // Words that a publish uploads.
  std::int64_t published_words() {
    counter->reset();
    batch->publish(0);
    const std::int64_t words = counter->patched_words;
    batch->wait_ready(0);
    record({});
    return words;
  }

  std::shared_ptr<CountingBackend> counter = std::make_shared<CountingBackend>();
};

TEST_F(DenseBatchTest, TablesOfAllLayerGroupsAreWhatTheRequestsSay) {
  seated(22);
  seated(9);
  batch->publish(0);
  expect_device_tables();
  EXPECT_EQ(device_table(group_of(100), 2), std::vector<std::int32_t>(16, -1));
  record({});
}

TEST_F(DenseBatchTest, TheSparseTableIsOneOfThem) {
  const KvCachePtr kv = seated(22);
  batch->publish(0);
  const std::int32_t sparse = group_of(7);
  EXPECT_EQ(batch->page_table_address(), batch->page_table_address(sparse));
  EXPECT_EQ(kv->get_base_page_indices(sparse), kv->host_pages());
}

TEST_F(DenseBatchTest, AddressesStayWhateverHappens) {
  const auto addresses = [&] {
    std::vector<const void*> all = {batch->row_states_address()};
    for (std::int32_t g = 0; g < batch->num_layer_groups(); ++g) {
      all.push_back(batch->page_table_address(g));
      all.push_back(batch->page_counts_address(g));
    }
    return all;
  };
  const std::vector<const void*> before = addresses();
  const KvCachePtr kv = seated(22);
  for (int i = 0; i < 12; ++i) decode({0});
  kv->close();
  seated(9);
  step({0});
  EXPECT_EQ(addresses(), before);
}

TEST_F(DenseBatchTest, ALayerGroupThatIsNoneIsRefused) {
  for (const std::int32_t group : {-1, batch->num_layer_groups()}) {
    expect_refused<InvalidArgument>("Batch.page_table_address",
                                    [&] { (void)batch->page_table_address(group); });
    expect_refused<InvalidArgument>("Batch.page_counts_address",
                                    [&] { (void)batch->page_counts_address(group); });
  }
}

TEST_F(DenseBatchTest, TablesStayRightWhileWindowsMoveOn) {
  seated(3);
  seated(10);
  for (int i = 0; i < 20; ++i) {
    decode({0, 1});
    ASSERT_NO_FATAL_FAILURE(expect_device_tables());
    EXPECT_TRUE(holds_pages(at_row(0)));
    EXPECT_TRUE(holds_pages(at_row(1)));
  }
}

TEST_F(DenseBatchTest, AReusedRowHasNothingOfTheOneBefore) {
  const KvCachePtr kv = seated(30);
  decode({0});
  kv->close();
  seated(3);
  batch->publish(0);
  expect_device_tables();
  record({});
  batch->remove(at_row(0));
  batch->publish(0);
  expect_device_tables();
}

// --- what goes up ---

TEST_F(DenseBatchTest, NothingChangedUploadsNothing) {
  seated(22);
  step({0});
  counter->reset();
  EXPECT_EQ(batch->publish(0), std::vector<std::int32_t>{});
  EXPECT_EQ(counter->patches, 0);
  EXPECT_EQ(counter->records, 0);
  batch->wait_ready(0);
  record({});
}

TEST_F(DenseBatchTest, ATokenWithinItsPagesUploadsTheRowStateAlone) {
  seated(21);
  step({0});
  decode({0});  // flushes nothing, for the history was imported
  grow_tokens({{0, 23}});
  EXPECT_EQ(published_words(), kRowStateWords);
}

TEST_F(DenseBatchTest, ANewPageUploadsOneEntryOfEachTable) {
  seated(24);
  step({0});
  grow_tokens({{0, 25}});
  // Of four layer groups an entry and a count. No page leaves a window: token 17 is still read.
  EXPECT_EQ(published_words(), kRowStateWords + 4 * 2);
}

TEST_F(DenseBatchTest, AWindowThatMovesOnUploadsTheEntryThatWentAndTheOneThatCame) {
  seated(28);
  step({0});
  const std::vector<std::int32_t> before = at_row(0).get_base_page_indices(group_of(101));
  EXPECT_EQ(std::ranges::count(before, -1), 5);
  grow_tokens({{0, 29}});
  // The sparse group and layer 100: an entry and a count; so too the windows, and in none a page
  // has become stale, since the history is what it was.
  EXPECT_EQ(published_words(), kRowStateWords + 4 * 2);
  for (int i = 0; i < 3; ++i) decode({0});
  grow_tokens({{0, 32}});  // the history is 31: token 24 is the oldest that it reads
  const std::int64_t words = published_words();
  EXPECT_EQ(at_row(0).get_base_page_indices(group_of(101))[5], -1);
  // One entry of each window's table, no new page.
  EXPECT_EQ(words, kRowStateWords + 2);
}

TEST_F(DenseBatchTest, AnotherRowsChangeCostsARowNothing) {
  seated(24);
  seated(8);
  step({0, 1});
  grow_tokens({{1, 9}});
  counter->reset();
  EXPECT_EQ(batch->publish(0), std::vector<std::int32_t>{1});
  EXPECT_LE(counter->patched_words, kRowStateWords + 4 * 2);
}

TEST_F(DenseBatchTest, ASuspendIsOneCopyPerLayerGroupAndPool) {
  const KvCachePtr kv = prefilled(22);
  counter->reset();
  kv->suspend(0);
  EXPECT_EQ(counter->page_copies, 1 + 2 + 2);
  counter->reset();
  EXPECT_TRUE(kv->resume(0));
  EXPECT_EQ(counter->page_copies, 1 + 2 + 2);
}

// --- resize ---

TEST_F(DenseBatchTest, EachRowOfABatchedResizeHasItsOwnResult) {
  const KvCachePtr first = seated(28);                        // 7 pages of layer 100
  const KvCachePtr second = seated(28);                       // 7
  const KvCachePtr third = seated(4, 4 + kCached + kWindow);  // 1; 15 of 16
  const std::vector<ResizeResult> results = batch->resize_tokens(
      std::vector<RowTokens>{
          {0, 29},
          {1, 29},
          {2, 5},
      },
      0);
  EXPECT_EQ(results, (std::vector<ResizeResult>{ResizeResult::kOk, ResizeResult::kOutOfPages,
                                                ResizeResult::kOutOfPages}));
  EXPECT_EQ(first->length(), 29);
  EXPECT_EQ(second->length(), 28);
  EXPECT_EQ(second->host_pages().size(), 7U);  // what the sparse group had taken is back
  EXPECT_EQ(third->capacity(), 4);
  batch->publish(0);
  expect_device_tables();
  EXPECT_EQ(batch->row_states_address()[1].length, 28);
}

TEST_F(DenseBatchTest, ResizeInUnitsIsRefusedWithDenseLayers) {
  seated(8);
  expect_refused<InvalidState>("Batch.resize",
                               [&] { (void)batch->resize(std::vector<RowLength>{{0, 9}}); });
}

TEST_F(DenseBatchTest, ResizeTokensRefusesWhatResizeDoes) {
  seated(8);
  const auto refuse = [&](std::vector<RowTokens> rows) {
    expect_refused<InvalidArgument>("Batch.resize_tokens",
                                    [&] { (void)batch->resize_tokens(rows, 0); });
  };
  refuse({{0, 9}, {0, 9}});
  refuse({{1, 9}});
  refuse({{-1, 9}});
  refuse({{4, 9}});
  refuse({{0, 7}});
  EXPECT_EQ(batch->resize_tokens(std::vector<RowTokens>{{0, 11}}, 0),
            std::vector<ResizeResult>{ResizeResult::kPastNewUnits});
  EXPECT_EQ(batch->resize_tokens(std::vector<RowTokens>{{0, kNeed + 1}}, 0),
            std::vector<ResizeResult>{ResizeResult::kPastNeed});
  batch->publish(0);
  expect_refused<InvalidState>("Batch.resize_tokens", [&] {
    (void)batch->resize_tokens(std::vector<RowTokens>{{0, 9}}, 0);
  });
}

TEST_F(DenseBatchTest, ResizingASeatedRequestIsResizingItsRow) {
  const KvCachePtr kv = seated(24);
  step({0});
  EXPECT_TRUE(kv->resize(25, 24, 0));
  EXPECT_EQ(kv->length(), 25);
  EXPECT_EQ(batch->dirty_rows(), std::vector<std::int32_t>{0});
  expect_refused<InvalidArgument>("KvCache.resize", [&] { (void)kv->resize(27, 25, 0); });
  expect_refused<InvalidArgument>("KvCache.resize", [&] { (void)kv->resize(27, 24, 0); });
  write_pages(*kv);
  step({0});
  EXPECT_EQ(kv->history_length(), 25);
}

TEST_F(DenseBatchTest, ARowThatIsNotCommittedHasItsTokensBack) {
  const KvCachePtr kv = seated(24);
  grow_tokens({{0, 26}});
  open();
  launch(0);
  batch->abort_step(0);
  EXPECT_EQ(kv->history_length(), 24);
  EXPECT_EQ(kv->length(), 24);
  decode({0});
  EXPECT_EQ(kv->history_length(), 25);
  EXPECT_TRUE(holds_pages(*kv));
}

TEST_F(DenseBatchTest, ARequestWhosePrefillHasNotArrivedDoesNotSit) {
  const KvCachePtr kv = request({kNeed, -1});
  EXPECT_TRUE(kv->resume(0));
  EXPECT_TRUE(kv->resize(16, 8, 0));
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
  import(*kv, 8);
  batch->add(*kv);
}

TEST_F(DenseBatchTest, ARequestWithoutPagesForItsHistoryDoesNotSit) {
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 8);
  EXPECT_TRUE(kv->resume(0));
  expect_refused<InvalidState>("Batch.add", [&] { batch->add(*kv); });
  EXPECT_TRUE(kv->resize(8, 8, 0));
  batch->add(*kv);
}

TEST_F(DenseBatchTest, OneDecodesWhileAnotherIsPrefilled) {
  seated(20);
  step({0});
  const KvCachePtr kv = request({kNeed, -1});
  EXPECT_TRUE(kv->resume(0));
  for (std::int32_t done = 0; done < 16; done += 8) {
    EXPECT_TRUE(kv->resize(done + 8, done, 0));
    write_pages(*kv);
    decode({0});
    EXPECT_EQ(batch->dirty_rows(), std::vector<std::int32_t>{0});
    import(*kv, 8);
  }
  EXPECT_TRUE(kv->resize(16, 16, 0));
  batch->add(*kv);
  decode({0, 1});
  EXPECT_TRUE(holds_pages(at_row(0)));
  EXPECT_TRUE(holds_pages(*kv));
  expect_history(*kv);
}

// --- units of several tokens ---

TEST_F(DenseBatchTest, AUnitComesWithItsLastToken) {
  KvCacheManagerConfig c = dense_config();
  c.tokens_per_block = 4 * kPage;
  c.tokens_per_unit = 4;
  use_dense(c);
  const KvCachePtr kv = request({kNeed, -1});
  import(*kv, 5);
  EXPECT_TRUE(kv->resume(0));
  EXPECT_TRUE(kv->resize(22, 22, 0));  // 5 units and two tokens
  write_pages(*kv);
  batch->add(*kv);
  step({0});
  for (std::int32_t tokens = 23; tokens <= 32; ++tokens) {
    const bool changed = tokens % 4 == 0 || (tokens % 4 == 1 && tokens > 24);  // or was committed
    grow_tokens({{0, tokens}});
    EXPECT_EQ(kv->length(), tokens / 4);
    EXPECT_EQ(kv->committed_length(), (tokens - 1) / 4);
    EXPECT_EQ(batch->dirty_rows(), std::vector<std::int32_t>(changed ? 1 : 0, 0));
    step({0});
    EXPECT_EQ(kv->history_length(), tokens);
    EXPECT_EQ(kv->committed_length(), tokens / 4);
  }
  EXPECT_TRUE(holds_pages(*kv));
}

// --- the quiet traps of offloading ---

TEST_F(DenseBatchTest, UnitsAreFlushedAlsoWhileNoPageBecomesStale) {
  const KvCachePtr kv = seated(20);
  decode({0});
  decode({0});
  EXPECT_EQ(kv->watermark(), 21);  // within one page, and no table has changed
  expect_history(*kv);
}

TEST_F(DenseBatchTest, HistoryOutlivesTheWindowsOfOtherLayers) {
  const KvCachePtr kv = seated(4);
  for (int i = 0; i < 30; ++i) decode({0});
  EXPECT_EQ(kv->get_base_page_indices(group_of(101))[1], -1);
  EXPECT_EQ(kv->host_pages().size(), 9U);
  expect_history(*kv);
}

TEST_F(DenseBatchTest, AResizeThatFailsLeavesFlushedHistoryOnTheHost) {
  const KvCachePtr kv = seated(28);
  decode({0});
  decode({0});
  seated(32);
  const std::int32_t watermark = kv->watermark();
  const std::vector<std::int32_t> host = kv->host_pages();
  const Snapshot before = snapshot();
  EXPECT_EQ(batch->resize_tokens(std::vector<RowTokens>{{1, 33}}, 0),
            std::vector<ResizeResult>{ResizeResult::kOutOfPages});
  EXPECT_EQ(first_difference(before, snapshot()), "");
  EXPECT_EQ(kv->watermark(), watermark);
  EXPECT_EQ(kv->host_pages(), host);
  expect_history(*kv);
}

}  // namespace
}  // namespace sparse_kvcm::testing
