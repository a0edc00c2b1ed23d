// Slots: order of allocation, shrinking under slots in use, and exact accounts in a storm.
#include "storage/slot_allocator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "faulty_backend.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm {
namespace {

struct SwitchedEvent final : Event {
  mutable bool done = false;
};

// The CPU, with events that are done when a test says so.
class EventBackend final : public testing::FaultyBackend {
 public:
  [[nodiscard]] bool is_done(const Event& event) const override {
    return static_cast<const SwitchedEvent&>(event).done;
  }
};

class SlotAllocatorTest : public ::testing::Test {
 protected:
  SlotAllocator make(std::int32_t num_slots) {
    return {std::make_shared<EventBackend>(), num_slots};
  }
};

std::vector<Slot> take(SlotAllocator& allocator, std::int32_t count) {
  std::vector<Slot> slots;
  EXPECT_TRUE(allocator.allocate(count, slots));
  return slots;
}

std::vector<std::int32_t> ids(const std::vector<Slot>& slots) {
  std::vector<std::int32_t> result;
  for (const Slot& slot : slots) result.push_back(slot.id);
  return result;
}

using Ids = std::vector<std::int32_t>;

TEST_F(SlotAllocatorTest, FreshSlotsComeInOrder) {
  SlotAllocator allocator = make(3);
  EXPECT_EQ(ids(take(allocator, 3)), (Ids{0, 1, 2}));
  EXPECT_EQ(allocator.num_free(), 0);
}

TEST_F(SlotAllocatorTest, ReturnedSlotsWhoseEventIsDoneComeBeforeFreshOnes) {
  SlotAllocator allocator = make(4);
  const auto slots = take(allocator, 2);
  const auto event = std::make_shared<SwitchedEvent>();
  event->done = true;
  allocator.release({1, event});
  allocator.release({0, nullptr});
  EXPECT_EQ(ids(take(allocator, 3)), (Ids{1, 0, 2}));
}

TEST_F(SlotAllocatorTest, FreshSlotsComeBeforeReturnedOnesThatAreStillBusy) {
  SlotAllocator allocator = make(2);
  const auto slots = take(allocator, 1);
  const auto event = std::make_shared<SwitchedEvent>();
  allocator.release({0, event});
  EXPECT_EQ(ids(take(allocator, 1)), (Ids{1}));
  const auto busy = take(allocator, 1);
  EXPECT_EQ(ids(busy), (Ids{0}));
  EXPECT_EQ(busy.front().ready, event);
}

TEST_F(SlotAllocatorTest, TooManyAreRefusedAsAWhole) {
  SlotAllocator allocator = make(3);
  std::vector<Slot> slots;
  EXPECT_FALSE(allocator.allocate(4, slots));
  EXPECT_TRUE(slots.empty());
  EXPECT_EQ(allocator.num_free(), 3);
}

TEST_F(SlotAllocatorTest, ASlotThatIsNotInUseCannotComeBack) {
  SlotAllocator allocator = make(2);
  const auto slots = take(allocator, 1);
  EXPECT_THROW(allocator.release({1, nullptr}), InvalidState);
  EXPECT_THROW(allocator.release({-1, nullptr}), InvalidState);
  EXPECT_THROW(allocator.release({2, nullptr}), InvalidState);
  allocator.release({0, nullptr});
  EXPECT_THROW(allocator.release({0, nullptr}), InvalidState);
  EXPECT_EQ(allocator.num_free(), 2);
}

TEST_F(SlotAllocatorTest, SlotsBeyondAShrinkDrainWhereTheyAre) {
  SlotAllocator allocator = make(6);
  auto slots = take(allocator, 6);
  allocator.release({1, nullptr});
  allocator.set_target(3);
  EXPECT_EQ(allocator.num_free(), 1);
  EXPECT_EQ(allocator.num_draining(), 3);
  EXPECT_EQ(allocator.extent(), 6);
  allocator.release({5, nullptr});
  EXPECT_EQ(allocator.extent(), 5);
  allocator.release({3, nullptr});
  allocator.release({4, nullptr});
  EXPECT_EQ(allocator.num_draining(), 0);
  EXPECT_EQ(allocator.extent(), 3);
  EXPECT_EQ(allocator.num_free(), 1);
  EXPECT_EQ(ids(take(allocator, 1)), (Ids{1}));
}

TEST_F(SlotAllocatorTest, AShrinkThatIsTakenBackGivesItsSlotsBack) {
  SlotAllocator allocator = make(4);
  auto slots = take(allocator, 4);
  allocator.set_target(1);
  allocator.release({2, nullptr});
  allocator.set_target(4);
  EXPECT_EQ(allocator.num_free(), 1);
  EXPECT_EQ(allocator.num_draining(), 0);
  EXPECT_EQ(ids(take(allocator, 1)), (Ids{2}));
}

TEST_F(SlotAllocatorTest, RandomStormsKeepTheAccounts) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::int32_t target = 8;
    SlotAllocator allocator = make(target);
    std::set<std::int32_t> used;
    for (int step = 0; step < 300; ++step) {
      const auto dice = random() % 8;
      if (dice == 0) {
        target = static_cast<std::int32_t>(random() % 20);
        allocator.set_target(target);
      } else if (dice < 5) {
        const auto count = static_cast<std::int32_t>(random() % 4);
        const std::int32_t free = allocator.num_free();
        std::vector<Slot> slots;
        ASSERT_EQ(allocator.allocate(count, slots), count <= free);
        for (const Slot& slot : slots) {
          ASSERT_TRUE(slot.id >= 0 && slot.id < target);
          ASSERT_TRUE(used.insert(slot.id).second) << slot.id;
        }
      } else if (!used.empty()) {
        const auto slot =
            std::next(used.begin(), static_cast<std::ptrdiff_t>(random() % used.size()));
        allocator.release({*slot, nullptr});
        used.erase(slot);
      }
      const auto draining = std::distance(used.lower_bound(target), used.end());
      ASSERT_EQ(allocator.num_draining(), draining);
      ASSERT_EQ(allocator.num_free(),
                target - (static_cast<std::ptrdiff_t>(used.size()) - draining));
      ASSERT_EQ(allocator.extent(), used.empty() ? target : std::max(target, *used.rbegin() + 1));
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm
