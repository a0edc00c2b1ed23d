#include "sparse_kvcm/entry.hpp"

#include <gtest/gtest.h>

#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {
namespace {

TEST(EntryTest, BitsLieWhereTheTableSays) {
  EXPECT_EQ(pack_entry(1, false, 0), 0x02000000u);
  EXPECT_EQ(pack_entry(0, true, 0), 0x01000000u);
  EXPECT_EQ(pack_entry(0, false, 0x123456), 0x00123456u);
  EXPECT_EQ(pack_entry(127, true, kMaxUnits - 1), 0xFFFFFFFEu);
}

TEST(EntryTest, DecodingGivesBackWhatWasPacked) {
  for (const std::uint32_t clock : {0u, 1u, 127u, 128u, 129u, 0xFFFFFFFFu}) {
    for (const bool resident : {false, true}) {
      for (const std::int32_t ordinal : {0, 1, 0xFFFF, 0x10000, kMaxUnits - 1}) {
        const DecodedEntry expected{false, clock % 128, resident, ordinal};
        EXPECT_EQ(decode_entry(pack_entry(clock, resident, ordinal)), expected);
      }
    }
  }
}

TEST(EntryTest, EmptyEntryDecodesAsEmptyAndNoUnitPacksToIt) {
  EXPECT_EQ(decode_entry(0xFFFFFFFFu), DecodedEntry{});
  EXPECT_TRUE(DecodedEntry{}.empty);
  for (std::uint32_t clock = 0; clock < 128; ++clock) {
    EXPECT_NE(pack_entry(clock, true, kMaxUnits - 1), kEmptyEntry);
  }
}

TEST(EntryTest, AgeCountsStepsUpTo127) {
  for (const std::uint32_t last : {0u, 5u, 127u, 500u, 0xFFFFFFF0u, 0xFFFFFFFFu}) {
    for (std::uint32_t before = 0; before < 128; ++before) {
      const Entry entry = pack_entry(last - before, false, 3);
      for (const std::uint32_t gap : {0u, 1u, 2u, 126u, 127u, 128u, 1000u, 0xFFFFFFFFu}) {
        const std::uint64_t exact = std::uint64_t{before} + gap;
        ASSERT_EQ(entry_age(entry, last, last + gap), exact < 127 ? exact : 127u)
            << "last " << last << ", before " << before << ", gap " << gap;
      }
    }
  }
}

TEST(EntryTest, BucketsOrderByAgeThenByUse) {
  EXPECT_EQ(entry_bucket(pack_entry(10, true, 1), 10, 10), 0);
  EXPECT_EQ(entry_bucket(pack_entry(10, false, 1), 10, 10), 1);
  EXPECT_EQ(entry_bucket(pack_entry(9, true, 1), 10, 11), 4);
  EXPECT_EQ(entry_bucket(pack_entry(9, false, 1), 10, 11), 5);
  EXPECT_EQ(entry_bucket(pack_entry(10, true, 1), 10, 137), 254);
  EXPECT_EQ(entry_bucket(pack_entry(10, false, 1), 10, 137), 255);
  EXPECT_EQ(entry_bucket(kEmptyEntry, 10, 11), 255);
}

TEST(EntryTest, RestampingKeepsTheAgeAt127) {
  const std::uint32_t clock = 40;
  const Entry restamped = pack_entry(clock - kMaxAge, true, 9);
  EXPECT_EQ(entry_age(restamped, clock, clock), 127u);
  EXPECT_EQ(entry_age(restamped, clock, clock + 1), 127u);
}

}  // namespace
}  // namespace sparse_kvcm
