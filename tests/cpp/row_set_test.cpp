#include "manager/row_set.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace sparse_kvcm {
namespace {

TEST(RowSetTest, IsASetInAscendingOrderWhateverItsSize) {
  std::mt19937 random(5);
  for (const std::int32_t size : {1, 63, 64, 65, 300}) {
    RowSet rows(size);
    std::set<std::int32_t> expected;
    for (int i = 0; i < 2000; ++i) {
      const auto row = std::uniform_int_distribution(0, size - 1)(random);
      if (random() % 2 == 0) {
        EXPECT_EQ(rows.insert(row), expected.insert(row).second);
      } else {
        rows.erase(row);
        expected.erase(row);
      }
      ASSERT_EQ(rows.contains(row), expected.count(row) > 0);
      ASSERT_EQ(rows.size(), static_cast<std::int32_t>(expected.size()));
      ASSERT_EQ(rows.empty(), expected.empty());
      ASSERT_EQ(rows.first(), expected.empty() ? -1 : *expected.begin());
    }
    EXPECT_EQ(rows.rows(), std::vector<std::int32_t>(expected.begin(), expected.end()));
    rows.insert_all();
    EXPECT_EQ(rows.size(), size);
    rows.clear();
    EXPECT_EQ(rows.rows(), std::vector<std::int32_t>());
  }
}

TEST(RowSetTest, TheRowAtHandMayBeErasedWhileAllAreVisited) {
  RowSet rows(130);
  rows.insert_all();
  std::int32_t visited = 0;
  rows.for_each([&](std::int32_t row) {
    EXPECT_EQ(row, visited++);
    rows.erase(row);
  });
  EXPECT_EQ(visited, 130);
  EXPECT_TRUE(rows.empty());
}

}  // namespace
}  // namespace sparse_kvcm
