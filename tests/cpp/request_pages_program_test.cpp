// Random requests against what page_range.hpp says of their tables: windows, sinks and scratch,
// growing, shrinking, dropping, suspended and resumed.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::dense_layer;
using testing::kMiB;

constexpr std::int32_t kTokens = 4;
constexpr std::int32_t kRequests = 3;

class RequestPagesProgramTest : public ::testing::TestWithParam<bool> {
 protected:
  RequestPagesProgramTest() {
    StorageConfig config = testing::small_config(
        {dense_layer(0, {{"K", kMiB / 4, {}, false}}),
         dense_layer(1, {{"K", kMiB / 8, {}, false}, {"V", kMiB / 4, {}, false}}, 8),
         dense_layer(2, {{"K", kMiB / 8, {}, false}, {"V", kMiB / 4, {}, false}}, 5, 6),
         dense_layer(3, {{"K", kMiB / 8, {}, false}}, 13)},
        40 * kMiB);
    config.cache_tiers.push_back({CacheTier::kHostMem, 24 * kMiB, 0});
    config.max_util_for_resume = 1.0;
    if (GetParam()) config.swa_scratch_reuse = SwaScratchReuseConfig{2};
    storage_ = std::make_shared<Storage>(config, StorageOptions{StorageFill::kAtOnce, {}, nullptr});
    for (std::int32_t r = 0; r < kRequests; ++r) requests_.push_back(fresh_request());
  }

  struct Request {
    std::shared_ptr<RequestPages> pages;
    std::vector<std::vector<std::int32_t>> known;  // tables, by what was told of their changes
    std::vector<std::vector<std::int32_t>> buffers;
  };

  Request fresh_request() {
    Request request{storage_->create_request_pages(0), {}, {}};
    request.pages->track_changes(true);
    request.known.resize(groups().size());
    request.buffers.resize(groups().size(), std::vector<std::int32_t>(64, 77));
    for (std::size_t g = 0; g < groups().size(); ++g) {
      request.pages->set_base_page_index_buf(static_cast<std::int32_t>(g), request.buffers[g]);
    }
    return request;
  }
  const std::vector<LayerGroupDesc>& groups() const { return storage_->layout().layer_groups(); }

  void expect_table(Request& request, std::int32_t group) {
    const RequestPages& pages = *request.pages;
    const auto table = pages.get_base_page_indices(group);
    const LifeCycle& life_cycle = groups()[static_cast<std::size_t>(group)].life_cycle;
    const PageRange stale = stale_pages(life_cycle, kTokens, pages.history_length());
    const PageRange scratch = pages.get_swa_scratch_range(group);
    ASSERT_EQ(table.size(), static_cast<std::size_t>((pages.capacity() + kTokens - 1) / kTokens));
    for (std::int32_t page = 0; page < std::ssize(table); ++page) {
      const bool there = !pages.is_suspended() && !stale.contains(page) && !scratch.contains(page);
      ASSERT_EQ(table[static_cast<std::size_t>(page)] >= 0, there)
          << "layer group " << group << ", page " << page << " of " << pages.capacity() << ", "
          << pages.history_length();
    }
    std::vector<std::int32_t>& known = request.known[static_cast<std::size_t>(group)];
    known.resize(table.size(), -1);
    for (const std::int32_t page : pages.changes(group)) {
      if (page < std::ssize(table)) {
        known[static_cast<std::size_t>(page)] = table[static_cast<std::size_t>(page)];
      }
    }
    ASSERT_TRUE(std::ranges::equal(known, table)) << "a change was not told";
    std::vector<std::int32_t> expected(table.begin(), table.end());
    expected.resize(64, -1);
    ASSERT_EQ(request.buffers[static_cast<std::size_t>(group)], expected);
  }

  // Each slot has one owner, and all others are free.
  void expect_slots() {
    std::vector<std::multiset<std::int32_t>> used(storage_->layout().pool_groups().size());
    for (const Request& request : requests_) {
      for (std::size_t g = 0; g < groups().size(); ++g) {
        std::multiset<std::int32_t>& slots = used[static_cast<std::size_t>(groups()[g].pool_group)];
        const auto group = static_cast<std::int32_t>(g);
        for (const std::int32_t slot : request.pages->get_base_page_indices(group)) {
          if (slot >= 0) slots.insert(slot);
        }
        for (const std::int32_t slot : request.pages->get_scratch_slots(group)) slots.insert(slot);
      }
    }
    for (const PoolGroupStatistics& pool : storage_->get_storage_statistics(kGpuLevel)) {
      const auto& slots = used[static_cast<std::size_t>(pool.pool_group)];
      ASSERT_EQ(pool.total - pool.free, std::ssize(slots));
      ASSERT_EQ(std::set(slots.begin(), slots.end()).size(), slots.size());
    }
  }

  void one_operation(Request& request) {
    RequestPages& pages = *request.pages;
    const auto dice = std::uniform_int_distribution(0, 99)(random_);
    const auto between = [&](std::int32_t low, std::int32_t high) {
      return std::uniform_int_distribution(low, std::max(low, high))(random_);
    };
    if (dice < 4) {
      pages.close(0);
      request = fresh_request();
    } else if (dice < 14) {
      pages.drop_step(0);
    } else if (dice < 24) {
      resized_ += pages.suspend(0) ? 1 : 0;
    } else if (pages.is_suspended()) {
      resized_ += pages.resume(0) ? 1 : 0;
    } else {
      const std::int32_t rewind = GetParam() && pages.has_scratch_slots() ? 2 : 1000;
      const std::int32_t least = std::max(pages.history_length(), pages.capacity() - rewind);
      const std::int32_t history = between(least, pages.capacity());
      const bool big = dice < 40;
      const std::int32_t capacity = std::min(250, history + between(0, big ? 60 : 5));
      if (capacity >= history) resized_ += pages.resize(capacity, history, 0) ? 1 : 0;
    }
  }

  std::shared_ptr<Storage> storage_;
  std::vector<Request> requests_;
  std::mt19937 random_{11};
  std::int32_t resized_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Scratch, RequestPagesProgramTest, ::testing::Bool(),
                         [](const auto& with) { return with.param ? "With" : "Without"; });

TEST_P(RequestPagesProgramTest, TablesAreWhatTheRangesSayAndEverySlotHasOneOwner) {
  for (std::int32_t i = 0; i < 20'000; ++i) {
    Request& request = requests_[random_() % kRequests];
    one_operation(request);
    for (std::int32_t group = 0; group < std::ssize(groups()); ++group) {
      ASSERT_NO_FATAL_FAILURE(expect_table(request, group)) << "operation " << i;
    }
    request.pages->forget_changes();
    ASSERT_NO_FATAL_FAILURE(expect_slots()) << "operation " << i;
  }
  EXPECT_GT(resized_, 8'000);
  for (Request& request : requests_) request.pages->close(0);
  for (const std::int32_t level : {0, 1}) {
    for (const PoolGroupStatistics& pool : storage_->get_storage_statistics(level)) {
      EXPECT_EQ(pool.free, pool.total);
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm
