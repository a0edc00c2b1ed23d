// Page tables of a request: windows, scratch, rollback and what goes back.
#include "sparse_kvcm/request_pages.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "faulty_backend.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::dense_layer;
using testing::kMiB;
using testing::small_config;

constexpr std::int32_t kFull = 0;  // layer groups of the configs below
constexpr std::int32_t kWindow = 1;
constexpr std::int64_t kSlot = kMiB / 2;  // 4 slots a granule

using Table = std::vector<std::int32_t>;

Table table(const RequestPages& pages, std::int32_t group) {
  const auto indices = pages.get_base_page_indices(group);
  return {indices.begin(), indices.end()};
}

Table scratch(const RequestPages& pages, std::int32_t group) {
  const auto slots = pages.get_scratch_slots(group);
  return {slots.begin(), slots.end()};
}

// Pages that have a slot of their own: '#', those without: '.'.
std::string shape(const RequestPages& pages, std::int32_t group) {
  std::string text;
  for (const std::int32_t slot : pages.get_base_page_indices(group)) text += slot < 0 ? '.' : '#';
  return text;
}

class RequestPagesTest : public ::testing::Test {
 protected:
  // A full layer and seven window layers, pages of 4 tokens, window 8.
  static StorageConfig config(std::int64_t quota = 64 * kMiB) {
    StorageConfig made = small_config({dense_layer(0, {{"K", kSlot, {}, false}})}, quota);
    for (std::int32_t layer = 1; layer <= 7; ++layer) {
      made.layers.push_back(dense_layer(layer, {{"K", kSlot / 7, {}, false}}, 8));
    }
    made.typical_step = BatchDesc{{{64, 63}}, 0};
    return made;
  }
  static StorageConfig scratch_config(std::int32_t rewind = 0) {
    StorageConfig made = config();
    made.swa_scratch_reuse = SwaScratchReuseConfig{rewind};
    return made;
  }
  void make(const StorageConfig& config) {
    backend_ = std::make_shared<testing::FaultyBackend>();
    storage_ = std::make_unique<Storage>(config, backend_);
    storage_->wait_usable(kGpuLevel);
    fresh_ = storage_->get_storage_statistics(kGpuLevel);
  }
  std::shared_ptr<RequestPages> request() { return storage_->create_request_pages(); }
  std::int64_t used(std::size_t pool_group) {
    return storage_->get_storage_statistics(kGpuLevel)[pool_group].unavailable;
  }
  void expect_fresh() { EXPECT_EQ(storage_->get_storage_statistics(kGpuLevel), fresh_); }

  std::shared_ptr<testing::FaultyBackend> backend_;
  std::unique_ptr<Storage> storage_;
  std::vector<PoolGroupStatistics> fresh_;
};

TEST_F(RequestPagesTest, ANewRequestHasNoPages) {
  make(config());
  const auto pages = request();
  EXPECT_TRUE(table(*pages, kFull).empty());
  ASSERT_TRUE(pages->resize(0, 0, 0));
  expect_fresh();
}

TEST_F(RequestPagesTest, PagesComeAtTheirFirstToken) {
  make(config());
  const auto pages = request();
  for (const auto& [capacity, expected] :
       std::vector<std::pair<std::int32_t, std::size_t>>{{1, 1}, {3, 1}, {4, 1}, {5, 2}, {8, 2}}) {
    ASSERT_TRUE(pages->resize(capacity, 0, 0));
    EXPECT_EQ(table(*pages, kFull).size(), expected) << capacity;
  }
}

TEST_F(RequestPagesTest, APageKeepsItsSlotWhileTheRequestGrows) {
  make(config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(9, 0, 0));
  const Table before = table(*pages, kFull);
  ASSERT_TRUE(pages->resize(30, 9, 0));
  const Table after = table(*pages, kFull);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), after.begin()));
}

TEST_F(RequestPagesTest, AWindowGivesUpWhatNoQueryReads) {
  make(config());
  const auto pages = request();
  for (std::int32_t length = 0; length < 40; ++length) {
    ASSERT_TRUE(pages->resize(length + 1, length, 0));
    EXPECT_LE(used(1), 3) << length;
  }
  EXPECT_EQ(shape(*pages, kFull), "##########");
  EXPECT_EQ(shape(*pages, kWindow), "........##");
}

