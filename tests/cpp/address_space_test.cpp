// Addresses and memory as two things.
#include "core/address_space.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>

namespace sparse_kvcm {
namespace {

constexpr std::size_t kAlignment = std::size_t{2} << 20;

class AddressSpaceTest : public ::testing::Test {
 protected:
  AddressSpaceTest() : address_(reserve_addresses(bytes_, kAlignment)) {}
  ~AddressSpaceTest() override { release_addresses(address_, bytes_); }

  std::size_t bytes_ = 4 * kAlignment;
  std::byte* address_;
};

TEST_F(AddressSpaceTest, AReservationIsAligned) {
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address_) % kAlignment, 0u);
}

TEST_F(AddressSpaceTest, CommittedMemoryIsZeroAndCanBeWritten) {
  commit_memory(address_, kAlignment);
  EXPECT_EQ(address_[kAlignment - 1], std::byte{0});
  address_[kAlignment - 1] = std::byte{7};
  EXPECT_EQ(address_[kAlignment - 1], std::byte{7});
}

TEST_F(AddressSpaceTest, MemoryThatWasGivenUpComesBackAsZeroes) {
  commit_memory(address_, kAlignment);
  address_[0] = std::byte{7};
  decommit_memory(address_, kAlignment);
  commit_memory(address_, kAlignment);
  EXPECT_EQ(address_[0], std::byte{0});
}

TEST(AddressSpaceLimitTest, MoreAddressesThanThereAreIsABadAlloc) {
  EXPECT_THROW(static_cast<void>(reserve_addresses(std::size_t{1} << 60, kAlignment)),
               std::bad_alloc);
  EXPECT_THROW(
      static_cast<void>(reserve_addresses(std::numeric_limits<std::size_t>::max() - 5, kAlignment)),
      std::bad_alloc);
}

}  // namespace
}  // namespace sparse_kvcm
