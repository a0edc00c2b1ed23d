// Ranges that grow and shrink in place, on every device and kind of memory.
#include "backend/mapped_range.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "backend/backend.hpp"
#include "backend/filler.hpp"
#include "range_fixture.hpp"
#include "sparse_kvcm/error.hpp"
#include "test_device.hpp"

namespace sparse_kvcm {
namespace {

using testing::kGranule;
using testing::kReserved;
using testing::resize;

class MappedRangeTest : public testing::DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (!IsSkipped() && !HasFailure()) backend_ = backend_for(device());
  }

  std::unique_ptr<MappedRange> make(MemoryKind kind) {
    return std::make_unique<MappedRange>(backend_->memory_driver(kind), std::make_shared<Filler>(1),
                                         kReserved, kGranule);
  }
  // Writes `value` to 64 bytes at `offset`, and reads them back.
  void write(const MappedRange& range, std::size_t offset, std::uint8_t value) {
    const std::vector<std::uint8_t> bytes(64, value);
    if (range.is_host_memory()) {
      std::memcpy(range.address() + offset, bytes.data(), bytes.size());
      return;
    }
    const Upload upload{range.address() + offset, bytes.data(), bytes.size()};
    backend_->upload({&upload, 1}, 0);
  }
  std::vector<std::uint8_t> read(const MappedRange& range, std::size_t offset) {
    if (range.is_host_memory()) {
      std::vector<std::uint8_t> bytes(64);
      std::memcpy(bytes.data(), range.address() + offset, bytes.size());
      return bytes;
    }
    const BufferPtr pinned = backend_->allocate_pinned(64);
    backend_->download(*pinned, range.address() + offset, 64, 0);
    backend_->synchronize(*backend_->record(0));
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(pinned->data());
    return {bytes, bytes + 64};
  }
  static std::vector<std::uint8_t> all(std::uint8_t value) {
    return std::vector<std::uint8_t>(64, value);
  }

  std::shared_ptr<Backend> backend_;
};
SPARSE_KVCM_ON_EVERY_DEVICE(MappedRangeTest);

constexpr MemoryKind kKinds[] = {MemoryKind::kDevice, MemoryKind::kPinned};

TEST_P(MappedRangeTest, TheGranuleSuitsTheDriver) {
  for (const MemoryKind kind : kKinds) {
    EXPECT_EQ(kGranule % backend_->memory_driver(kind)->granularity(), 0u);
  }
}

TEST_P(MappedRangeTest, AMappedPrefixCanBeReadAndWrittenUpToItsEnd) {
  for (const MemoryKind kind : kKinds) {
    const auto range = make(kind);
    resize(*range, 3 * kGranule);
    range->wait_usable(3 * kGranule);
    write(*range, 0, 1);
    write(*range, 3 * kGranule - 64, 2);
    EXPECT_EQ(read(*range, 0), all(1));
    EXPECT_EQ(read(*range, 3 * kGranule - 64), all(2));
  }
}

TEST_P(MappedRangeTest, GrowingAndShrinkingKeepAddressAndContents) {
  for (const MemoryKind kind : kKinds) {
    const auto range = make(kind);
    std::byte* const address = range->address();
    resize(*range, 2 * kGranule);
    range->wait_usable(2 * kGranule);
    write(*range, kGranule, 5);
    for (const std::size_t granules : {8u, 2u, 5u, 2u}) {
      resize(*range, granules * kGranule);
      range->wait_usable(granules * kGranule);
      EXPECT_EQ(range->address(), address);
      EXPECT_EQ(range->mapped_bytes(), granules * kGranule);
      EXPECT_EQ(read(*range, kGranule), all(5));
    }
  }
}

TEST_P(MappedRangeTest, MemoryThatWasUnmappedCanBeMappedAgainPieceByPiece) {
  for (const MemoryKind kind : kKinds) {
    const auto range = make(kind);
    for (int round = 0; round < 3; ++round) {
      resize(*range, kReserved);
      range->wait_usable(kReserved);
      write(*range, kReserved - 64, 9);
      EXPECT_EQ(read(*range, kReserved - 64), all(9));
      for (std::size_t left = kReserved; left > 0; left -= kGranule)
        resize(*range, left - kGranule);
      EXPECT_EQ(range->mapped_bytes(), 0u);
      EXPECT_EQ(range->usable_bytes(), 0u);
    }
  }
}

TEST_P(MappedRangeTest, WorkInFlightEndsBeforeItsMemoryGoes) {
  const auto range = make(MemoryKind::kDevice);
  resize(*range, kReserved);
  for (int i = 0; i < 64; ++i) backend_->clear(range->address(), kReserved, 0);
  resize(*range, kGranule);
  backend_->clear(range->address(), kGranule, 0);
  EXPECT_NO_THROW(backend_->synchronize(*backend_->record(0)));
  EXPECT_EQ(read(*range, 0), all(0));
}

TEST_P(MappedRangeTest, TheKindDecidesWhetherTheHostSeesTheMemory) {
  EXPECT_TRUE(make(MemoryKind::kPinned)->is_host_memory());
  EXPECT_EQ(make(MemoryKind::kDevice)->is_host_memory(), device().kind == DeviceKind::kCpu);
}