TEST_F(RequestPagesTest, AHistoryThatComesFromElsewhereTakesOnlyPagesThatAreRead) {
  make(config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(100, 99, 0));
  EXPECT_EQ(used(0), 25);
  EXPECT_EQ(used(1), 2);
}

TEST_F(RequestPagesTest, PrefillPagesThatAreStaleAtItsEndShareScratchSlots) {
  make(scratch_config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(64, 0, 0));
  EXPECT_EQ(pages->get_swa_scratch_range(kWindow), (PageRange{0, 14}));
  EXPECT_EQ(scratch(*pages, kWindow).size(), 2u);  // 14 pages, 7 layers
  EXPECT_EQ(shape(*pages, kWindow), "..............##");
  EXPECT_EQ(shape(*pages, kFull), "################");
  EXPECT_EQ(used(1), 4);
  EXPECT_TRUE(pages->has_scratch_slots());
}

TEST_F(RequestPagesTest, DecodingGivesScratchBack) {
  make(scratch_config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(64, 0, 0));
  ASSERT_TRUE(pages->resize(65, 64, 0));
  EXPECT_FALSE(pages->has_scratch_slots());
  EXPECT_EQ(shape(*pages, kWindow), "..............###");
  EXPECT_EQ(used(1), 3);
}

TEST_F(RequestPagesTest, AStepThatGrowsWithinItsLastPageMayPutPagesInScratch) {
  make(scratch_config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(10, 0, 0));  // the next query, at 10, reads [3, 10]
  EXPECT_FALSE(pages->has_scratch_slots());
  ASSERT_TRUE(pages->resize(11, 0, 0));
  EXPECT_EQ(pages->get_swa_scratch_range(kWindow), (PageRange{0, 1}));
  EXPECT_EQ(shape(*pages, kWindow), ".##");
}

TEST_F(RequestPagesTest, ChunksReuseTheScratchSlotsThatAreThere) {
  make(scratch_config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(64, 0, 0));
  const Table first = scratch(*pages, kWindow);
  ASSERT_TRUE(pages->resize(192, 64, 0));  // 30 pages of scratch in 5 slots
  const Table second = scratch(*pages, kWindow);
  EXPECT_EQ(pages->get_swa_scratch_range(kWindow), (PageRange{16, 46}));
  ASSERT_EQ(second.size(), 5u);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), second.begin()));
  ASSERT_TRUE(pages->resize(200, 192, 0));
  EXPECT_FALSE(pages->has_scratch_slots());
}

TEST_F(RequestPagesTest, OnlyNewScratchHasToBeFree) {
  make(scratch_config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(64, 0, 0));
  // The next chunk needs two window pages more, and as many scratch slots as there are.
  const auto other = request();
  other->set_enable_swa_scratch_reuse(false);
  const auto left = static_cast<std::int32_t>(fresh_[1].total - used(1) - 2);
  ASSERT_TRUE(other->resize(4 * left, 0, 0));
  ASSERT_TRUE(pages->resize(128, 64, 0));
  EXPECT_EQ(scratch(*pages, kWindow).size(), 2u);
  EXPECT_EQ(used(1), fresh_[1].total);
}

