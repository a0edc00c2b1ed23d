// resolve against its oracle over random programs of steps.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

#include "resolve_fixture.hpp"
#include "resolve_oracle.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();

// A few leases that live through steps: growing, parked, left and seated again.
class ResolveProgram {
 public:
  explicit ResolveProgram(std::uint64_t seed) : random_(seed) {
    input_.k = random_.pick<std::int32_t>({1, 2, 7, 32, 40});
    input_.stride = input_.k + random_.pick<std::int32_t>({0, 0, 3});
    input_.max_new_units = random_.in(0, 3);
    input_.no_write_slot = random_.pick<std::int32_t>({-1, 12'345});
    input_.step = {random_.pick<std::uint32_t>({0, 1, 100, 0x7FFFFFFFu, 0xFFFFFFC0u}), 1};
    const std::int32_t num_rows = random_.in(1, 6);
    for (std::int32_t lease = 0; lease < num_rows; ++lease) add_lease(lease);
    input_.entries.resize(input_.entries.size() + 3, kPoisonWord);
    random_.shuffle(input_.row_states);
    seats_ = input_.row_states;
  }

  // The next launch; now and then in a closed step, or without a publish since the last.
  const ResolveInput& next_launch() {
    input_.step.open = random_.one_in(25) ? 0 : 1;
    if (!random_.one_in(20)) publish();
    choose_rows();
    choose_selection();
    return input_;
  }

  void carry_over(const ResolveResult& result) {
    input_.entries = result.entries;
    input_.last = result.last;
  }

  Random& random() { return random_; }

 private:
  void add_lease(std::int32_t lease) {
    RowState row;
    row.lease_id = lease;
    row.base = static_cast<std::int32_t>(input_.entries.size());
    const bool all_window = random_.one_in(5);
    const std::int32_t k = input_.k;
    row.cached_slots = all_window ? 0 : random_.pick<std::int32_t>({k, k, k + 1, 2 * k, 3 * k + 5});
    row.window_slots = all_window ? random_.in(4, 70) : random_.pick<std::int32_t>({1, 2, 3, 17});
    row.committed = all_window ? 0 : random_.in(0, 4 * k);
    row.window_begin = all_window ? 0 : row.committed;
    const auto slots = static_cast<std::size_t>(row.cached_slots + row.window_slots);
    input_.entries.resize(input_.entries.size() + slots, kEmptyEntry);
    if (random_.one_in(3)) fill(row);
    input_.last.push_back(input_.step.clock - static_cast<std::uint32_t>(random_.in(0, 200)));
    input_.row_states.push_back(row);
  }

  // What a caller may hand over: any words of distinct ordinals.
  void fill(const RowState& row) {
    std::vector<std::uint32_t> ordinals(static_cast<std::size_t>(row.cached_slots) + 100);
    std::iota(ordinals.begin(), ordinals.end(), 0u);
    random_.shuffle(ordinals);
    for (std::int32_t slot = 0; slot < row.cached_slots; ++slot) {
      const auto stamp = static_cast<std::uint32_t>(random_.in(0, 255));
      if (random_.one_in(4)) continue;
      input_.entries[static_cast<std::size_t>(row.base + slot)] =
          stamp << 24 | ordinals[static_cast<std::size_t>(slot)];
    }
  }

  void publish() {
    input_.step.clock +=
        random_.one_in(4)
            ? random_.pick<std::uint32_t>({2, 125, 126, 127, 128, 129, 255, 1000, 0x80000000u})
            : 1;
    for (RowState& row : seats_) grow(row);
  }

  void grow(RowState& row) {
    if (random_.one_in(40)) reset(row);
    const bool all_window = row.cached_slots == 0;
    row.committed += random_.in(0, 2);
    if (all_window) row.committed = std::min(row.committed, row.window_slots);
    std::int32_t growth = random_.in(0, std::min(input_.max_new_units, row.window_slots));
    if (all_window) growth = std::min(growth, row.window_slots - row.committed);
    row.length = row.committed + growth;
    if (!all_window) row.window_begin = std::max(row.window_begin, row.length - row.window_slots);
    const bool hole = random_.one_in(8);
    row.watermark = random_.in(hole ? 0 : row.window_begin, row.committed);
  }

  void reset(const RowState& row) {
    const auto first = input_.entries.begin() + row.base;
    std::fill(first, first + row.cached_slots, kEmptyEntry);
    input_.last[static_cast<std::size_t>(row.lease_id)] =
        input_.step.clock - static_cast<std::uint32_t>(random_.in(0, 1));
  }

  // Some rows park; others stand beside padding, empty seats and entries that are no row.
  void choose_rows() {
    input_.row_states = seats_;
    input_.rows.clear();
    const auto num_rows = static_cast<std::int32_t>(seats_.size());
    for (std::int32_t r = 0; r < num_rows; ++r) {
      if (!random_.one_in(4)) input_.rows.push_back(r);
      if (random_.one_in(6)) input_.rows.push_back(-1);
      if (random_.one_in(20)) spoil(input_.row_states[static_cast<std::size_t>(r)]);
    }
    if (random_.one_in(8)) {
      input_.rows.push_back(random_.pick<std::int32_t>({-2, num_rows, kMin, kMax}));
    }
    random_.shuffle(input_.rows);
  }

  void spoil(RowState& row) {
    const std::int32_t bad = random_.pick<std::int32_t>({-1, -5, kMin, kMax, 1 << 24});
    const std::vector<std::int32_t RowState::*> fields{
        &RowState::lease_id, &RowState::base,      &RowState::cached_slots, &RowState::window_slots,
        &RowState::length,   &RowState::committed, &RowState::window_begin, &RowState::watermark};
    row.*random_.pick(fields) = bad;
  }

  void choose_selection() {
    const auto stride = static_cast<std::size_t>(input_.stride);
    input_.selection.assign(input_.b() * stride, kPoison);
    for (std::size_t i = 0; i < input_.b(); ++i) {
      const std::int32_t r = input_.rows[i];
      const bool seated = r >= 0 && r < static_cast<std::int32_t>(seats_.size());
      const RowState row = seated ? seats_[static_cast<std::size_t>(r)] : RowState{};
      for (std::size_t j = 0; j < static_cast<std::size_t>(input_.k); ++j) {
        input_.selection[i * stride + j] = ordinal(row, i * stride, j);
      }
    }
  }

  std::int32_t ordinal(const RowState& row, std::size_t first, std::size_t j) {
    if (random_.one_in(8) || row.length == 0) return -1;
    if (random_.one_in(40)) return random_.pick<std::int32_t>({-2, row.length, kMin, kMax});
    if (random_.one_in(6) && j > 0) {
      return input_.selection[first + static_cast<std::size_t>(
                                          random_.in(0, static_cast<std::int32_t>(j) - 1))];
    }
    if (random_.one_in(6)) return random_.in(std::max(0, row.window_begin - 2), row.length - 1);
    const std::int32_t warm = std::min(row.length - 1, row.cached_slots + row.cached_slots / 4);
    return random_.in(0, random_.one_in(3) ? row.length - 1 : warm);
  }

  Random random_;
  ResolveInput input_;
  std::vector<RowState> seats_;
};

class ResolveProgramTest : public DeviceTest {};
SPARSE_KVCM_ON_EVERY_DEVICE(ResolveProgramTest);

TEST_P(ResolveProgramTest, AgreesWithTheOracleOverRandomPrograms) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    ResolveProgram program(seed);
    for (int launch = 0; launch < 40; ++launch) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", launch " << launch);
      const ResolveInput& input = program.next_launch();
      const ResolveResult expected = expected_resolve(input);
      ASSERT_NO_FATAL_FAILURE(expect_same(resolve_on(device(), input), expected));
      program.carry_over(expected);
    }
  }
}

TEST_P(ResolveProgramTest, PermutingASelectionPermutesItsSlotsAndChangesNothingElse) {
  for (std::uint64_t seed = 1000; seed < 1100; ++seed) {
    ResolveProgram program(seed);
    for (int launch = 0; launch < 10; ++launch) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", launch " << launch);
      const ResolveInput& input = program.next_launch();
      ResolveResult expected = resolve_on(device(), input);

      std::vector<std::size_t> order(static_cast<std::size_t>(input.k));
      for (std::size_t j = 0; j < order.size(); ++j) order[j] = j;
      program.random().shuffle(order);
      ResolveInput permuted = input;
      ResolveResult permuted_back = expected;
      for (std::size_t i = 0; i < input.b(); ++i) {
        for (std::size_t j = 0; j < order.size(); ++j) {
          permuted.selection[i * static_cast<std::size_t>(input.stride) + j] =
              input.selected(i, static_cast<std::int32_t>(order[j]));
          permuted_back.slots[i * order.size() + j] = expected.slots[i * order.size() + order[j]];
        }
      }
      ASSERT_NO_FATAL_FAILURE(expect_same(resolve_on(device(), permuted), permuted_back));
      program.carry_over(expected);
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm::testing