TEST_P(MappedRangeTest, KernelsReachPinnedMemoryAcrossGranules) {
  constexpr std::int32_t kUnitBytes = 80;
  constexpr std::int64_t kAcross =
      kGranule / kUnitBytes;  // begins in one granule, ends in the next
  const auto range = make(MemoryKind::kPinned);
  resize(*range, 2 * kGranule);
  range->wait_usable(2 * kGranule);
  const BufferPtr arena = backend_->allocate_device(4 * kUnitBytes);
  const ops::Piece piece{arena->device_data(), 4 * kUnitBytes, kUnitBytes, 0};
  const ops::GroupMemory group{{&piece, 1}, range->address(), kUnitBytes, kAcross / 4 + 1, 4, 4};
  std::vector<std::uint8_t> unit(kUnitBytes);
  std::iota(unit.begin(), unit.end(), std::uint8_t{1});
  const Upload upload{arena->device_data() + kUnitBytes, unit.data(), unit.size()};
  backend_->upload({&upload, 1}, 0);
  const ops::UnitMove out{kAcross, 1};
  backend_->move_units({{&out, 1}, {&group, 1}, ops::MoveDirection::kArenaToHost}, 0);
  const ops::UnitMove back{kAcross, 3};
  backend_->move_units({{&back, 1}, {&group, 1}, ops::MoveDirection::kHostToArena}, 0);
  const BufferPtr pinned = backend_->allocate_pinned(kUnitBytes);
  backend_->download(*pinned, arena->device_data() + 3 * kUnitBytes, kUnitBytes, 0);
  backend_->synchronize(*backend_->record(0));
  EXPECT_EQ(std::memcmp(range->address() + kAcross * kUnitBytes, unit.data(), unit.size()), 0);
  EXPECT_EQ(std::memcmp(pinned->data(), unit.data(), unit.size()), 0);
}

// On a GPU: pieces that lie side by side within a granule are registered one by one.
TEST_P(MappedRangeTest, AGranuleThatWasFilledInPartIsFilledOn) {
  const auto range = make(MemoryKind::kPinned);
  const std::size_t page = backend_->memory_driver(MemoryKind::kPinned)->granularity();
  std::uint8_t mark = 0;
  for (const std::size_t used : {page, 2 * page, kGranule + page, 3 * kGranule}) {
    range->resize((used + kGranule - 1) / kGranule * kGranule, used);
    range->start_filling();
    range->wait_usable(kReserved);
    EXPECT_EQ(range->usable_bytes(), used);
    write(*range, used - 64, ++mark);
    EXPECT_EQ(read(*range, used - 64), all(mark));
  }
  EXPECT_EQ(read(*range, page - 64), all(1));
  range->resize(kGranule);
  EXPECT_EQ(range->usable_bytes(), kGranule);
  EXPECT_EQ(read(*range, 2 * page - 64), all(2));
}

// What a manager's pools are: one granule of exactly their size, opened in chunks of several slots.
TEST_P(MappedRangeTest, AFixedRangeIsFilledAtOnceInChunksOfItsOwn) {
  constexpr std::size_t kWhole = 3 * kGranule + 8192;
  MappedRange range(backend_->memory_driver(MemoryKind::kPinned), nullptr, kWhole, kWhole,
                    kGranule + 4096);
  range.resize(kWhole, kWhole - 100);
  fill_ranges(std::vector<MappedRange*>{&range}, [](std::size_t, std::size_t) {});
  EXPECT_EQ(range.usable_bytes(), kWhole - 100);
  const std::vector<std::uint8_t> unit(80, 9);
  const BufferPtr arena = backend_->allocate_device(4 * 80);
  const Upload upload{arena->device_data(), unit.data(), unit.size()};
  backend_->upload({&upload, 1}, 0);
  const ops::Piece piece{arena->device_data(), 4 * 80, 80, 0};
  const ops::GroupMemory group{{&piece, 1}, range.address(), 80, kWhole / 320, 4, 4};
  const ops::UnitMove out{(kGranule + 4096) / 80, 0};  // across the border of two chunks
  backend_->move_units({{&out, 1}, {&group, 1}, ops::MoveDirection::kArenaToHost}, 0);
  backend_->synchronize(*backend_->record(0));
  EXPECT_EQ(std::memcmp(range.address() + out.host_unit * 80, unit.data(), unit.size()), 0);
}

TEST_P(MappedRangeTest, AGranuleMayBeLargerThanTheDriverNeeds) {
  for (const MemoryKind kind : kKinds) {
    MappedRange range(backend_->memory_driver(kind), std::make_shared<Filler>(1), 16 * kGranule,
                      8 * kGranule);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(range.address()) % (8 * kGranule), 0u);
    resize(range, 8 * kGranule);
    range.wait_usable(8 * kGranule);
    write(range, 8 * kGranule - 64, 4);
    EXPECT_EQ(read(range, 8 * kGranule - 64), all(4));
    EXPECT_THROW(range.resize(4 * kGranule), InvalidArgument);
  }
}

TEST_P(MappedRangeTest, SizesBeyondTheReservationAreRefused) {
  for (const MemoryKind kind : kKinds) {
    const auto range = make(kind);
    resize(*range, kGranule);
    EXPECT_THROW(range->resize(kReserved + kGranule), InvalidArgument);
    EXPECT_THROW(range->resize(kGranule + 1), InvalidArgument);
    EXPECT_EQ(range->mapped_bytes(), kGranule);
  }
}

TEST_P(MappedRangeTest, RandomSizesKeepEveryGranuleThatStayed) {
  for (const MemoryKind kind : kKinds) {
    const auto range = make(kind);
    std::mt19937 random(7);
    std::vector<std::uint8_t> expected;
    for (int step = 0; step < 40; ++step) {
      const std::size_t granules = random() % (kReserved / kGranule + 1);
      resize(*range, granules * kGranule);
      range->wait_usable(granules * kGranule);
      if (granules < expected.size()) expected.resize(granules);
      while (expected.size() < granules) {
        expected.push_back(static_cast<std::uint8_t>(random()));
        write(*range, (expected.size() - 1) * kGranule, expected.back());
      }
      for (std::size_t g = 0; g < granules; ++g) {
        ASSERT_EQ(read(*range, g * kGranule), all(expected[g])) << "step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm
