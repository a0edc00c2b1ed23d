// The rules of resolve, one by one, on one row: base 2, N = 4, W = 3, 20 units of which the last
// is new, 18 in host history, the window [17, 20).
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

#include "resolve_fixture.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
constexpr Entry kNone = kEmptyEntry;

class ResolveTest : public DeviceTest {
 protected:
  ResolveTest() {
    input_.rows = {0};
    input_.row_states = {{.lease_id = 0,
                          .base = 2,
                          .cached_slots = 4,
                          .window_slots = 3,
                          .length = 20,
                          .committed = 19,
                          .window_begin = 17,
                          .watermark = 18}};
    input_.step = {.clock = 500, .open = 1};
    input_.last = {499};
    hold({kNone, kNone, kNone, kNone});
  }

  RowState& row() { return input_.row_states[0]; }

  // The entries of the lease; those around it are poison.
  void hold(std::vector<Entry> entries) {
    input_.entries.assign(12, kPoisonWord);
    std::copy(entries.begin(), entries.end(), input_.entries.begin() + row().base);
  }

  // An entry of a unit that was last selected `age` steps ago, resident or not.
  [[nodiscard]] Entry hit(std::int32_t ordinal, std::uint32_t age) const {
    return pack_entry(input_.step.clock - age, true, ordinal);
  }
  [[nodiscard]] Entry miss(std::int32_t ordinal, std::uint32_t age) const {
    return pack_entry(input_.step.clock - age, false, ordinal);
  }

  ResolveResult select(std::vector<std::int32_t> ordinals) {
    input_.k = input_.stride = static_cast<std::int32_t>(ordinals.size());
    input_.selection = std::move(ordinals);
    return resolve_on(device(), input_);
  }

  // Runs `ordinals` as the next step, `gap` publishes after the last.
  ResolveResult next_step(std::vector<std::int32_t> ordinals, std::uint32_t gap = 1) {
    input_.step.clock += gap;
    ResolveResult result = select(std::move(ordinals));
    input_.entries = result.entries;
    input_.last = result.last;
    return result;
  }

  static std::vector<Entry> lease(const ResolveResult& result) {
    return {result.entries.begin() + 2, result.entries.begin() + 6};
  }
  static std::vector<std::int32_t> missed(const ResolveResult& result) {
    return {result.miss_ordinals.begin(), result.miss_ordinals.begin() + result.miss_counts[0]};
  }

  // The row gave nothing and nothing of its state moved.
  void expect_refused(const ResolveResult& result, std::uint32_t error) {
    ResolveResult expected(input_);
    std::fill(expected.slots.begin(), expected.slots.end(), -1);
    std::fill(expected.write_slots.begin(), expected.write_slots.end(), input_.no_write_slot);
    expected.miss_counts = expected.hit_counts = {0};
    expected.errors = {error};
    expected.row_errors[0] |= error;
    expect_same(result, expected);
  }

  ResolveInput input_;
};
SPARSE_KVCM_ON_EVERY_DEVICE(ResolveTest);

TEST_P(ResolveTest, UnusedEntriesGiveNoSlotWhereverTheyStand) {
  const ResolveResult result = select({-1, 18, -1});
  EXPECT_EQ(result.slots, (std::vector{-1, 6, -1}));
  EXPECT_EQ(result.errors[0], 0u);
}

TEST_P(ResolveTest, OrdinalsOutsideTheLengthGiveRangeAndNothingElseSuffers) {
  for (const std::int32_t bad : {-2, 20, 21, kMaxUnits, 1 << 24, kMin, kMax}) {
    const ResolveResult result = select({bad, 5, 19});
    EXPECT_EQ(result.slots, (std::vector{-1, 2, 7})) << bad;
    EXPECT_EQ(result.errors[0], kErrorRange) << bad;
    EXPECT_EQ(result.row_errors[0], kErrorPage | kErrorRange) << bad;
    EXPECT_EQ(missed(result), (std::vector{5})) << bad;
  }
}

TEST_P(ResolveTest, OrdinalsBetweenWatermarkAndWindowGiveHole) {
  row().watermark = 15;
  const ResolveResult result = select({14, 15, 16, 17});
  EXPECT_EQ(result.slots, (std::vector{2, -1, -1, 8}));
  EXPECT_EQ(result.errors[0], kErrorHole);
}

TEST_P(ResolveTest, ErrorBitsOfOneRowAreOred) {
  row().watermark = 15;
  EXPECT_EQ(select({16, 99}).errors[0], kErrorHole | kErrorRange);
}

