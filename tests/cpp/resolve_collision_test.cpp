// resolve where a hash, a bitmap word or a bucket would be full: selections that fall together, and
// leases in which everything is replaced. Slots and the order of eviction stay those of the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "resolve_oracle.hpp"

namespace sparse_kvcm::testing {
namespace {

using Selection = std::vector<std::int32_t>;

Selection strided(std::int32_t first, std::int32_t step, std::int32_t count) {
  Selection selection(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < selection.size(); ++i) {
    selection[i] = first + static_cast<std::int32_t>(i) * step;
  }
  return selection;
}

Selection reversed(Selection selection) {
  std::reverse(selection.begin(), selection.end());
  return selection;
}

Selection operator+(Selection a, const Selection& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Of k ordinals below `history`, what is left of k being unused.
struct Pattern {
  std::string name;
  Selection selection;
};

std::vector<Pattern> patterns(std::int32_t k, std::int32_t history) {
  std::vector<Pattern> all{
      {"first word", strided(0, 1, std::min(k, 32))},
      {"last word", strided(history - std::min(k, 32), 1, std::min(k, 32))},
      {"word boundaries", strided(31, 32, k / 2) + strided(32, 32, k - k / 2)},
      {"dense run", strided(history / 2 - 3, 1, k)},
      {"descending run", reversed(strided(history - k, 1, k))},
      {"one ordinal", Selection(static_cast<std::size_t>(k), history / 3)},
      {"two ordinals in turn", {}},
  };
  for (std::int32_t j = 0; j < k; ++j) all.back().selection.push_back(j % 2 == 0 ? 5 : history - 5);
  for (std::int32_t step = 2; std::int64_t{step} * k <= history; step *= 2) {
    all.push_back({"low bits of step " + std::to_string(step), strided(step - 1, step, k)});
    all.push_back({"one less than step " + std::to_string(step), strided(0, step - 1, k)});
  }
  for (Pattern& pattern : all) pattern.selection.resize(static_cast<std::size_t>(k), -1);
  return all;
}

class ResolveCollisionTest : public DeviceTest {
 protected:
  // One row with a committed history and an empty lease.
  static ResolveInput seat(std::int32_t k, std::int32_t cached_slots, std::int32_t history) {
    ResolveInput input;
    input.rows = {0};
    input.row_states = {{.lease_id = 0,
                         .base = 3,
                         .cached_slots = cached_slots,
                         .window_slots = 1,
                         .length = history,
                         .committed = history,
                         .window_begin = history,
                         .watermark = history}};
    input.k = input.stride = k;
    input.step = {200, 1};
    input.entries.assign(static_cast<std::size_t>(cached_slots) + 7, kEmptyEntry);
    input.last = {200};
    return input;
  }

  // Takes `input` a step further. The state after it is the oracle's.
  static ResolveResult step(ResolveInput& input, const Selection& selection, std::int32_t threads) {
    input.selection = selection;
    ++input.step.clock;
    const ResolveResult expected = expected_resolve(input);
    const ResolveResult actual = resolve_on(device(), input, threads);
    expect_same(actual, expected);
    input.entries = expected.entries;
    input.last = expected.last;
    return actual;
  }
};
SPARSE_KVCM_ON_EVERY_DEVICE(ResolveCollisionTest);

struct Shape {
  std::int32_t k, cached_slots, history;
};
// The last history is beyond every bitmap.
const Shape kShapes[] = {{64, 64, 4'096}, {300, 300, 70'000}, {1024, 2048, 1 << 23}};

TEST_P(ResolveCollisionTest, EachPatternAfterEachOtherGivesTheSlotsOfTheOracle) {
  for (const Shape& shape : kShapes) {
    for (const std::int32_t threads : {256, 512}) {
      const auto all = patterns(shape.k, shape.history);
      ResolveInput input = seat(shape.k, shape.cached_slots, shape.history);
      for (std::size_t n = 0; n < 2 * all.size(); ++n) {
        const Pattern& pattern = all[n * 5 % all.size()];
        SCOPED_TRACE(::testing::Message() << pattern.name << ", k " << shape.k << ", history "
                                          << shape.history << ", threads " << threads);
        step(input, pattern.selection, threads);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// Selections that agree in all low bits and share no unit, in a lease that holds three of them:
// each takes the slots of the one that was selected longest ago, by ascending ordinal and slot.
TEST_P(ResolveCollisionTest, FullLeaseEvictsTheLongestUnusedInSlotOrder) {
  constexpr std::int32_t kK = 96, kBase = 3;
  for (const std::int32_t threads : {256, 512}) {
    for (const std::int32_t stride : {16, 32, 1024, 8192, 131'072}) {
      SCOPED_TRACE(::testing::Message() << "stride " << stride << ", threads " << threads);
      ResolveInput input = seat(kK, 3 * kK, kK * stride + 16);
      for (std::int32_t turn = 0; turn < 10; ++turn) {
        const Selection fresh = strided(turn, stride, kK);
        const Selection selection = turn % 2 == 0 ? fresh : reversed(fresh);
        const ResolveResult result = step(input, selection, threads);
        ASSERT_FALSE(HasFailure()) << "turn " << turn;
        const Selection slots = strided(kBase + turn % 3 * kK, 1, kK);
        EXPECT_EQ(result.slots, turn % 2 == 0 ? slots : reversed(slots)) << "turn " << turn;
        EXPECT_EQ(result.miss_ordinals, fresh) << "turn " << turn;
        EXPECT_EQ(result.miss_slots, slots) << "turn " << turn;
      }
    }
  }
}

// The last histories that a GPU's direct table and bitmap cover, and the first that they do not.
TEST_P(ResolveCollisionTest, HistoriesAtTheLimitsOfEachIndexGiveTheSlotsOfTheOracle) {
  constexpr std::int32_t kK = 64;
  for (const std::int32_t limit : {256, 32'768, 70'000}) {
    for (const std::int32_t history : {limit - 1, limit, limit + 1}) {
      for (const std::int32_t threads : {256, 512}) {
        SCOPED_TRACE(::testing::Message() << "history " << history << ", max_units " << limit
                                          << ", threads " << threads);
        ResolveInput input = seat(kK, 2 * kK, history);
        input.max_units = limit;
        for (const Selection& selection :
             {strided(history - kK, 1, kK), strided(0, 3, kK), strided(history - 3 * kK, 3, kK),
              strided(history - kK, 1, kK)}) {
          step(input, selection, threads);
          ASSERT_FALSE(HasFailure());
        }
      }
    }
  }
}

TEST_P(ResolveCollisionTest, HitInTheLastSlotOfTheLargestLeasesKeepsIt) {
  for (const std::int32_t cached_slots : {65'533, 65'534, 65'535}) {
    for (const std::int32_t threads : {256, 512}) {
      SCOPED_TRACE(::testing::Message() << cached_slots << " slots, threads " << threads);
      ResolveInput input = seat(4, cached_slots, 32'000);
      const std::int32_t last = input.row_states[0].base + cached_slots - 1;
      input.entries[static_cast<std::size_t>(last)] = pack_entry(199, true, 31'999);
      EXPECT_EQ(step(input, {31'999, 5, -1, 31'999}, threads).slots,
                (Selection{last, input.row_states[0].base, -1, last}));
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm::testing
