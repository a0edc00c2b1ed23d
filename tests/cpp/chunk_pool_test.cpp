// Which chunks are used again, and which go.
#include "core/chunk_pool.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace sparse_kvcm {
namespace {

struct FakeChunk {
  std::size_t size = 0;
  bool idle = true;
  int* alive = nullptr;
  FakeChunk(std::size_t bytes, int* count) : size(bytes), alive(count) { ++*alive; }
  ~FakeChunk() { --*alive; }
  FakeChunk(const FakeChunk&) = delete;
  FakeChunk& operator=(const FakeChunk&) = delete;
  [[nodiscard]] std::size_t bytes() const { return size; }
  [[nodiscard]] bool is_idle() const { return idle; }
};

class ChunkPoolTest : public ::testing::Test {
 protected:
  FakeChunk* put(std::size_t bytes) {
    auto chunk = std::make_unique<FakeChunk>(bytes, &alive_);
    FakeChunk* const place = chunk.get();
    pool_.put(std::move(chunk));
    return place;
  }

  int alive_ = 0;
  ChunkPool<FakeChunk> pool_;
};

TEST_F(ChunkPoolTest, TheSmallestIdleChunkThatIsLargeEnoughIsTaken) {
  FakeChunk* const large = put(1024);
  FakeChunk* const small = put(64);
  FakeChunk* const middle = put(256);
  const auto first = pool_.take(100);
  EXPECT_EQ(first.get(), middle);
  EXPECT_EQ(pool_.take(1025), nullptr);
  large->idle = false;
  EXPECT_EQ(pool_.take(100), nullptr);
  large->idle = true;
  const auto second = pool_.take(100);
  EXPECT_EQ(second.get(), large);
  const auto third = pool_.take(0);
  EXPECT_EQ(third.get(), small);
  EXPECT_EQ(pool_.take(0), nullptr);
}

TEST_F(ChunkPoolTest, ASteadyLoadKeepsItsChunksAndABurstLeavesNone) {
  for (int i = 0; i < 20; ++i) put(64);
  put(4096);
  for (int step = 0; step < 3 * ChunkPool<FakeChunk>::kPatience; ++step) {
    auto one = pool_.take(64);
    auto other = pool_.take(64);
    ASSERT_NE(one, nullptr) << step;
    ASSERT_NE(other, nullptr) << step;
    pool_.put(std::move(one));
    pool_.put(std::move(other));
    static_cast<void>(pool_.take_surplus());
  }
  EXPECT_EQ(alive_, 2);
}

TEST_F(ChunkPoolTest, WhatIsStillReadIsNoSurplus) {
  FakeChunk* const busy = put(64);
  busy->idle = false;
  for (int i = 0; i <= ChunkPool<FakeChunk>::kPatience; ++i) static_cast<void>(pool_.take(64));
  EXPECT_TRUE(pool_.take_surplus().empty());
  busy->idle = true;
  EXPECT_EQ(pool_.take_surplus().size(), 1U);
  EXPECT_EQ(alive_, 0);
}

}  // namespace
}  // namespace sparse_kvcm
