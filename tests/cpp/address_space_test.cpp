// Addresses and memory as two things.
#include "core/address_space.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <system_error>
#include <vector>

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

template <int kError>
int fail_with(void*, std::size_t, int) {
  errno = kError;
  return -1;
}

std::size_t num_resident_pages(std::byte* address, std::size_t bytes) {
  std::vector<unsigned char> resident(bytes / system_page_bytes());
  EXPECT_EQ(mincore(address, bytes, resident.data()), 0);
  std::size_t count = 0;
  for (const unsigned char page : resident) count += page & 1U;
  return count;
}

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

TEST_F(AddressSpaceTest, PopulatingTakesTheMemory) {
  commit_memory(address_, kAlignment);
  EXPECT_EQ(num_resident_pages(address_, kAlignment), 0u);
  populate_memory(address_, kAlignment);
  EXPECT_EQ(num_resident_pages(address_, kAlignment), kAlignment / system_page_bytes());
}

TEST_F(AddressSpaceTest, WhereTheKernelCannotPopulateEveryPageIsTouchedAndKeepsItsBytes) {
  for (const Advise advise : {&fail_with<EINVAL>, &fail_with<ENOSYS>}) {
    commit_memory(address_, kAlignment);
    address_[0] = std::byte{7};
    populate_memory(address_, kAlignment, advise);
    EXPECT_EQ(num_resident_pages(address_, kAlignment), kAlignment / system_page_bytes());
    EXPECT_EQ(address_[0], std::byte{7});
    decommit_memory(address_, kAlignment);
  }
}

TEST_F(AddressSpaceTest, LackOfMemoryIsABadAllocAndOtherFaultsAreSystemErrors) {
  commit_memory(address_, kAlignment);
  EXPECT_THROW(populate_memory(address_, kAlignment, &fail_with<ENOMEM>), std::bad_alloc);
  try {
    populate_memory(address_, kAlignment, &fail_with<EPERM>);
    FAIL() << "no exception";
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code().value(), EPERM);
  }
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
