// Host page ids: exact accounting and long runs.
#include "storage/page_allocator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace sparse_kvcm {
namespace {

using Pages = std::vector<std::int32_t>;

Pages range(std::int32_t first, std::int32_t count) {
  Pages pages(static_cast<std::size_t>(count));
  std::iota(pages.begin(), pages.end(), first);
  return pages;
}

TEST(PageAllocatorTest, GivesOneRunToARequestThatFitsInOne) {
  PageAllocator allocator(16);
  Pages pages;
  EXPECT_TRUE(allocator.grow(pages, 5, 5));
  EXPECT_EQ(pages, range(0, 5));
  EXPECT_EQ(allocator.num_free(), 11);
}

TEST(PageAllocatorTest, ASharedPageIsFreeOnceEachOwnerHasGivenItBack) {
  PageAllocator allocator(16);
  Pages first;
  EXPECT_TRUE(allocator.grow(first, 5, 5));
  Pages second(first.begin(), first.begin() + 3);
  allocator.share(second);
  EXPECT_TRUE(allocator.grow(second, 4, 4));
  EXPECT_EQ(allocator.num_free(), 10);
  allocator.shrink(first, 0);
  EXPECT_EQ(first, Pages());
  EXPECT_EQ(allocator.num_free(), 12);  // the two that were the first's alone
  Pages other;
  EXPECT_TRUE(allocator.grow(other, 12, 12));
  for (const std::int32_t page : second) EXPECT_EQ(std::ranges::count(other, page), 0);
  allocator.shrink(second, 0);
  allocator.shrink(other, 0);
  EXPECT_EQ(allocator.num_free(), 16);
}

TEST(PageAllocatorTest, RequestsThatGrowInTurnsStayContiguousWithinWhatTheyExpect) {
  PageAllocator allocator(64);
  std::vector<Pages> requests(4);
  for (std::int32_t size = 1; size <= 16; ++size) {
    for (Pages& pages : requests) ASSERT_TRUE(allocator.grow(pages, size, 16));
  }
  for (const Pages& pages : requests) EXPECT_EQ(pages, range(pages.front(), 16));
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST(PageAllocatorTest, ClaimedPagesGoToOthersWhenNothingElseIsLeft) {
  PageAllocator allocator(8);
  Pages first;
  Pages second;
  ASSERT_TRUE(allocator.grow(first, 1, 8));
  EXPECT_EQ(allocator.num_free(), 7);
  ASSERT_TRUE(allocator.grow(second, 7, 7));
  EXPECT_EQ(allocator.num_free(), 0);
  std::sort(second.begin(), second.end());
  EXPECT_EQ(second, range(1, 7));
}

TEST(PageAllocatorTest, GrowTakesWhatThereIsAndSaysThatItWasNotEnough) {
  PageAllocator allocator(3);
  Pages pages;
  EXPECT_FALSE(allocator.grow(pages, 4, 4));
  EXPECT_EQ(pages.size(), 3u);
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST(PageAllocatorTest, GrowToASmallerCountChangesNothing) {
  PageAllocator allocator(4);
  Pages pages;
  ASSERT_TRUE(allocator.grow(pages, 3, 3));
  EXPECT_TRUE(allocator.grow(pages, 2, 3));
  EXPECT_EQ(pages.size(), 3u);
}

TEST(PageAllocatorTest, PagesGivenBackJoinIntoOneRun) {
  PageAllocator allocator(12);
  std::vector<Pages> requests(3);
  for (Pages& pages : requests) ASSERT_TRUE(allocator.grow(pages, 4, 4));
  for (const std::size_t i : {1u, 0u, 2u}) allocator.shrink(requests[i], 0);
  Pages whole;
  ASSERT_TRUE(allocator.grow(whole, 12, 12));
  EXPECT_EQ(whole, range(0, 12));
}

TEST(PageAllocatorTest, AnAllocatorWithoutPagesRefusesEverything) {
  PageAllocator allocator(0);
  Pages pages;
  EXPECT_FALSE(allocator.grow(pages, 1, 1));
  EXPECT_TRUE(allocator.grow(pages, 0, 0));
}

TEST(PageAllocatorTest, PagesBeyondAShrinkDrainWhereTheyAre) {
  PageAllocator allocator(8);
  Pages low;
  Pages high;
  ASSERT_TRUE(allocator.grow(low, 2, 2));
  ASSERT_TRUE(allocator.grow(high, 5, 5));
  allocator.set_target(4);
  EXPECT_EQ(allocator.num_free(), 0);
  EXPECT_EQ(allocator.num_draining(), 3);
  EXPECT_EQ(allocator.extent(), 7);
  allocator.shrink(high, 0);
  EXPECT_EQ(allocator.num_draining(), 0);
  EXPECT_EQ(allocator.num_free(), 2);
  EXPECT_EQ(allocator.extent(), 4);
}

TEST(PageAllocatorTest, AShrinkThatIsTakenBackGivesItsPagesBackAsOneRun) {
  PageAllocator allocator(8);
  Pages pages;
  ASSERT_TRUE(allocator.grow(pages, 8, 8));
  allocator.set_target(3);
  allocator.shrink(pages, 0);
  allocator.set_target(10);
  ASSERT_TRUE(allocator.grow(pages, 10, 10));
  EXPECT_EQ(pages, range(0, 10));
}

TEST(PageAllocatorTest, RandomTargetsNeverMoveOrLoseAPage) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::int32_t target = 40;
    PageAllocator allocator(target);
    std::vector<Pages> requests(5);
    for (int step = 0; step < 200; ++step) {
      Pages& pages = requests[random() % requests.size()];
      const Pages before = pages;
      const auto count = static_cast<std::int32_t>(random() % 16);
      const auto dice = random() % 4;
      if (dice == 0) {
        target = static_cast<std::int32_t>(random() % 64);
        allocator.set_target(target);
      } else if (dice == 1) {
        allocator.shrink(pages, count);
      } else {
        allocator.grow(pages, count, count + 8);
        for (std::size_t i = before.size(); i < pages.size(); ++i) ASSERT_LT(pages[i], target);
      }
      ASSERT_TRUE(std::equal(
          pages.begin(),
          pages.begin() + static_cast<std::ptrdiff_t>(std::min(pages.size(), before.size())),
          before.begin()));
      Pages used;
      for (const Pages& p : requests) used.insert(used.end(), p.begin(), p.end());
      std::sort(used.begin(), used.end());
      ASSERT_EQ(std::adjacent_find(used.begin(), used.end()), used.end());
      const auto draining = used.end() - std::lower_bound(used.begin(), used.end(), target);
      ASSERT_EQ(allocator.num_draining(), draining);
      ASSERT_EQ(allocator.num_free(), target - (std::ssize(used) - draining));
      ASSERT_EQ(allocator.extent(), used.empty() ? target : std::max(target, used.back() + 1));
    }
  }
}

TEST(PageAllocatorTest, RandomGrowthAndReturnNeverSharesOrLosesAPage) {
  constexpr std::int32_t kPages = 97;
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    PageAllocator allocator(kPages);
    std::vector<Pages> requests(7);
    for (int step = 0; step < 200; ++step) {
      Pages& pages = requests[random() % requests.size()];
      const auto have = static_cast<std::int32_t>(pages.size());
      const auto count = static_cast<std::int32_t>(random() % 24);
      if (random() % 3 == 0) {
        allocator.shrink(pages, count);
        ASSERT_EQ(pages.size(), static_cast<std::size_t>(std::min(have, count)));
      } else {
        const std::int32_t free = allocator.num_free();
        const bool enough = allocator.grow(pages, count, count + 8);
        ASSERT_EQ(enough, count - have <= free);
        const std::int32_t expected = std::max(have, std::min(count, have + free));
        ASSERT_EQ(pages.size(), static_cast<std::size_t>(expected));
      }
      Pages used;
      for (const Pages& p : requests) used.insert(used.end(), p.begin(), p.end());
      std::sort(used.begin(), used.end());
      ASSERT_EQ(std::adjacent_find(used.begin(), used.end()), used.end());
      ASSERT_TRUE(used.empty() || (used.front() >= 0 && used.back() < kPages));
      ASSERT_EQ(allocator.num_free(), kPages - static_cast<std::int32_t>(used.size()));
    }
    for (Pages& pages : requests) allocator.shrink(pages, 0);
    Pages whole;
    ASSERT_TRUE(allocator.grow(whole, kPages, kPages));
    ASSERT_EQ(whole, range(0, kPages));
  }
}

}  // namespace
}  // namespace sparse_kvcm