TEST_P(ResolveTest, WindowOrdinalsGiveTheirRingSlotAndTouchNoEntry) {
  hold({hit(1, 3), kNone, miss(2, 1), hit(17, 2)});  // an old copy of 17 is not consulted
  const ResolveResult result = select({17, 18, 19, 17});
  EXPECT_EQ(result.slots, (std::vector{8, 6, 7, 8}));
  EXPECT_EQ(result.entries, input_.entries);
  EXPECT_EQ(result.hit_counts[0], 0);
  EXPECT_EQ(result.miss_counts[0], 0);
  EXPECT_EQ(result.last[0], 500u);
}

TEST_P(ResolveTest, HitKeepsItsSlotAndBecomesResident) {
  hold({miss(1, 1), hit(2, 7), hit(3, 1), kNone});
  const ResolveResult result = select({2, 1});
  EXPECT_EQ(result.slots, (std::vector{3, 2}));
  EXPECT_EQ(lease(result), (std::vector<Entry>{hit(1, 0), hit(2, 0), hit(3, 1), kNone}));
  EXPECT_EQ(result.hit_counts[0], 2);
  EXPECT_EQ(result.miss_counts[0], 0);
}

TEST_P(ResolveTest, DuplicatesShareOneSlotAndCountOnce) {
  hold({kNone, kNone, hit(9, 1), kNone});
  const ResolveResult result = select({9, 4, 9, 4});
  EXPECT_EQ(result.slots, (std::vector{4, 2, 4, 2}));
  EXPECT_EQ(result.hit_counts[0], 1);
  EXPECT_EQ(missed(result), (std::vector{4}));
}

TEST_P(ResolveTest, MissesTakeVictimsInAscendingOrderOfBoth) {
  const ResolveResult result = select({16, 3, 11});
  EXPECT_EQ(result.slots, (std::vector{4, 2, 3}));
  EXPECT_EQ(missed(result), (std::vector{3, 11, 16}));
  EXPECT_EQ(lease(result), (std::vector<Entry>{miss(3, 0), miss(11, 0), miss(16, 0), kNone}));
}

TEST_P(ResolveTest, OldestUnitIsEvictedFirst) {
  hold({hit(1, 2), hit(2, 9), hit(3, 4), hit(4, 3)});
  EXPECT_EQ(select({7, 8, -1}).slots, (std::vector{3, 4, -1}));
}

TEST_P(ResolveTest, AmongEqualAgesTheUnitThatWasNeverUsedAgainIsEvictedFirst) {
  hold({hit(1, 2), hit(2, 2), miss(3, 2), hit(4, 1)});
  EXPECT_EQ(select({7}).slots, (std::vector{4}));
}

TEST_P(ResolveTest, AmongEqualBucketsTheLowestSlotIsEvictedFirst) {
  hold({hit(1, 1), miss(2, 5), miss(3, 5), miss(4, 5)});
  EXPECT_EQ(select({8, 7}).slots, (std::vector{4, 3}));
}

TEST_P(ResolveTest, EmptyEntryTiesWithTheOldestUnitThatWasNeverUsedAgain) {
  hold({hit(1, 127), miss(2, 127), kNone, miss(4, 126)});
  EXPECT_EQ(select({7, 8}).slots, (std::vector{3, 4}));
  EXPECT_EQ(select({7, 8, 9}).slots, (std::vector{2, 3, 4}));
}

TEST_P(ResolveTest, SelectedUnitsAreNeverVictims) {
  hold({miss(1, 127), hit(2, 0), hit(3, 1), hit(4, 2)});
  const ResolveResult result = select({1, 3, 4, 9});
  EXPECT_EQ(result.slots, (std::vector{2, 4, 5, 3}));
}

TEST_P(ResolveTest, WholeLeaseIsReplacedWhenKEqualsN) {
  hold({hit(1, 1), hit(2, 1), hit(3, 1), hit(4, 1)});
  const ResolveResult result = select({8, 7, 6, 5});
  EXPECT_EQ(result.slots, (std::vector{5, 4, 3, 2}));
  EXPECT_EQ(result.miss_counts[0], 4);
}

TEST_P(ResolveTest, UnselectedUnitsOfAge127AreRestampedAndYoungerOnesAreNot) {
  hold({miss(1, 126), hit(2, 127), miss(3, 128), kNone});
  const ResolveResult result = select({-1});
  EXPECT_EQ(lease(result), (std::vector<Entry>{miss(1, 126), hit(2, 127), miss(3, 127), kNone}));
}

TEST_P(ResolveTest, AgeSaturatesWhateverTheGapSinceTheLastResolve) {
  for (const std::uint32_t gap : {126u, 127u, 128u, 129u, 256u, 1000u, 0x80000000u, 0xFFFFFFFFu}) {
    input_.last = {input_.step.clock - gap};
    hold({pack_entry(input_.last[0], true, 1), kNone, pack_entry(input_.last[0] - 1, false, 3),
          pack_entry(input_.last[0] - 127, true, 4)});
    const std::uint32_t first = std::min(gap, 127u);
    const ResolveResult result = select({-1});
    EXPECT_EQ(lease(result), (std::vector<Entry>{hit(1, first), kNone, miss(3, 127), hit(4, 127)}))
        << "gap " << gap;
  }
}

TEST_P(ResolveTest, UnitUnusedForAThousandStepsIsStillTheOldest) {
  next_step({1, 2, 3, 4});
  for (int step = 0; step < 1000; ++step) next_step({1, 2, 4, 4});
  EXPECT_EQ(next_step({5, 1}).slots, (std::vector{4, 2}));
}

TEST_P(ResolveTest, ClockMayWrap) {
  input_.step.clock = 0xFFFFFFFDu;
  input_.last = {0xFFFFFFFCu};
  next_step({1, 2, 3, 4});
  for (int step = 0; step < 4; ++step) next_step({1, 3, 4, 4});
  ASSERT_LT(input_.step.clock, 10u);
  EXPECT_EQ(next_step({9}).slots, (std::vector{3}));
}

// Only a caller of `ops` can make such a row; what it gives is undefined, but lies in its lease.
TEST_P(ResolveTest, EntriesThatShareAnOrdinalStayWithinTheLease) {
  hold({hit(5, 9), hit(5, 9), hit(5, 2), hit(5, 1)});
  for (const std::int32_t slot : select({5, 6, 7, 8}).slots) {
    EXPECT_TRUE(slot == kNoSlot || (slot >= row().base && slot < row().base + 4)) << slot;
  }
}

TEST_P(ResolveTest, ClosedStepGivesStaleAndTouchesNothing) {
  hold({hit(1, 1), kNone, kNone, kNone});
  input_.step.open = 0;
  expect_refused(select({1, 2}), kErrorStale);
}

TEST_P(ResolveTest, SecondLaunchInOneStepGivesStale) {
  next_step({1, 2});
  expect_refused(select({1, 3}), kErrorStale);
}

TEST_P(ResolveTest, LeaseResetAtThisClockGivesStale) {
  input_.last = {input_.step.clock};
  expect_refused(select({1}), kErrorStale);
}

TEST_P(ResolveTest, PaddingRowGivesNothingAndNoError) {
  input_.rows = {-1};
  const ResolveResult result = select({1, 99});
  EXPECT_EQ(result.slots, (std::vector{-1, -1}));
  EXPECT_EQ(result.write_slots, (std::vector{-1}));
  EXPECT_EQ(result.errors[0], 0u);
  EXPECT_EQ(result.batch_error[0], 1u << 7);
  EXPECT_EQ(result.entries, input_.entries);
}

TEST_P(ResolveTest, InvalidAndUnseatedRowsGiveABatchError) {
  input_.row_states.push_back({});
  for (const std::int32_t invalid : {1, 2, -2, kMin, kMax}) {
    input_.rows = {invalid, 0};
    input_.k = input_.stride = 1;
    input_.selection = {3, 3};
    const ResolveResult result = resolve_on(device(), input_);
    EXPECT_EQ(result.batch_error[0], kBatchErrorRow | 1u << 7) << invalid;
    EXPECT_EQ(result.errors, (std::vector{0u, 0u})) << invalid;
    EXPECT_EQ(result.slots, (std::vector{-1, 2})) << invalid;
  }
}

TEST_P(ResolveTest, WriteSlotsFollowTheUnitsAndTheRestIsFilled) {
  input_.max_new_units = 4;
  input_.no_write_slot = 77;
  row().committed = 18;
  EXPECT_EQ(select({-1}).write_slots, (std::vector{6, 7, 77, 77}));
  row().committed = 20;
  EXPECT_EQ(select({-1}).write_slots, (std::vector{77, 77, 77, 77}));
  input_.rows = {-1};
  EXPECT_EQ(select({-1}).write_slots, (std::vector{77, 77, 77, 77}));
}

