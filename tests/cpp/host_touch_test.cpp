// The first touch, and the advice before it.
#include "core/host_touch.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/address_space.hpp"
#include "core/host_advice.hpp"
#include "host_files.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::size_t kPiece = std::size_t{64} << 20;

// Addresses that nobody touches: only what is done with them matters.
std::byte* address(std::size_t offset) {
  return reinterpret_cast<std::byte*>(offset);  // NOLINT(performance-no-int-to-ptr)
}

TEST(HostTouchTest, EveryByteOfEveryPartIsTouchedOnceInPieces) {
  for (const std::size_t bytes :
       {std::size_t{1}, kPiece - 1, kPiece, kPiece + 1, 3 * kPiece, 5 * kPiece + 7}) {
    const std::vector<MemoryPart> parts{
        {address(4096), bytes}, {address(8192), 0}, {address(1UL << 40), 100}};
    std::mutex mutex;
    std::vector<std::pair<std::byte*, std::size_t>> touched;
    touch_parts(parts, [&](std::byte* data, std::size_t size) {
      const std::lock_guard lock(mutex);
      touched.emplace_back(data, size);
    });
    std::sort(touched.begin(), touched.end());
    ASSERT_EQ(touched.size(), (bytes + kPiece - 1) / kPiece + 1);
    EXPECT_EQ(touched.back(), std::pair(address(1UL << 40), std::size_t{100}));
    std::size_t end = 4096;
    for (std::size_t i = 0; i + 1 < touched.size(); ++i) {
      EXPECT_EQ(touched[i].first, address(end));
      EXPECT_LE(touched[i].second, kPiece);
      end += touched[i].second;
    }
    EXPECT_EQ(end, 4096 + bytes);
  }
}

TEST(HostTouchTest, ReportsEveryPieceInOrderOnTheCallersThreadWhateverIsTouchedFirst) {
  const std::vector<MemoryPart> parts{{address(4096), 2 * kPiece}, {address(1UL << 40), 5}};
  std::atomic<bool> last = false;
  std::atomic<bool> first = false;
  const bool alone = std::thread::hardware_concurrency() < 2;
  std::vector<std::size_t> reports;
  const auto caller = std::this_thread::get_id();
  touch_parts(
      parts,
      [&](std::byte* data, std::size_t) {
        if (data == address(4096 + kPiece)) last = true;
        while (data == address(4096) && !last && !alone) std::this_thread::yield();
        if (data == address(4096)) first = true;
      },
      [&](std::size_t done) {
        EXPECT_TRUE(first);
        EXPECT_EQ(std::this_thread::get_id(), caller);
        reports.push_back(done);
      });
  EXPECT_EQ(reports, (std::vector<std::size_t>{kPiece, 2 * kPiece, 2 * kPiece + 5}));
}

TEST(HostTouchTest, LittleMemoryNeedsNoOtherThread) {
  const std::vector<MemoryPart> parts{{address(4096), kPiece - 5}, {address(1UL << 40), 5}};
  std::set<std::thread::id> threads;
  touch_parts(parts, [&](std::byte*, std::size_t) { threads.insert(std::this_thread::get_id()); });
  EXPECT_EQ(threads, std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(HostTouchTest, AnyExceptionEndsItWhenNoThreadTouchesAnyMore) {
  const std::vector<MemoryPart> parts{{address(4096), 40 * kPiece}};
  for (const bool in_report : {false, true}) {
    std::atomic<int> inside = 0;
    EXPECT_THROW(touch_parts(
                     parts,
                     [&](std::byte* data, std::size_t) {
                       ++inside;
                       std::this_thread::yield();
                       --inside;
                       if (!in_report && data != address(4096)) throw std::logic_error("touch");
                     },
                     [&](std::size_t) {
                       if (in_report) throw std::logic_error("report");
                     }),
                 std::logic_error);
    EXPECT_EQ(inside, 0);
  }
}

TEST(HostTouchTest, WhereTheKernelDoesNotKnowTheAdviceMemsetTouches) {
  constexpr std::size_t kBytes = 5 * 4096 + 1;
  constexpr int kUnknownAdvice = 9999;
  std::byte* const data = reserve_addresses(6 * 4096, 4096);
  commit_memory(data, 6 * 4096);
  EXPECT_EQ(resident_bytes(data, 6 * 4096), 0U);
  EXPECT_EQ(touch_pages(data, kBytes, kUnknownAdvice), 0);
  EXPECT_EQ(resident_bytes(data, 6 * 4096), whole_pages(kBytes));
  release_addresses(data, 6 * 4096);
}

TEST(HostTouchTest, WhatTheKernelCannotGiveIsAHostMemoryErrorThatNamesTheSize) {
  std::byte* const gone = reserve_addresses(4096, 4096);
  release_addresses(gone, 4096);
  EXPECT_EQ(touch_pages(gone, 4096), ENOMEM);
  try {
    touch_pages_or_throw("here", gone, 4096);
    FAIL() << "was given";
  } catch (const HostMemoryError& error) {
    EXPECT_EQ(std::string(error.what()).find("[here] the kernel could not give 4096 B more"), 0U)
        << error.what();
  }
}

// A part of a pool that ends within a huge page does not take all of it.
TEST(HostAdviceTest, OnlyWholeHugePagesBecomeHuge) {
  constexpr std::size_t kBytes = 4 * kHugePage;
  std::byte* const data = reserve_addresses(kBytes, kHugePage);
  commit_memory(data, kBytes);
  HostAdvice advice("here", kAnyNode, {});
  const std::size_t begin = kHugePage - 8192;
  const std::size_t size = 2 * kHugePage + 8192 + 4096;
  advice.apply(data + begin, size);
  ASSERT_EQ(touch_pages(data + begin, size), 0);
  EXPECT_EQ(resident_bytes(data, kBytes), size);
  advice.apply(data, 4096);
  ASSERT_EQ(touch_pages(data, 4096), 0);
  EXPECT_EQ(resident_bytes(data, kHugePage), 4096U + 8192U);
  release_addresses(data, kBytes);
}

}  // namespace
}  // namespace sparse_kvcm::testing
