// Leases: first fit, coalescing, ids and generations.
#include "sparse/lease_allocator.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <set>
#include <vector>

namespace sparse_kvcm {
namespace {

TEST(LeaseAllocatorTest, TakesTheFirstRunThatIsLongEnough) {
  LeaseAllocator allocator(40, 8);
  const Lease a = *allocator.acquire(8, 2);
  const Lease b = *allocator.acquire(16, 4);
  const Lease c = *allocator.acquire(0, 10);
  EXPECT_EQ(a.base, 0);
  EXPECT_EQ(b.base, 10);
  EXPECT_EQ(c.base, 30);
  EXPECT_EQ(c.cached_slots, 0);
  allocator.release(a);
  allocator.release(b);
  EXPECT_EQ(allocator.acquire(10, 2)->base, 0);
}

TEST(LeaseAllocatorTest, RefusesWithoutARunOrAnIdAndKeepsItsState) {
  LeaseAllocator allocator(30, 2);
  const Lease a = *allocator.acquire(8, 2);
  EXPECT_FALSE(allocator.acquire(20, 2).has_value());
  EXPECT_EQ(allocator.num_free_slots(), 20);
  const Lease b = *allocator.acquire(4, 2);
  EXPECT_FALSE(allocator.acquire(1, 1).has_value()) << "no id is left";
  EXPECT_EQ(allocator.num_free_slots(), 14);
  EXPECT_NE(a.id, b.id);
}

TEST(LeaseAllocatorTest, GenerationsAreNeverUsedTwice) {
  LeaseAllocator allocator(10, 1);
  std::set<std::uint64_t> generations;
  for (int i = 0; i < 100; ++i) {
    const Lease lease = *allocator.acquire(8, 2);
    EXPECT_TRUE(generations.insert(lease.generation).second);
    allocator.release(lease);
  }
}

TEST(LeaseAllocatorTest, RandomLeasesNeverOverlapAndAllComeBack) {
  constexpr std::int32_t kSlots = 128;
  constexpr std::int32_t kLeases = 9;
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    LeaseAllocator allocator(kSlots, kLeases);
    std::vector<Lease> live;
    for (int step = 0; step < 200; ++step) {
      if (live.empty() || random() % 2 == 0) {
        const auto n = static_cast<std::int32_t>(random() % 24);
        const std::int64_t largest = allocator.largest_free_run();
        const std::optional<Lease> lease = allocator.acquire(n, 4);
        ASSERT_EQ(lease.has_value(), n + 4 <= largest && live.size() < kLeases);
        if (lease) live.push_back(*lease);
      } else {
        const std::size_t i = random() % live.size();
        allocator.release(live[i]);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      }
      std::vector<bool> used(kSlots, false);
      std::set<std::int32_t> ids;
      std::int64_t num_used = 0;
      for (const Lease& lease : live) {
        ASSERT_TRUE(ids.insert(lease.id).second);
        for (std::int32_t slot = lease.base; slot < lease.base + lease.num_slots(); ++slot) {
          ASSERT_FALSE(used.at(static_cast<std::size_t>(slot)));
          used[static_cast<std::size_t>(slot)] = true;
          ++num_used;
        }
      }
      ASSERT_EQ(allocator.num_free_slots(), kSlots - num_used);
      ASSERT_EQ(allocator.num_free_ids(), kLeases - static_cast<std::int32_t>(live.size()));
    }
    for (const Lease& lease : live) allocator.release(lease);
    ASSERT_EQ(allocator.largest_free_run(), kSlots);
  }
}

}  // namespace
}  // namespace sparse_kvcm
