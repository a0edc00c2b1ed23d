#include "core/chunked_registration.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/host_mapping.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

// A driver that notes what it is told, and refuses the chunk at an offset.
class ChunkedRegistrationTest : public ::testing::Test {
 protected:
  using Chunk = std::pair<std::ptrdiff_t, std::size_t>;  // offset, bytes

  Registrar registrar() {
    return {[this](std::byte* data, std::size_t bytes) {
              if (data - base() == refused_) throw std::runtime_error("refused");
              added_.emplace_back(data - base(), bytes);
            },
            [this](std::byte* data) { removed_.push_back(data - base()); }};
  }
  std::byte* base() { return memory_.data(); }

  std::vector<std::byte> memory_ = std::vector<std::byte>(100);
  std::ptrdiff_t refused_ = -1;
  std::vector<Chunk> added_;
  std::vector<std::ptrdiff_t> removed_;
};

TEST_F(ChunkedRegistrationTest, ChunksCoverTheRangeOnceAndGoInReverseOrder) {
  for (const std::size_t bytes : {0, 1, 9, 10, 11, 20, 25}) {
    SCOPED_TRACE(bytes);
    added_.clear();
    removed_.clear();
    {
      ChunkedRegistration registration(base(), bytes, 10, registrar());
      EXPECT_TRUE(added_.empty());
      registration.add_all();
      registration.add_all();
      std::size_t end = 0;
      for (const auto& [offset, size] : added_) {
        EXPECT_EQ(static_cast<std::size_t>(offset), end);
        EXPECT_LE(size, 10U);
        end += size;
      }
      EXPECT_EQ(end, bytes);
      EXPECT_EQ(added_.size(), (bytes + 9) / 10);
      EXPECT_TRUE(removed_.empty());
    }
    std::vector<std::ptrdiff_t> reversed;
    for (auto chunk = added_.rbegin(); chunk != added_.rend(); ++chunk) {
      reversed.push_back(chunk->first);
    }
    EXPECT_EQ(removed_, reversed);
  }
}

TEST_F(ChunkedRegistrationTest, EachChunkIsReportedOnceItIsRegistered) {
  std::vector<std::pair<std::size_t, std::size_t>> reports;  // bytes, chunks so far
  ChunkedRegistration registration(base(), 25, 10, registrar());
  registration.add_all([&](std::size_t bytes) { reports.emplace_back(bytes, added_.size()); });
  EXPECT_EQ(reports, (std::vector<std::pair<std::size_t, std::size_t>>{{10, 1}, {20, 2}, {25, 3}}));
}

TEST_F(ChunkedRegistrationTest, AReportThatThrowsUnregistersAll) {
  EXPECT_THROW(
      {
        ChunkedRegistration registration(base(), 25, 10, registrar());
        registration.add_all([](std::size_t bytes) {
          if (bytes == 20) throw std::runtime_error("enough");
        });
      },
      std::runtime_error);
  EXPECT_EQ(removed_, (std::vector<std::ptrdiff_t>{10, 0}));
}

TEST_F(ChunkedRegistrationTest, AFailedChunkUnregistersTheEarlierOnesAndNoOther) {
  for (const std::ptrdiff_t refused : {0, 10, 20, 90}) {
    refused_ = refused;
    added_.clear();
    removed_.clear();
    EXPECT_THROW(
        {
          ChunkedRegistration registration(base(), 100, 10, registrar());
          registration.add_all();
        },
        std::runtime_error);
    ASSERT_EQ(added_.size(), static_cast<std::size_t>(refused) / 10);
    ASSERT_EQ(removed_.size(), added_.size());
    for (std::size_t i = 0; i < added_.size(); ++i) {
      EXPECT_EQ(removed_[i], added_[added_.size() - 1 - i].first);
    }
  }
}

TEST(RegistrationLimitTest, IsTwoGiBOnLinux611To613) {
  for (const char* release : {"6.11", "6.11.0-21-generic", "6.12.9", "6.13.5-foo", "6.13"}) {
    EXPECT_EQ(registration_limit(release), 2 * kGiB) << release;
  }
  for (const char* release :
       {"6.10", "6.10.14-x", "6.14", "6.14.0", "6.1.99", "6.110", "5.11.2", "5.15.0-1", "7.12"}) {
    EXPECT_EQ(registration_limit(release), 4 * kGiB) << release;
  }
}

TEST(RegistrationLimitTest, IsTheSmallerOneForAReleaseThatSaysNothing) {
  for (const char* release : {"", "6", "6.", "garbage", ".12", "6-12", "6.x", "-"}) {
    EXPECT_EQ(registration_limit(release), 2 * kGiB) << release;
  }
}

TEST(ChunkSizeTest, IsTheLargestWithBordersBetweenHugePagesAndBetweenPages) {
  for (const std::size_t limit : {2 * kGiB, 4 * kGiB}) {
    for (const std::size_t page :
         {std::size_t{1}, std::size_t{64} * 2304, std::size_t{16} * 592, std::size_t{61} * 1152,
          kHugePage, 3 * kHugePage, 3 * kHugePage + 65'536, std::size_t{4096}, std::size_t{16}}) {
      const std::size_t size = chunk_size(limit, page, 4096);
      EXPECT_LE(size, limit) << page;
      EXPECT_EQ(size % kHugePage, 0U) << page;
      EXPECT_EQ(size % page, 0U) << page;
      for (std::size_t more = size + kHugePage; more <= limit; more += kHugePage) {
        ASSERT_NE(more % page, 0U) << page << ": " << more << " would do";
      }
    }
  }
}

TEST(ChunkSizeTest, FallsBackToSystemPagesWhereAPageSharesNoBorderWithAHugeOne) {
  const std::size_t page = 4099 * std::size_t{16};  // 2 MiB x 4099 is past 4 GiB
  for (const std::size_t system_page :
       {std::size_t{4096}, std::size_t{16'384}, std::size_t{65'536}}) {
    const std::size_t size = chunk_size(4 * kGiB, page, system_page);
    EXPECT_GT(size, 4 * kGiB - std::lcm(system_page, page));
    EXPECT_LE(size, 4 * kGiB);
    EXPECT_EQ(size % page, 0U);
    EXPECT_EQ(size % system_page, 0U);
  }
}

TEST(ChunkSizeTest, CutsAPageThatIsLargerThanTheLimit) {
  EXPECT_EQ(chunk_size(2 * kGiB, 3 * kGiB, 4096), 2 * kGiB);
  EXPECT_EQ(chunk_size(4 * kGiB, ~std::size_t{0}, 4096), 4 * kGiB);
}

}  // namespace
}  // namespace sparse_kvcm::testing
