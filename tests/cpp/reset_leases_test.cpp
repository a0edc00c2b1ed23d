#include <gtest/gtest.h>

#include <vector>

#include "ops_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

class ResetLeasesTest : public DeviceTest {
 protected:
  // Two groups of 12 slots and 4 leases.
  void reset(const std::vector<ops::LeaseReset>& leases, std::uint32_t clock) {
    const std::vector<Entry*> entries{entries_[0].data(), entries_[1].data()};
    const std::vector<std::uint32_t*> last{last_[0].data(), last_[1].data()};
    ops::reset_leases(device(), {leases, entries, last, 12, 4, clock}, 0);
  }

  std::vector<DeviceArray<Entry>> entries_;
  std::vector<DeviceArray<std::uint32_t>> last_;

  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    for (int group = 0; group < 2; ++group) {
      entries_.emplace_back(device(), 12, kPoisonWord);
      last_.emplace_back(device(), 4, kPoisonWord);
    }
  }
};
SPARSE_KVCM_ON_EVERY_DEVICE(ResetLeasesTest);

TEST_P(ResetLeasesTest, EmptiesTheCachedSlotsOfEachLeaseInEveryGroup) {
  reset({{.lease_id = 2, .base = 1, .cached_slots = 3},
         {.lease_id = 0, .base = 6, .cached_slots = 1},
         {.lease_id = 3, .base = 12, .cached_slots = 0}},
        0xFFFFFFF0u);
  const Entry kept = kPoisonWord, empty = 0xFFFFFFFFu;
  for (std::size_t group = 0; group < 2; ++group) {
    expect_equal("entries", entries_[group].download(),
                 {kept, empty, empty, empty, kept, kept, empty, kept, kept, kept, kept, kept});
    expect_equal("last", last_[group].download(),
                 {0xFFFFFFF0u, kPoisonWord, 0xFFFFFFF0u, 0xFFFFFFF0u});
  }
}

TEST_P(ResetLeasesTest, WholeArenaMayBeOneLease) {
  reset({{.lease_id = 1, .base = 0, .cached_slots = 12}}, 5);
  expect_equal("entries", entries_[1].download(), std::vector<Entry>(12, 0xFFFFFFFFu));
}

TEST_P(ResetLeasesTest, NoLeasesIsANoOp) {
  reset({}, 5);
  expect_equal("entries", entries_[0].download(), std::vector<Entry>(12, kPoisonWord));
  expect_equal("last", last_[0].download(), std::vector<std::uint32_t>(4, kPoisonWord));
}

}  // namespace
}  // namespace sparse_kvcm::testing
