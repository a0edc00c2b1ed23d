// Ranges whose memory a test controls: mappings that fail, and filling behind the caller's back.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "backend/backend.hpp"
#include "backend/filler.hpp"
#include "backend/mapped_range.hpp"
#include "faulty_memory.hpp"
#include "range_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::kGranule;
using testing::kReserved;
using testing::resize;

class FaultyRangeTest : public ::testing::Test {
 protected:
  FaultyRangeTest()
      : driver_(std::make_shared<testing::FaultyMemory>(
            backend_for({})->memory_driver(MemoryKind::kDevice), log_)) {}

  // Fills `allowed_` granules in all, and waits for leave to fill more.
  void fill_what_is_allowed() {
    driver_->on_fill = [this] {
      while (filled_ >= allowed_) std::this_thread::yield();
      ++filled_;
    };
  }

  std::atomic<int> allowed_ = 0;
  std::atomic<int> filled_ = 0;
  std::shared_ptr<testing::MemoryLog> log_ = std::make_shared<testing::MemoryLog>();
  std::shared_ptr<testing::FaultyMemory> driver_;
  std::shared_ptr<Filler> filler_ = std::make_shared<Filler>(1);
};

TEST_F(FaultyRangeTest, AMappingThatFailsLeavesTheRangeAsItWas) {
  MappedRange range(driver_, filler_, kReserved, kGranule);
  resize(range, 2 * kGranule);
  range.address()[2 * kGranule - 1] = std::byte{3};
  for (std::int64_t calls = 0; calls < 6; ++calls) {
    log_->maps_left = calls;
    EXPECT_THROW(range.resize(kReserved), std::bad_alloc);
    EXPECT_EQ(range.mapped_bytes(), 2 * kGranule);
    EXPECT_EQ(range.usable_bytes(), 2 * kGranule);
    EXPECT_EQ(log_->mapped, 2);
    EXPECT_EQ(range.address()[2 * kGranule - 1], std::byte{3});
  }
  resize(range, kReserved);
  EXPECT_EQ(log_->mapped, 8);
}

TEST_F(FaultyRangeTest, TheDeviceIsWaitedForBeforeAnythingIsUnmapped) {
  {
    MappedRange range(driver_, filler_, kReserved, kGranule);
    resize(range, 3 * kGranule);
    resize(range, kGranule);
    EXPECT_EQ(log_->calls, "mmmsuu");
    resize(range, kGranule);
    EXPECT_EQ(log_->calls, "mmmsuu");
  }
  EXPECT_EQ(log_->calls, "mmmsuusu");
  EXPECT_EQ(log_->mapped, 0);
}

TEST_F(FaultyRangeTest, ARangeFillsInTheBackgroundFromTheFront) {
  fill_what_is_allowed();
  MappedRange range(driver_, filler_, kReserved, kGranule);
  resize(range, 4 * kGranule);
  EXPECT_EQ(range.mapped_bytes(), 4 * kGranule);
  EXPECT_EQ(range.usable_bytes(), 0u);
  allowed_ = 2;
  range.wait_usable(2 * kGranule);
  EXPECT_EQ(range.usable_bytes(), 2 * kGranule);
  allowed_ = 4;
  range.wait_usable(kReserved);  // as far as it is mapped
  EXPECT_EQ(range.usable_bytes(), 4 * kGranule);
}

TEST_F(FaultyRangeTest, RangesFillInTurns) {
  fill_what_is_allowed();
  MappedRange one(driver_, filler_, kReserved, kGranule);
  MappedRange two(driver_, filler_, kReserved, kGranule);
  resize(one, kReserved);
  resize(two, kReserved);
  allowed_ = 8;
  while (one.usable_bytes() + two.usable_bytes() < 8 * kGranule) std::this_thread::yield();
  // The first may have had a round to itself, and be ahead within the last.
  const auto [least, most] = std::minmax({one.usable_bytes(), two.usable_bytes()});
  EXPECT_LE(most - least, 2 * kGranule);
  allowed_ = 16;
  one.wait_usable(kReserved);
  two.wait_usable(kReserved);
}

TEST_F(FaultyRangeTest, AResizeWaitsForTheGranuleThatIsBeingFilled) {
  std::atomic<bool> inside = false;
  std::atomic<bool> go = false;
  driver_->on_fill = [&] {
    inside = true;
    while (!go) std::this_thread::yield();
    inside = false;
  };
  MappedRange range(driver_, filler_, kReserved, kGranule);
  resize(range, kReserved);
  while (!inside) std::this_thread::yield();
  auto shrunk = std::async(std::launch::async, [&] {
    range.resize(kGranule);
    return !inside;
  });
  for (int i = 0; i < 10'000; ++i) std::this_thread::yield();  // time for it to do it wrong
  go = true;
  EXPECT_TRUE(shrunk.get());
}

TEST_F(FaultyRangeTest, ManyThreadsMayWaitForTheFill) {
  std::atomic<bool> go = false;
  driver_->on_fill = [&] {
    while (!go) std::this_thread::yield();
  };
  MappedRange range(driver_, filler_, kReserved, kGranule);
  resize(range, kReserved);
  std::vector<std::future<bool>> waiters;
  for (std::size_t i = 1; i <= 8; ++i) {
    waiters.push_back(std::async(std::launch::async, [&range, i] {
      range.wait_usable(i * kGranule);
      return range.usable_bytes() >= i * kGranule;
    }));
  }
  go = true;
  for (std::future<bool>& waiter : waiters) EXPECT_TRUE(waiter.get());
}

TEST_F(FaultyRangeTest, AShrinkWakesWhoWaitsForWhatIsGone) {
  fill_what_is_allowed();
  MappedRange range(driver_, filler_, kReserved, kGranule);
  for (int round = 0; round < 20; ++round) {
    filled_ = 0;
    allowed_ = 1;
    resize(range, kReserved);
    std::vector<std::future<void>> waiters;
    for (int i = 0; i < 4; ++i) {
      waiters.push_back(std::async(std::launch::async, [&] { range.wait_usable(kReserved); }));
    }
    range.wait_usable(kGranule);
    for (int i = 0; i < 1'000; ++i) std::this_thread::yield();  // time for them to wait
    allowed_ = 2;  // what is being filled while it shrinks
    resize(range, kGranule);
    const bool woken = std::ranges::all_of(waiters, [](const std::future<void>& waiter) {
      return waiter.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    });
    allowed_ = 100;
    resize(range, 2 * kGranule);  // wakes who was not, so that the test ends
    range.wait_usable(2 * kGranule);
    ASSERT_TRUE(woken);
    resize(range, 0);
  }
}

TEST_F(FaultyRangeTest, AFillThatFailsIsToldToWhoWaitsAndTriedAgain) {
  std::atomic<bool> broken = true;
  driver_->on_fill = [&] {
    if (broken) throw std::bad_alloc();
  };
  MappedRange range(driver_, filler_, kReserved, kGranule);
  resize(range, 2 * kGranule);
  EXPECT_THROW(range.wait_usable(kGranule), std::bad_alloc);
  EXPECT_EQ(range.usable_bytes(), 0u);
  broken = false;
  resize(range, 3 * kGranule);
  range.wait_usable(3 * kGranule);
  EXPECT_EQ(range.usable_bytes(), 3 * kGranule);
}

TEST_F(FaultyRangeTest, ARangeThatStillFillsCanShrinkGrowAndGo) {
  driver_->on_fill = [] { std::this_thread::yield(); };
  for (int round = 0; round < 50; ++round) {
    MappedRange range(driver_, filler_, kReserved, kGranule);
    resize(range, kReserved);
    resize(range, kGranule);
    EXPECT_LE(range.usable_bytes(), kGranule);
    resize(range, 4 * kGranule);
  }
  EXPECT_EQ(log_->mapped, 0);
}

}  // namespace
}  // namespace sparse_kvcm
