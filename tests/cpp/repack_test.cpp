// Units from layer-major pages into host rows, against rows that are put together byte by byte.
#include "core/repack.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

namespace sparse_kvcm {
namespace {

constexpr std::byte kPoison{0xA5};

struct Shape {
  std::vector<std::int32_t> regions;
  std::int32_t members = 1;
  std::int32_t units_per_page = 1;
};

std::int32_t alignment(std::int32_t bytes) {
  for (const std::int32_t power : {16, 8}) {
    if (bytes % power == 0) return power;
  }
  return 4;
}

// A prefill's pages: [pages][member][region][unit], some bytes after each member.
class RepackTest : public ::testing::TestWithParam<Shape> {
 protected:
  static constexpr std::int32_t kGap = 20;

  RepackTest() {
    for (const std::int32_t bytes : shape_.regions) unit_bytes_ += bytes;
    page_bytes_ = (unit_bytes_ * shape_.units_per_page + kGap) * shape_.members;
    memory_.resize(static_cast<std::size_t>(page_bytes_ * kPages));
    std::mt19937 random(7);
    std::generate(memory_.begin(), memory_.end(), [&] { return std::byte(random() & 0xFFU); });
  }

  const std::byte* region(std::int32_t member, std::size_t which) const {
    const auto before = std::reduce(shape_.regions.begin(),
                                    shape_.regions.begin() + static_cast<std::ptrdiff_t>(which));
    return memory_.data() + member * (unit_bytes_ * shape_.units_per_page + kGap) +
           std::int64_t{before} * shape_.units_per_page;
  }

  // By falling alignment, then member, then region; zeros up to 16 bytes.
  std::vector<std::byte> row_of(std::int64_t unit) const {
    std::vector<std::tuple<std::int32_t, std::int32_t, std::size_t>> pieces;
    for (std::int32_t member = 0; member < shape_.members; ++member) {
      for (std::size_t r = 0; r < shape_.regions.size(); ++r) {
        pieces.emplace_back(-alignment(shape_.regions[r]), member, r);
      }
    }
    std::sort(pieces.begin(), pieces.end());
    std::vector<std::byte> row;
    for (const auto& [order, member, r] : pieces) {
      const std::byte* from = region(member, r) + unit / shape_.units_per_page * page_bytes_ +
                              unit % shape_.units_per_page * shape_.regions[r];
      row.insert(row.end(), from, from + shape_.regions[r]);
    }
    row.resize((row.size() + 15) / 16 * 16, std::byte{0});
    return row;
  }

  static constexpr std::int64_t kPages = 3;
  const Shape shape_ = GetParam();
  std::int64_t unit_bytes_ = 0;
  std::int64_t page_bytes_ = 0;
  std::vector<std::byte> memory_;
};

TEST_P(RepackTest, EveryUnitOfARangeGetsItsRowAndNothingElseIsTouched) {
  const HostRowLayout layout = pack_host_row(UnitLayout(shape_.regions), shape_.members);
  std::vector<PieceSource> sources;
  for (const HostPiece& piece : layout.pieces) {
    sources.push_back(
        {region(piece.member, static_cast<std::size_t>(piece.region)), piece.bytes, page_bytes_});
  }
  const std::int32_t page = shape_.units_per_page;
  const std::int64_t all = kPages * page;
  for (const std::int64_t first : {0, 1, page - 1, page, page + 1}) {
    for (const std::int64_t count : {0, 1, page - 1, page, page + 1, 2 * page}) {
      if (first < 0 || count < 0 || first + count > all) continue;
      std::vector<std::byte> expected;
      for (std::int64_t u = first; u < first + count; ++u) {
        const std::vector<std::byte> row = row_of(u);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      expected.resize(expected.size() + 16, kPoison);
      std::vector<std::byte> rows(expected.size(), kPoison);  // aligned as operator new does
      repack(layout, sources, page, first, count, rows.data());
      ASSERT_EQ(rows, expected) << "units [" << first << ", " << first + count << ")";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, RepackTest,
                         ::testing::Values(Shape{{576}, 4, 64}, Shape{{576, 8}, 1, 64},
                                           Shape{{656}, 1, 61}, Shape{{288, 36}, 3, 2},
                                           Shape{{8, 576}, 2, 1}, Shape{{4, 8, 12, 16}, 5, 7}));

}  // namespace
}  // namespace sparse_kvcm
