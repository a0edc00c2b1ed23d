// From page tables to kernel page indices, bit for bit by the formulas of the field.
#include "sparse_kvcm/page_index.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm {
namespace {

using Indices = std::vector<std::int32_t>;
constexpr std::int32_t kPoison = -777;

PageIndexConverter converter(std::int32_t scale, std::int32_t expansion, std::int32_t position,
                             PageIndexMode mode) {
  return {scale, expansion, position, 1, mode};
}

Indices convert(const PageIndexConverter& by, const Indices& base,
                const ScratchPages& scratch = {}) {
  Indices indices(base.size() * static_cast<std::size_t>(by.expansion), kPoison);
  by.convert(base, scratch, indices);
  return indices;
}

TEST(PageIndexTest, SharedIndicesLeaveThePositionToTheAddress) {
  EXPECT_EQ(convert(converter(3, 1, 2, PageIndexMode::kShared), {0, 5, 1}), (Indices{0, 15, 3}));
}

TEST(PageIndexTest, PerLayerIndicesHaveThePositionInThem) {
  EXPECT_EQ(convert(converter(3, 1, 2, PageIndexMode::kPerLayer), {0, 5, 1}), (Indices{2, 17, 5}));
}

TEST(PageIndexTest, APageExpandsIntoConsecutiveKernelPages) {
  EXPECT_EQ(convert(converter(3, 2, 1, PageIndexMode::kPerLayer), {0, 4}), (Indices{2, 3, 26, 27}));
}

TEST(PageIndexTest, AMissingPageStaysMissingInAllItsKernelPages) {
  EXPECT_EQ(convert(converter(3, 2, 1, PageIndexMode::kPerLayer), {-1, 0, -1}),
            (Indices{-1, -1, 2, 3, -1, -1}));
  EXPECT_EQ(convert(converter(3, 1, 1, PageIndexMode::kShared), {-1}), (Indices{-1}));
}

TEST(PageIndexTest, AnEmptyTableGivesNoIndices) {
  EXPECT_EQ(convert(converter(3, 2, 1, PageIndexMode::kShared), {}), Indices{});
}

TEST(PageIndexTest, ScratchPagesAreLookedUpInTheirSlots) {
  // t = p * q, slot t / s, position (t mod s + L) mod s, with q = 1, s = 3, L = 2.
  const ScratchPages scratch{{1, 6}, {40, 50}};
  EXPECT_EQ(
      convert(converter(3, 1, 2, PageIndexMode::kPerLayer), {7, -1, -1, -1, -1, -1, 8}, scratch),
      (Indices{23, 122, 120, 121, 152, 150, 26}));
}

TEST(PageIndexTest, PagesOfTwoBuffersPerLayerTakeTurns) {
  // q = 2, s = 4: two pages per slot. Layer 1 has positions 2 and 3.
  PageIndexConverter key = converter(4, 1, 2, PageIndexMode::kPerLayer);
  key.scratch_pages_per_page = 2;
  EXPECT_EQ(convert(key, {-1, -1, -1}, {{0, 3}, {10, 20}}), (Indices{42, 40, 82}));
}

TEST(PageIndexTest, SixtyFourPagesOfFourteenLayersShareFiveSlots) {
  EXPECT_EQ(converter(14, 1, 0, PageIndexMode::kPerLayer).scratch_slots(64), 5);
}

TEST(PageIndexTest, ThirtyTwoPagesOfSixLayersShareSixSlots) {
  EXPECT_EQ(converter(6, 1, 0, PageIndexMode::kPerLayer).scratch_slots(32), 6);
  PageIndexConverter pairs = converter(12, 1, 0, PageIndexMode::kPerLayer);
  pairs.scratch_pages_per_page = 2;
  EXPECT_EQ(pairs.scratch_slots(32), 6);
}

TEST(PageIndexTest, NoPagesShareNoSlots) {
  EXPECT_EQ(converter(14, 1, 0, PageIndexMode::kPerLayer).scratch_slots(0), 0);
}

TEST(PageIndexTest, ScratchEntriesFollowTheFormulaWhereLayersAreAlike) {
  for (std::int32_t layers = 1; layers <= 7; ++layers) {
    for (std::int32_t q = 1; q <= 3; ++q) {
      const std::int32_t s = layers * q;
      for (std::int32_t position = 0; position < s; ++position) {
        PageIndexConverter by = converter(s, 1, position, PageIndexMode::kPerLayer);
        by.scratch_pages_per_page = q;
        for (std::int32_t page = 0; page < 20; ++page) {
          const std::int32_t t = page * q;
          ASSERT_EQ(by.get_scratch_entry(page), (ScratchEntry{t / s, (t % s + position) % s}))
              << "s " << s << " q " << q << " L " << position << " page " << page;
        }
      }
    }
  }
}

// Layers with unequal numbers of buffers of one size: the plain formula would fail here.
TEST(PageIndexTest, PagesOfOneLayerNeverShareAPlace) {
  for (std::int32_t s = 1; s <= 9; ++s) {
    for (std::int32_t q = 1; q <= s; ++q) {
      for (std::int32_t first = 0; first + q <= s; ++first) {
        std::set<std::pair<std::int32_t, std::int32_t>> places;
        constexpr std::int32_t kPages = 25;
        for (std::int32_t buffer = 0; buffer < q; ++buffer) {
          PageIndexConverter by = converter(s, 1, first + buffer, PageIndexMode::kPerLayer);
          by.scratch_pages_per_page = q;
          for (std::int32_t page = 0; page < kPages; ++page) {
            const ScratchEntry entry = by.get_scratch_entry(page);
            ASSERT_LT(entry.slot_index, by.scratch_slots(kPages));
            ASSERT_TRUE(entry.position >= 0 && entry.position < s);
            places.emplace(entry.slot_index, entry.position);
          }
        }
        ASSERT_EQ(places.size(), static_cast<std::size_t>(q * kPages))
            << "s " << s << " q " << q << " first " << first;
      }
    }
  }
}

TEST(PageIndexTest, ScratchInSharedModeIsRefused) {
  const PageIndexConverter by = converter(3, 1, 0, PageIndexMode::kShared);
  EXPECT_THROW(convert(by, {-1, 1}, {{0, 1}, {4}}), InvalidArgument);
  EXPECT_EQ(convert(by, {2}, {{0, 0}, {}}), (Indices{6}));
}

TEST(PageIndexTest, TooFewScratchSlotsOrIndicesAreRefusedBeforeAnythingIsWritten) {
  const PageIndexConverter by = converter(3, 2, 0, PageIndexMode::kPerLayer);
  Indices indices(8, kPoison);
  const Indices base{-1, -1, -1, -1};
  EXPECT_THROW(by.convert(base, {{0, 4}, {9}}, indices), InvalidArgument);
  EXPECT_THROW(by.convert(base, {{2, 5}, {9, 9}}, indices), InvalidArgument);
  EXPECT_THROW(by.convert(base, {{-1, 1}, {9, 9}}, indices), InvalidArgument);
  EXPECT_THROW(by.convert(base, {}, std::span(indices).first(7)), InvalidArgument);
  EXPECT_EQ(indices, Indices(8, kPoison));
}

// One layer's table becomes another's only without the first one's position in it.
TEST(PageIndexTest, TheSlotComesBackFromEveryIndexOfEveryLayer) {
  for (const PageIndexMode mode : {PageIndexMode::kShared, PageIndexMode::kPerLayer}) {
    for (std::int32_t position = 0; position < 5; ++position) {
      const PageIndexConverter by = converter(5, 3, position, mode);
      for (const std::int32_t index : convert(by, {6, 6})) EXPECT_EQ(by.base_index_of(index), 6);
      EXPECT_EQ(by.base_index_of(kBadPageIndex), kBadPageIndex);
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm
