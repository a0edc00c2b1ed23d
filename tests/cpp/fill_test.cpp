// How ranges are filled: touched by all threads, then opened to the device, no more than is used.
#include "backend/filler.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "backend/host_memory.hpp"
#include "backend/mapped_range.hpp"
#include "range_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::kGranule;
using testing::kReserved;
using testing::resize;

// Notes in which order ranges are touched and opened, and that nobody does one during the other.
class NotingMemory final : public HostMemory {
 public:
  [[nodiscard]] bool needs_fill() const override { return true; }
  [[nodiscard]] std::size_t most_opened() const override { return std::size_t{1} << 30; }
  void touch(std::byte*, std::size_t bytes) override {
    const int now = ++inside_;
    EXPECT_FALSE(opening_);
    for (int seen = together; seen < now && !together.compare_exchange_weak(seen, now);) {
    }
    std::this_thread::yield();
    touched += bytes;
    --inside_;
  }
  void inspect(std::byte*, std::size_t bytes) override {
    EXPECT_LE(opened + bytes, touched);
    ++inspections;
  }
  void open(std::byte*, std::size_t bytes) override {
    opening_ = true;
    EXPECT_EQ(inside_, 0);
    opened += bytes;
    EXPECT_LE(opened, touched);
    opening_ = false;
  }
  void close(std::byte* address, std::size_t bytes) noexcept override {
    closed.emplace_back(address, bytes);
  }

  std::atomic<std::size_t> touched = 0;
  std::atomic<std::size_t> opened = 0;
  std::atomic<int> together = 0;
  std::atomic<int> inspections = 0;
  std::vector<std::pair<std::byte*, std::size_t>> closed;

 private:
  std::atomic<int> inside_ = 0;
  std::atomic<bool> opening_ = false;
};

TEST(FillTest, MemoryIsTouchedBeforeItIsOpenedAndNeverAtTheSameTime) {
  const auto driver = std::make_shared<NotingMemory>();
  constexpr std::size_t kBytes = 64 * kGranule;  // two pieces of the touch for each range
  for (const std::size_t round : {std::size_t{1}, 16 * kGranule, 1000 * kGranule}) {
    const auto filler = std::make_shared<Filler>(round);
    MappedRange one(driver, filler, kBytes, kGranule);
    MappedRange two(driver, filler, kBytes, kGranule);
    resize(one, kBytes);
    resize(two, kBytes);
    one.wait_usable(kBytes);
    two.wait_usable(kBytes);
    EXPECT_EQ(driver->touched.exchange(0), 2 * kBytes);
    EXPECT_EQ(driver->opened.exchange(0), 2 * kBytes);
    const int inspections = driver->inspections.exchange(0);
    if (round > kBytes) {
      EXPECT_LE(inspections, 3) << "not once per granule";
    }
  }
}

TEST(FillTest, AtOnceAllIsTouchedBeforeTheFirstIsOpenedAndProgressIsTheMean) {
  const auto driver = std::make_shared<NotingMemory>();
  MappedRange one(driver, nullptr, kReserved, kGranule);
  MappedRange two(driver, nullptr, kReserved, kGranule);
  one.resize(2 * kGranule);
  two.resize(kGranule, kGranule / 2);
  std::vector<std::pair<std::size_t, std::size_t>> calls;  // done, opened
  fill_ranges(std::vector<MappedRange*>{&one, &two}, [&](std::size_t done, std::size_t total) {
    EXPECT_EQ(total, 5 * kGranule / 2);
    calls.emplace_back(done, driver->opened);
  });
  constexpr std::size_t kHalf = kGranule / 2;
  const std::vector<std::pair<std::size_t, std::size_t>> expected{{4 * kHalf / 2, 0},
                                                                  {5 * kHalf / 2, 0},
                                                                  {7 * kHalf / 2, 2 * kHalf},
                                                                  {9 * kHalf / 2, 4 * kHalf},
                                                                  {5 * kHalf, 5 * kHalf}};
  EXPECT_EQ(calls, expected);
  EXPECT_EQ(one.usable_bytes(), 2 * kGranule);
  EXPECT_EQ(two.usable_bytes(), kGranule / 2);
}

TEST(FillTest, OnlyWhatIsUsedIsFilledAndTheRestOfTheGranuleWhenItIsWanted) {
  const auto driver = std::make_shared<NotingMemory>();
  const auto filler = std::make_shared<Filler>();
  {
    MappedRange range(driver, filler, kReserved, kGranule);
    range.resize(kGranule, 4096);
    range.start_filling();
    range.wait_usable(kGranule);
    EXPECT_EQ(range.usable_bytes(), 4096u);
    EXPECT_EQ(driver->touched, 4096u);
    range.resize(2 * kGranule, kGranule + 8192);
    range.start_filling();
    range.wait_usable(2 * kGranule);
    EXPECT_EQ(range.usable_bytes(), kGranule + 8192);
    EXPECT_EQ(driver->opened, kGranule + 8192);
    range.resize(kGranule);
    const std::byte* const last = range.address() + kGranule;
    ASSERT_EQ(driver->closed.size(), 1u);
    EXPECT_EQ(driver->closed[0], std::pair(const_cast<std::byte*>(last), std::size_t{8192}));
    EXPECT_EQ(range.usable_bytes(), kGranule);
  }
  // As it was opened, from the end.
  ASSERT_EQ(driver->closed.size(), 3u);
  EXPECT_EQ(driver->closed[1].second, kGranule - 4096);
  EXPECT_EQ(driver->closed[2].second, 4096u);
}

TEST(FillTest, ChunksEndWhereTheRangeIsTold) {
  const auto driver = std::make_shared<NotingMemory>();
  {
    constexpr std::size_t kChunk = 3 * kGranule;
    MappedRange range(driver, nullptr, kReserved, kGranule, kChunk);
    range.resize(kReserved, kReserved - 100);
    fill_ranges(std::vector<MappedRange*>{&range}, [](std::size_t, std::size_t) {});
    EXPECT_EQ(range.usable_bytes(), kReserved - 100);
  }
  std::vector<std::size_t> sizes;
  for (const auto& [address, bytes] : driver->closed) sizes.push_back(bytes);
  EXPECT_EQ(sizes, (std::vector<std::size_t>{2 * kGranule - 100, 3 * kGranule, 3 * kGranule}));
}

TEST(FillTest, WhatProgressThrowsEndsTheFillAndLeavesTheRangeToGo) {
  const auto driver = std::make_shared<NotingMemory>();
  MappedRange range(driver, nullptr, kReserved, kGranule);
  range.resize(kReserved);
  EXPECT_THROW(fill_ranges(std::vector<MappedRange*>{&range},
                           [&](std::size_t, std::size_t) {
                             if (driver->opened > 0) throw std::logic_error("stop");
                           }),
               std::logic_error);
  EXPECT_EQ(range.usable_bytes(), kGranule);
}

}  // namespace
}  // namespace sparse_kvcm