TEST_P(ResolveTest, AllWindowLeaseResolvesMoreThanItsSlotsWithoutAMiss) {
  row() = {.lease_id = 0,
           .base = 2,
           .cached_slots = 0,
           .window_slots = 4,
           .length = 4,
           .committed = 3,
           .window_begin = 0,
           .watermark = 1};
  const ResolveResult result = select({3, 0, 0, 1, 2, -1, 4});
  EXPECT_EQ(result.slots, (std::vector{5, 2, 2, 3, 4, -1, -1}));
  EXPECT_EQ(result.errors[0], kErrorRange);
  EXPECT_EQ(result.entries, input_.entries);
  EXPECT_EQ(result.last[0], 500u);
}

TEST_P(ResolveTest, InconsistentRowsGiveLeaseAndTouchNothing) {
  const RowState good = row();
  const auto refuse = [&](auto RowState::* field, const std::vector<std::int32_t>& values) {
    for (const std::int32_t value : values) {
      SCOPED_TRACE(value);
      row() = good;
      row().*field = value;
      expect_refused(select({1, 19, 3}), kErrorLease);
    }
  };
  refuse(&RowState::lease_id, {1, kMax});
  refuse(&RowState::base, {-1, 6, kMin, kMax});
  refuse(&RowState::cached_slots, {-1, 2, 8, 65'536, kMin, kMax, 0});
  refuse(&RowState::window_slots, {2, 0, -1, 7, kMin, kMax});
  refuse(&RowState::length, {18, 21, -1, kMin, kMax});
  refuse(&RowState::committed, {18, 21, -1, 17, kMin, kMax});
  refuse(&RowState::window_begin, {16, 20, 21, -1, kMin, kMax});
  refuse(&RowState::watermark, {-1, 20, kMin, kMax});
}

TEST_P(ResolveTest, LargestLeaseAndHistoryAreAccepted) {
  row() = {.lease_id = 0,
           .base = 1,
           .cached_slots = kMaxCachedSlots,
           .window_slots = 2,
           .length = kMaxUnits,
           .committed = kMaxUnits,
           .window_begin = kMaxUnits - 1,
           .watermark = kMaxUnits};
  input_.entries.assign(kMaxCachedSlots + 3, kNone);
  const std::int32_t newest = kMaxUnits - 2;  // whose 24 bits come nearest to the empty entry's
  const std::int32_t k = device().kind == DeviceKind::kCpu ? kMaxCachedSlots : 4096;
  std::vector<std::int32_t> ordinals(static_cast<std::size_t>(k));
  std::iota(ordinals.begin(), ordinals.end(), newest - k + 1);
  const ResolveResult result = select(ordinals);
  EXPECT_EQ(result.errors[0], 0u);
  EXPECT_EQ(missed(result), ordinals);
  EXPECT_EQ(result.slots.back(), k);
  EXPECT_EQ(decode_entry(result.entries[static_cast<std::size_t>(k)]).ordinal, newest);
  EXPECT_EQ(result.entries.back(), kNone);
}

TEST_P(ResolveTest, OneCachedSlotTooManyIsRefused) {
  row().cached_slots = kMaxCachedSlots + 1;
  input_.entries.assign(kMaxCachedSlots + 10, kNone);
  expect_refused(select({1}), kErrorLease);
  row().cached_slots = kMaxCachedSlots;
  EXPECT_EQ(select({1}).errors[0], 0u);
}

TEST_P(ResolveTest, OneUnitTooManyIsRefused) {
  row() = {.lease_id = 0,
           .base = 2,
           .cached_slots = 4,
           .window_slots = 2,
           .length = kMaxUnits + 1,
           .committed = kMaxUnits + 1,
           .window_begin = kMaxUnits,
           .watermark = kMaxUnits + 1};
  expect_refused(select({1}), kErrorLease);
}

TEST_P(ResolveTest, SelectionMayBeStrided) {
  input_.row_states.push_back(row());
  input_.row_states[1].lease_id = 1;
  input_.row_states[1].base = 12;
  input_.last = {499, 499};
  input_.entries.assign(20, kNone);
  input_.rows = {1, 0};
  input_.k = 2;
  input_.stride = 5;
  input_.selection = {1, 2, 99, 99, 99, 3, 19, 99, 99, 99};
  const ResolveResult result = resolve_on(device(), input_);
  EXPECT_EQ(result.slots, (std::vector{12, 13, 2, 7}));
  EXPECT_EQ(result.errors, (std::vector{0u, 0u}));
}

TEST_P(ResolveTest, EmptyLaunchIsANoOp) {
  input_.rows.clear();
  input_.selection.clear();
  const ResolveResult result = resolve_on(device(), input_);
  expect_same(result, ResolveResult(input_));
}

}  // namespace
}  // namespace sparse_kvcm::testing
