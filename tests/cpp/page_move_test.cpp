// Backend::patch and Backend::copy_pages, on every backend, against loops over host memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "backend/backend.hpp"
#include "test_device.hpp"

namespace sparse_kvcm::testing {
namespace {

class PageMoveTest : public DeviceTest {
 protected:
  static Backend& backend() { return *backend_for(device()); }

  static BufferPtr on_device(const std::vector<std::byte>& bytes) {
    const BufferPtr buffer = backend().allocate_device(bytes.size());
    const Upload upload{buffer->device_data(), bytes.data(), bytes.size()};
    backend().upload({&upload, 1}, 0);
    return buffer;
  }
  static std::vector<std::byte> read(const Buffer& buffer) {
    const BufferPtr copy = backend().allocate_pinned(buffer.bytes());
    backend().download(*copy, buffer.device_data(), buffer.bytes(), 0);
    backend().synchronize(*backend().record(0));
    return {copy->data(), copy->data() + copy->bytes()};
  }
  std::vector<std::byte> random_bytes(std::size_t count) {
    std::vector<std::byte> bytes(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_() & 0xFF);
    return bytes;
  }

  std::mt19937 random_{7};
};
SPARSE_KVCM_ON_EVERY_DEVICE(PageMoveTest);

TEST_P(PageMoveTest, PatchWritesExactlyTheRunsThatItIsGiven) {
  constexpr std::int32_t kWords = 40'000;
  for (const std::size_t num_runs : {1UL, 2UL, 31UL, 300UL, 9000UL}) {
    std::vector<std::int32_t> expected(kWords);
    std::iota(expected.begin(), expected.end(), 1);
    const BufferPtr buffer = on_device({reinterpret_cast<std::byte*>(expected.data()),
                                        reinterpret_cast<std::byte*>(expected.data() + kWords)});
    const auto room = static_cast<std::int32_t>(kWords / static_cast<std::int32_t>(num_runs));
    std::vector<PatchRun> runs;
    std::vector<std::int32_t> words;
    for (std::size_t r = 0; r < num_runs; ++r) {
      const auto size = std::uniform_int_distribution(0, room)(random_);
      PatchRun run{static_cast<std::int64_t>(r) * room, size, PatchRun::kMinusOne};
      if (random_() % 3 != 0) {
        run.source = static_cast<std::int32_t>(words.size());
        for (std::int32_t w = 0; w < size; ++w) {
          words.push_back(static_cast<std::int32_t>(random_()));
        }
      }
      for (std::int32_t w = 0; w < size; ++w) {
        expected[static_cast<std::size_t>(run.offset + w)] =
            run.source < 0 ? -1 : words[static_cast<std::size_t>(run.source + w)];
      }
      runs.push_back(run);
    }
    auto* place = reinterpret_cast<std::int32_t*>(buffer->device_data());
    backend().patch(place, runs, words, 0);
    std::ranges::fill(runs, PatchRun{});  // may change on return
    std::ranges::fill(words, 77);
    const std::vector<std::byte> bytes = read(*buffer);
    const auto* got = reinterpret_cast<const std::int32_t*>(bytes.data());
    EXPECT_TRUE(std::ranges::equal(expected, std::vector(got, got + kWords))) << num_runs;
  }
}

TEST_P(PageMoveTest, PatchesInFlightKeepWhatTheyWereGiven) {
  constexpr std::int32_t kRounds = 64;
  constexpr std::int32_t kWords = 20'000;
  const BufferPtr buffer = on_device(std::vector<std::byte>(std::size_t{kRounds} * kWords * 4));
  auto* place = reinterpret_cast<std::int32_t*>(buffer->device_data());
  std::vector<std::int32_t> words(kWords);
  for (std::int32_t round = 0; round < kRounds; ++round) {
    std::ranges::fill(words, round + 1);
    const PatchRun run{std::int64_t{round} * kWords, kWords, 0};
    backend().patch(place, {&run, 1}, words, 0);
  }
  const std::vector<std::byte> bytes = read(*buffer);
  const auto* got = reinterpret_cast<const std::int32_t*>(bytes.data());
  for (std::int32_t round = 0; round < kRounds; ++round) {
    ASSERT_EQ(std::count(got + round * kWords, got + (round + 1) * kWords, round + 1), kWords)
        << "round " << round;
  }
}

TEST_P(PageMoveTest, AnEmptyPatchIsANoOp) { backend().patch(nullptr, {}, {}, 0); }

TEST_P(PageMoveTest, CopyPagesMovesEveryByteOfThePagesAndNoOther) {
  constexpr std::int32_t kSlots = 40;
  for (const std::int64_t bytes : {1, 6, 20, 24, 64, 4096, 16'384 + 16, 70'000}) {
    for (const PageDirection direction : {PageDirection::kToHost, PageDirection::kToDevice}) {
      for (const std::size_t count : {1UL, 2UL, 39UL}) {
        const std::int64_t device_stride = bytes;
        const std::int64_t host_stride = bytes + 3 * (bytes / 2);  // a part of a longer page
        std::vector<std::byte> there = random_bytes(static_cast<std::size_t>(kSlots * bytes));
        const BufferPtr device_memory = on_device(there);
        const BufferPtr host =
            backend().allocate_pinned(static_cast<std::size_t>(kSlots * host_stride));
        std::vector<std::byte> here = random_bytes(host->bytes());
        std::ranges::copy(here, host->data());
        std::vector<std::int32_t> device_slots(kSlots);
        std::iota(device_slots.begin(), device_slots.end(), 0);
        std::vector<std::int32_t> host_slots = device_slots;
        std::ranges::shuffle(device_slots, random_);
        std::ranges::shuffle(host_slots, random_);
        std::vector<PageCopy::Page> pages;
        for (std::size_t i = 0; i < count; ++i) {
          pages.push_back({device_slots[i], host_slots[i]});
          const auto d = there.begin() + device_slots[i] * device_stride;
          const auto h = here.begin() + host_slots[i] * host_stride;
          if (direction == PageDirection::kToHost) std::copy(d, d + bytes, h);
          if (direction == PageDirection::kToDevice) std::copy(h, h + bytes, d);
        }
        backend().copy_pages({device_memory->device_data(), device_stride, host->device_data(),
                              host_stride, bytes, pages, direction},
                             0);
        EXPECT_EQ(read(*device_memory), there) << bytes << " B, " << count << " pages";
        EXPECT_TRUE(std::ranges::equal(here, std::span(host->data(), host->bytes())))
            << bytes << " B, " << count << " pages";
      }
    }
  }
}

TEST_P(PageMoveTest, CopyPagesTakesMoreThanALaunchHolds) {
  constexpr std::int32_t kSlots = 5000;
  const std::vector<std::byte> there = random_bytes(std::size_t{kSlots} * 16);
  const BufferPtr device_memory = on_device(there);
  const BufferPtr host = backend().allocate_pinned(std::size_t{kSlots} * 16);
  std::vector<PageCopy::Page> pages;
  for (std::int32_t slot = 0; slot < kSlots; ++slot) pages.push_back({slot, kSlots - 1 - slot});
  backend().copy_pages({device_memory->device_data(), 16, host->device_data(), 16, 16, pages,
                        PageDirection::kToHost},
                       0);
  backend().synchronize(*backend().record(0));
  for (std::int32_t slot = 0; slot < kSlots; ++slot) {
    ASSERT_TRUE(std::ranges::equal(
        std::span(there).subspan(std::size_t{16} * static_cast<std::size_t>(slot), 16),
        std::span(host->data() + 16 * (kSlots - 1 - slot), 16)))
        << slot;
  }
}

TEST_P(PageMoveTest, OffsetsPastFourGibibytesAreNotCutOff) {
  if (GetParam() == DeviceKind::kCpu && sizeof(void*) < 8) GTEST_SKIP();
  constexpr std::int64_t kStride = std::int64_t{1} << 30;
  constexpr std::int32_t kSlot = 5;
  BufferPtr device_memory;
  try {
    device_memory = backend().allocate_device(std::size_t{5} * kStride + 64);
  } catch (const std::bad_alloc&) {
    GTEST_SKIP() << "there are no 5 GiB";
  }
  const BufferPtr host = backend().allocate_pinned(64);
  std::ranges::fill(std::span(host->data(), 64), std::byte{0x5A});
  const PageCopy::Page page{kSlot, 0};
  PageCopy copy{device_memory->device_data(), kStride, host->device_data(), 64, 64, {&page, 1},
                PageDirection::kToDevice};
  backend().copy_pages(copy, 0);
  backend().synchronize(*backend().record(0));
  std::ranges::fill(std::span(host->data(), 64), std::byte{0});
  backend().download(*host, device_memory->device_data() + kSlot * kStride, 64, 0);
  backend().synchronize(*backend().record(0));
  EXPECT_EQ(std::ranges::count(std::span(host->data(), 64), std::byte{0x5A}), 64);
}

}  // namespace
}  // namespace sparse_kvcm::testing