TEST_F(RequestPagesTest, WhileScratchIsThereTheHistoryMustReachItsEnd) {
  make(scratch_config(5));
  const auto pages = request();
  ASSERT_TRUE(pages->resize(64, 0, 0));
  EXPECT_EQ(pages->get_swa_scratch_range(kWindow), (PageRange{0, 13}));
  EXPECT_THROW(static_cast<void>(pages->resize(64, 58, 0)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(pages->resize(66, 65, 0)), InvalidArgument);
  EXPECT_EQ(pages->capacity(), 64);
  ASSERT_TRUE(pages->resize(65, 59, 0));
  EXPECT_EQ(shape(*pages, kWindow), ".............####");
}

TEST_F(RequestPagesTest, AStepThatIsDroppedGivesItsPagesAndScratchBack) {
  make(scratch_config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(10, 0, 0));
  ASSERT_TRUE(pages->resize(74, 10, 0));
  ASSERT_TRUE(pages->has_scratch_slots());
  pages->drop_step(0);
  EXPECT_FALSE(pages->has_scratch_slots());
  EXPECT_EQ(pages->capacity(), 10);
  EXPECT_EQ(shape(*pages, kFull), "###");
  EXPECT_EQ(shape(*pages, kWindow), "###");
  EXPECT_EQ(used(0), 3);
  EXPECT_EQ(used(1), 3);
  ASSERT_TRUE(pages->resize(74, 10, 0));
}

TEST_F(RequestPagesTest, ScratchReuseCanBeSwitchedWhileThereIsNone) {
  make(scratch_config());
  const auto pages = request();
  pages->set_enable_swa_scratch_reuse(false);
  ASSERT_TRUE(pages->resize(64, 0, 0));
  EXPECT_FALSE(pages->has_scratch_slots());
  EXPECT_EQ(used(1), 16);
  pages->set_enable_swa_scratch_reuse(true);
  ASSERT_TRUE(pages->resize(192, 64, 0));
  EXPECT_TRUE(pages->has_scratch_slots());
  EXPECT_THROW(pages->set_enable_swa_scratch_reuse(false), InvalidArgument);
  make(config());
  EXPECT_THROW(request()->set_enable_swa_scratch_reuse(true), InvalidArgument);
}

TEST_F(RequestPagesTest, ARequestThatDoesNotFitChangesNothing) {
  make(config(1));
  const auto total = static_cast<std::int32_t>(fresh_[0].total);
  const auto pages = request();
  ASSERT_TRUE(pages->resize(6, 2, 0));
  const auto before = storage_->get_storage_statistics(kGpuLevel);
  const Table full = table(*pages, kFull);
  EXPECT_FALSE(pages->resize(4 * total + 1, 6, 0));
  EXPECT_EQ(storage_->get_storage_statistics(kGpuLevel), before);
  EXPECT_EQ(table(*pages, kFull), full);
  EXPECT_EQ(pages->capacity(), 6);
  EXPECT_EQ(pages->history_length(), 2);
  EXPECT_TRUE(pages->resize(12, 6, 0));
}

TEST_F(RequestPagesTest, LengthsThatGoBackOrCrossAreRefused) {
  make(config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(10, 5, 0));
  EXPECT_THROW(static_cast<void>(pages->resize(10, 4, 0)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(pages->resize(10, 11, 0)), InvalidArgument);
  ASSERT_TRUE(pages->resize(5, 5, 0));
  EXPECT_EQ(table(*pages, kFull).size(), 2u);
}

TEST_F(RequestPagesTest, EverythingGoesBackOnce) {
  make(scratch_config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(192, 0, 0));
  pages->close(0);
  expect_fresh();
  pages->close(0);
  expect_fresh();
  EXPECT_THROW(static_cast<void>(pages->resize(1, 0, 0)), InvalidState);
  EXPECT_THROW(pages->drop_step(0), InvalidState);
  {
    const auto other = request();
    ASSERT_TRUE(other->resize(10, 0, 0));
  }
  expect_fresh();
}

TEST_F(RequestPagesTest, RowsOfATableAreFilledUpWithNoPage) {
  make(config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(40, 39, 0));
  Table row(14, -777);
  pages->copy_base_page_indices(kWindow, row);
  Table expected = table(*pages, kWindow);
  expected.resize(14, kBadPageIndex);
  EXPECT_EQ(row, expected);
  EXPECT_THROW(pages->copy_base_page_indices(kWindow, std::span(row).first(9)), InvalidArgument);
  EXPECT_THROW(pages->copy_base_page_indices(2, row), InvalidArgument);
}

TEST_F(RequestPagesTest, ADeviceThatFailsLeavesTheRequestAsItWas) {
  make(scratch_config());
  const auto busy = request();
  ASSERT_TRUE(busy->resize(160, 0, 0));
  busy->close(0);  // so that slots come with an event to wait for
  const auto pages = request();
  ASSERT_TRUE(pages->resize(64, 0, 0));
  const auto before = storage_->get_storage_statistics(kGpuLevel);
  const Table window = table(*pages, kWindow);
  // A step of decoding gives a scratch slot back behind an event, and takes a page of the full
  // layer.
  std::int64_t calls = 0;
  for (;; ++calls) {
    backend_->fail_after(calls);
    try {
      ASSERT_TRUE(pages->resize(65, 64, 0));
      break;
    } catch (const testing::DeviceFault&) {
      EXPECT_EQ(storage_->get_storage_statistics(kGpuLevel), before);
      EXPECT_EQ(table(*pages, kWindow), window);
      EXPECT_TRUE(pages->has_scratch_slots());
      EXPECT_EQ(pages->capacity(), 64);
    }
  }
  EXPECT_TRUE(backend_->withdraw());
  EXPECT_GE(calls, 2);
}

// Kernels may still read what was given up, so nobody else gets it.
TEST_F(RequestPagesTest, SlotsWhoseLastUseTheDeviceCannotNameStayOutOfUseUntilItCan) {
  make(config(8 * kMiB));
  const auto pages_of_all = static_cast<std::int32_t>(std::min(fresh_[0].total, fresh_[1].total));
  const auto all = [&] { return request()->resize(4 * pages_of_all, 0, 0); };
  for (const bool captured : {true, false}) {
    const auto pages = request();
    ASSERT_TRUE(pages->resize(8, 0, 7));
    if (captured) {
      backend_->set_capturing(7);
    } else {
      backend_->fail_after(0);
    }
    pages->close(7);
    EXPECT_EQ(table(*pages, kFull), Table{});
    if (captured) {
      EXPECT_EQ(used(0), 2);
    } else {
      EXPECT_FALSE(backend_->withdraw());
      backend_->fail_after(0);  // the next try, too
    }
    EXPECT_FALSE(all());
    backend_->set_capturing({});
    static_cast<void>(backend_->withdraw());
    EXPECT_TRUE(all());
    expect_fresh();
  }
}

TEST_F(RequestPagesTest, CountersSayWhatMovedSinceTheLastCall) {
  make(config());
  const auto pages = request();
  ASSERT_TRUE(pages->resize(40, 0, 0));
  ASSERT_TRUE(pages->resize(40, 39, 0));
  EXPECT_FALSE(pages->resize(1'000'000'000, 39, 0));
  const std::vector<LayerGroupStatistics> expected{{10, 0, 1}, {10, 8, 0}};
  EXPECT_EQ(storage_->get_and_reset_statistics(), expected);
  EXPECT_EQ(storage_->get_and_reset_statistics(), std::vector<LayerGroupStatistics>(2));
}

TEST_F(RequestPagesTest, SparsePagesComeInRunsAndCoverTheCapacity) {
  StorageConfig sparse = config();
  sparse.layers.push_back(testing::sparse_layer(50, 4 * 65'536));
  sparse.cache_tiers.push_back({CacheTier::kHostMem, 32 * kMiB, 0});
  sparse.selection_groups = {{{50}, 4, UnitLayout({65'536})}};
  make(sparse);
  storage_->wait_usable(kSparseHistoryLevel);
  constexpr std::int32_t kSparse = 2;
  const auto host = [&] { return storage_->get_storage_statistics(kSparseHistoryLevel); };
  const auto fresh_host = host();
  const auto one = storage_->create_request_pages(40);
  const auto two = storage_->create_request_pages(40);
  for (std::int32_t length = 1; length <= 40; ++length) {
    ASSERT_TRUE(one->resize(length, length - 1, 0));
    ASSERT_TRUE(two->resize(length, length - 1, 0));
  }
  const Table pages = table(*two, kSparse);
  ASSERT_EQ(pages.size(), 10u);
  for (std::size_t i = 1; i < pages.size(); ++i) EXPECT_EQ(pages[i], pages[i - 1] + 1);
  EXPECT_EQ(host()[0].unavailable, 20);
  EXPECT_FALSE(two->resize(100'000, 40, 0));
  EXPECT_EQ(host()[0].unavailable, 20);
  const auto hog = storage_->create_request_pages();
  const auto left = static_cast<std::int32_t>(host()[0].free) - 2;
  ASSERT_LE(left, fresh_[kFull].total - 20);
  ASSERT_TRUE(hog->resize(4 * left, 4 * left, 0));
  EXPECT_FALSE(two->resize(40 + 4 * 3, 40, 0));
  EXPECT_EQ(host()[0].free, 2);
  hog->close(0);
  ASSERT_TRUE(two->resize(40, 40, 0));
  one->close(0);
  two->close(0);
  EXPECT_EQ(host(), fresh_host);
  expect_fresh();
}

}  // namespace
}  // namespace sparse_kvcm
