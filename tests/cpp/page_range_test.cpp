// Windows, sinks and scratch, against a token-by-token account of what queries read.
#include "sparse_kvcm/page_range.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace sparse_kvcm {
namespace {

constexpr LifeCycle kFull{};

LifeCycle window(std::int32_t size, std::int32_t sinks = 0) { return {size, sinks, false}; }

// Pages that some query at position >= `history` reads, of those with a token below it.
std::vector<bool> read_pages(const LifeCycle& life_cycle, std::int32_t tokens,
                             std::int32_t history) {
  std::vector<bool> read(static_cast<std::size_t>((history + tokens - 1) / tokens));
  const std::int32_t first = history + 1 - life_cycle.sliding_window_size.value_or(history + 1);
  for (std::int32_t token = 0; token < history; ++token) {
    if (token >= first || token < life_cycle.num_sink_tokens) {
      read[static_cast<std::size_t>(token / tokens)] = true;
    }
  }
  return read;
}

TEST(PageRangeTest, WithoutAWindowNothingIsStale) {
  for (const std::int32_t history : {0, 1, 63, 64, 65, 1'000'000}) {
    EXPECT_EQ(stale_pages(kFull, 64, history).size(), 0);
    EXPECT_EQ(scratch_pages(kFull, 64, 0, history, 0).size(), 0);
  }
}

TEST(PageRangeTest, APageIsStaleFromTheStepOnThatNoLongerReadsItsLastToken) {
  // Page 0 holds tokens 0-3. The query at 10 reads [3, 10] through a window of 8, that at 11 [4,
  // 11].
  EXPECT_EQ(stale_pages(window(8), 4, 10), (PageRange{0, 0}));
  EXPECT_EQ(stale_pages(window(8), 4, 11), (PageRange{0, 1}));
}

TEST(PageRangeTest, SinksAreNeverStale) {
  EXPECT_EQ(stale_pages(window(8, 5), 4, 100), (PageRange{2, 23}));
  EXPECT_EQ(stale_pages(window(8, 5), 4, 3), (PageRange{1, 1}));
}

TEST(PageRangeTest, StalePagesAreThoseThatNoQueryReads) {
  for (const std::int32_t tokens : {1, 2, 3, 4, 7}) {
    for (const std::int32_t size : {1, 2, 3, 4, 5, 8, 13}) {
      for (const std::int32_t sinks : {0, 1, 4, 5}) {
        for (std::int32_t history = 0; history <= 40; ++history) {
          const LifeCycle life_cycle = window(size, sinks);
          const std::vector<bool> read = read_pages(life_cycle, tokens, history);
          const PageRange stale = stale_pages(life_cycle, tokens, history);
          for (std::int32_t page = 0; page < static_cast<std::int32_t>(read.size()); ++page) {
            // A page that the query itself writes into stays, read or not.
            const bool open = page == history / tokens;
            ASSERT_EQ(stale.contains(page), !read[static_cast<std::size_t>(page)] && !open)
                << "page " << page << " of " << tokens << " tokens, window " << size << ", sinks "
                << sinks << ", history " << history;
          }
        }
      }
    }
  }
}

TEST(PageRangeTest, MostPagesIsTheMostOfAllLengths) {
  for (const std::int32_t tokens : {1, 2, 3, 4, 7}) {
    for (const std::int32_t size : {1, 2, 3, 4, 5, 8, 13}) {
      for (const std::int32_t sinks : {0, 1, 4, 5}) {
        const LifeCycle life_cycle = window(size, sinks);
        std::int32_t most = 0;
        for (std::int32_t length = 1; length <= 60; ++length) {
          const std::int32_t pages = (length + tokens - 1) / tokens;
          most = std::max(most, pages - stale_pages(life_cycle, tokens, length - 1).size());
          ASSERT_EQ(most_pages(life_cycle, tokens, length), most)
              << tokens << " tokens, window " << size << ", sinks " << sinks << ", length "
              << length;
        }
        ASSERT_EQ(most_pages(life_cycle, tokens), most);
      }
    }
  }
  EXPECT_EQ(most_pages(kFull, 64, 65), 2);
}

TEST(PageRangeTest, AWindowThatIsNoWholeNumberOfPagesCountsThePagesItTouches) {
  EXPECT_EQ(most_pages(window(128), 64), 3);  // 128 tokens that begin mid-page
  EXPECT_EQ(most_pages(window(129), 64), 3);
  EXPECT_EQ(most_pages(window(130), 64), 4);
}

TEST(PageRangeTest, ScratchIsWhatAPrefillWritesAndNobodyReadsAfterIt) {
  // 64 tokens at once through a window of 8 in pages of 4: the next query, at 64, reads [57, 64].
  EXPECT_EQ(scratch_pages(window(8), 4, 0, 64, 0), (PageRange{0, 14}));
  // 5 of them may be taken back: then it is at 59 and reads [52, 59].
  EXPECT_EQ(scratch_pages(window(8), 4, 0, 64, 5), (PageRange{0, 13}));
  // What was written before is not scratch; neither are sinks.
  EXPECT_EQ(scratch_pages(window(8), 4, 17, 64, 0), (PageRange{5, 14}));
  EXPECT_EQ(scratch_pages(window(8, 1), 4, 0, 64, 0), (PageRange{1, 14}));
}

TEST(PageRangeTest, ADecodeStepHasNoScratch) {
  for (std::int32_t history = 0; history < 100; ++history) {
    EXPECT_EQ(scratch_pages(window(8), 4, history, history + 1, 0).size(), 0) << history;
  }
}

TEST(PageRangeTest, TheLastTokensBelowAWindowAreKeptForReuse) {
  for (std::int32_t capacity = 1; capacity <= 64; ++capacity) {
    const PageRange scratch = scratch_pages(window(8), 4, 0, capacity, 0);
    EXPECT_LE(scratch.end * 4, std::max(0, capacity + 1 - 8)) << capacity;
  }
}

TEST(PageRangeTest, LengthsNearTheLimitDoNotOverflow) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(stale_pages(window(kMost), 1, kMost), (PageRange{0, 1}));
  EXPECT_EQ(stale_pages(window(1), 1, kMost), (PageRange{0, kMost}));
  EXPECT_EQ(most_pages(window(kMost, kMost), 1), kMost);
}

}  // namespace
}  // namespace sparse_kvcm
