#include "sparse_kvcm/unit_layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {
namespace {

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

const std::vector<UnitLayout>& layouts() {
  static const std::vector<UnitLayout> all{
      UnitLayout({1152}),    UnitLayout({1024}),      UnitLayout({656}),
      UnitLayout({576}),     UnitLayout({512}),       UnitLayout({352}),
      UnitLayout({288, 36}), UnitLayout({256, 32}),   UnitLayout({576, 8}, 576),
      UnitLayout({4}),       UnitLayout({65'536, 4}), UnitLayout({4, 8, 12, 16}, 7)};
  return all;
}

TEST(UnitLayoutTest, ArenaPageHoldsOneRegionAfterTheOtherRoundedUp) {
  const UnitLayout v4({576, 8}, 576);
  EXPECT_EQ(v4.unit_bytes(), 584);
  EXPECT_EQ(v4.region_offset(0, 64), 0);
  EXPECT_EQ(v4.region_offset(1, 64), 36'864);
  EXPECT_EQ(v4.page_bytes(64), 37'440);  // 37,376 rounded up to 65 rows of 576
  EXPECT_EQ(v4.page_bytes(1), 1'152);
  const UnitLayout nvfp4({288, 36});
  EXPECT_EQ(nvfp4.region_offset(1, 61), 17'568);
  EXPECT_EQ(nvfp4.page_bytes(61), 19'764);
}

TEST(UnitLayoutTest, PageIsTheLeastMultipleOfItsAlignmentThatHoldsItsUnits) {
  for (const UnitLayout& layout : layouts()) {
    for (const std::int32_t page : {1, 2, 61, 64, 1 << 20}) {
      const std::int64_t dense = layout.unit_bytes() * page;
      EXPECT_EQ(layout.page_bytes(page) % layout.page_alignment(), 0);
      EXPECT_GE(layout.page_bytes(page), dense);
      EXPECT_LT(layout.page_bytes(page) - dense, layout.page_alignment());
    }
  }
}

TEST(UnitLayoutTest, HostRowOfSplitLayoutPutsTheWiderRegionOfAllMembersFirst) {
  const HostRowLayout row = pack_host_row(UnitLayout({8, 576}), 2);
  EXPECT_EQ(row.pieces, (std::vector<HostPiece>{
                            {0, 1, 576, 0}, {1, 1, 576, 576}, {0, 0, 8, 1152}, {1, 0, 8, 1160}}));
  EXPECT_EQ(row.unit_bytes, 1168);
}

TEST(UnitLayoutTest, HostRowIsRoundedUpTo16Bytes) {
  EXPECT_EQ(pack_host_row(UnitLayout({288, 36}), 1).unit_bytes, 336);
  EXPECT_EQ(pack_host_row(UnitLayout({576, 8}), 1).unit_bytes, 592);
  EXPECT_EQ(pack_host_row(UnitLayout({656}), 4).unit_bytes, 2624);
}

TEST(UnitLayoutTest, HostRowHoldsEveryPieceOnceAlignedWithoutGaps) {
  for (const UnitLayout& layout : layouts()) {
    for (const std::int32_t members : {1, 2, 3, 4, 16}) {
      const HostRowLayout row = pack_host_row(layout, members);
      std::vector<std::pair<std::int32_t, std::int32_t>> seen;
      std::int32_t end = 0;
      for (const HostPiece& piece : row.pieces) {
        EXPECT_EQ(piece.offset, end);
        EXPECT_EQ(piece.offset % natural_alignment(piece.bytes), 0);
        EXPECT_EQ(piece.bytes, layout.region_bytes()[static_cast<std::size_t>(piece.region)]);
        end += piece.bytes;
        seen.emplace_back(piece.member, piece.region);
      }
      std::sort(seen.begin(), seen.end());
      std::vector<std::pair<std::int32_t, std::int32_t>> expected;
      for (std::int32_t member = 0; member < members; ++member) {
        for (std::int32_t region = 0; region < layout.num_regions(); ++region) {
          expected.emplace_back(member, region);
        }
      }
      EXPECT_EQ(seen, expected);
      EXPECT_EQ(row.unit_bytes % 16, 0);
      EXPECT_GE(row.unit_bytes, end);
      EXPECT_LT(row.unit_bytes, end + 16);
    }
  }
}

TEST(UnitLayoutTest, NaturalAlignmentIsTheLargestPowerOfTwoUpTo16) {
  for (const auto& [bytes, alignment] : std::vector<std::pair<std::int32_t, std::int32_t>>{
           {1, 1}, {2, 2}, {4, 4}, {36, 4}, {8, 8}, {584, 8}, {656, 16}, {576, 16}, {1024, 16}}) {
    EXPECT_EQ(natural_alignment(bytes), alignment) << bytes;
  }
}

TEST(UnitLayoutTest, BadRegionsAndAlignmentsAreRefusedByName) {
  EXPECT_EQ(error_of([] { UnitLayout({}); }),
            "[UnitLayout] region_bytes must have 1 to 4 regions, got 0");
  EXPECT_EQ(error_of([] { UnitLayout({4, 4, 4, 4, 4}); }),
            "[UnitLayout] region_bytes must have 1 to 4 regions, got 5");
  for (const std::int32_t bytes : {0, -4, 2, 6, 65'540}) {
    EXPECT_EQ(error_of([=] { UnitLayout({8, bytes}); }),
              "[UnitLayout] region_bytes[1] must be a multiple of 4 in [4, 65536], got " +
                  std::to_string(bytes));
  }
  for (const std::int32_t alignment : {0, -1, 65'537}) {
    EXPECT_EQ(
        error_of([=] { UnitLayout({8}, alignment); }),
        "[UnitLayout] page_alignment must be in [1, 65536], got " + std::to_string(alignment));
  }
}

TEST(UnitLayoutTest, BadPagesAndRegionsAreRefusedByName) {
  const UnitLayout layout({288, 36});
  EXPECT_EQ(error_of([&] { (void)layout.page_bytes(0); }),
            "[UnitLayout.page_bytes] units_per_page must be >= 1, got 0");
  EXPECT_EQ(error_of([&] { (void)layout.region_offset(0, -1); }),
            "[UnitLayout.region_offset] units_per_page must be >= 1, got -1");
  EXPECT_EQ(error_of([&] { (void)layout.region_offset(2, 1); }),
            "[UnitLayout.region_offset] region must be in [0, 2), got 2");
}

TEST(UnitLayoutTest, HostRowTakesAtMost64Pieces) {
  EXPECT_EQ(pack_host_row(UnitLayout({288, 36}), 32).pieces.size(), 64u);
  for (const std::int32_t members : {0, -1, 33}) {
    EXPECT_EQ(error_of([=] { (void)pack_host_row(UnitLayout({288, 36}), members); }),
              "[pack_host_row] num_members must be in [1, 32] with 2 regions, got " +
                  std::to_string(members));
  }
}

}  // namespace
}  // namespace sparse_kvcm
