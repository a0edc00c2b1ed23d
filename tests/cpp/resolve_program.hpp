// Random programs for resolve: a few leases that live through steps: growing, parked, left, seated
// again. A program is a function of its seed and scale.
#pragma once

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "resolve_fixture.hpp"

namespace sparse_kvcm::testing {

inline constexpr std::int32_t kMinInt = std::numeric_limits<std::int32_t>::min();
inline constexpr std::int32_t kMaxInt = std::numeric_limits<std::int32_t>::max();

enum class Scale : std::uint8_t {
  kSmall,  // selections and leases that a block of threads sees the ends of; many steps
  kWide,   // K up to 4,096, N up to 65,535, histories up to 2^24 - 1 units
};

class ResolveProgram {
 public:
  ResolveProgram(std::uint64_t seed, Scale scale) : random_(seed), scale_(scale) {
    input_.k = choose_k();
    input_.stride = input_.k + random_.pick<std::int32_t>({0, 0, 3});
    input_.max_new_units = random_.in(0, 3);
    input_.no_write_slot = random_.pick<std::int32_t>({-1, 12'345});
    input_.max_units = random_.pick<std::int32_t>({1, 1000, 100'000, kMaxUnits, kMaxUnits});
    input_.step = {random_.pick<std::uint32_t>({0, 1, 100, 0x7FFFFFFFu, 0xFFFFFFC0u}), 1};
    const std::int32_t num_rows = random_.in(1, wide() ? 4 : 6);
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
  [[nodiscard]] bool wide() const { return scale_ == Scale::kWide; }

  std::int32_t choose_k() {
    if (!wide()) return random_.pick<std::int32_t>({1, 2, 7, 32, 40});
    if (random_.one_in(5)) return random_.pick<std::int32_t>({1, 512, 2048, 4095, 4096});
    return log_uniform(1, 4096);
  }

  // Each power of two as likely as the next.
  std::int32_t log_uniform(std::int32_t low, std::int32_t high) {
    const double exponent = random_.in(0, 1'000'000) * 1e-6;
    return static_cast<std::int32_t>(low * std::pow(double(high) / low, exponent));
  }

  void add_lease(std::int32_t lease) {
    RowState row;
    row.lease_id = lease;
    row.base = static_cast<std::int32_t>(input_.entries.size());
    const bool all_window = random_.one_in(5);
    row.cached_slots = all_window ? 0 : choose_cached_slots();
    row.window_slots = all_window ? random_.in(4, 70) : random_.pick<std::int32_t>({1, 2, 3, 17});
    row.committed = all_window ? 0 : choose_history();
    row.window_begin = all_window ? 0 : row.committed;
    const auto slots = static_cast<std::size_t>(row.cached_slots + row.window_slots);
    input_.entries.resize(input_.entries.size() + slots, kEmptyEntry);
    warm_.push_back(wide() ? random_.in(0, row.committed) : 0);
    if (random_.one_in(3)) fill(row);
    input_.last.push_back(input_.step.clock - static_cast<std::uint32_t>(random_.in(0, 200)));
    input_.row_states.push_back(row);
  }

  std::int32_t choose_cached_slots() {
    const std::int32_t k = input_.k;
    if (!wide()) return random_.pick<std::int32_t>({k, k, k + 1, 2 * k, 3 * k + 5});
    if (random_.one_in(25)) return random_.pick<std::int32_t>({60'001, kMaxCachedSlots});
    return random_.one_in(4) ? k : log_uniform(k, 16'384);
  }

  std::int32_t choose_history() {
    if (!wide()) return random_.in(0, 4 * input_.k);
    // A program grows a row by a few hundred units at most.
    return random_.one_in(8) ? random_.in(kMaxUnits / 2, kMaxUnits - 2000)
                             : log_uniform(1, 1'000'000);
  }

  // What a caller may hand over: any words of distinct ordinals.
  void fill(const RowState& row) {
    std::vector<std::uint32_t> ordinals(static_cast<std::size_t>(row.cached_slots) + 100);
    const auto most = kMaxUnits - static_cast<std::int32_t>(ordinals.size());
    std::iota(ordinals.begin(), ordinals.end(),
              static_cast<std::uint32_t>(std::min(warm_.back(), most)));
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
      input_.rows.push_back(random_.pick<std::int32_t>({-2, num_rows, kMinInt, kMaxInt}));
    }
    random_.shuffle(input_.rows);
  }

  void spoil(RowState& row) {
    const std::int32_t bad = random_.pick<std::int32_t>({-1, -5, kMinInt, kMaxInt, 1 << 24});
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
    if (random_.one_in(40)) {
      return random_.pick<std::int32_t>({-2, row.length, kMinInt, kMaxInt});
    }
    if (random_.one_in(6) && j > 0) {
      return input_.selection[first + static_cast<std::size_t>(
                                          random_.in(0, static_cast<std::int32_t>(j) - 1))];
    }
    if (random_.one_in(6)) return random_.in(std::max(0, row.window_begin - 2), row.length - 1);
    if (random_.one_in(3)) return random_.in(0, row.length - 1);
    // From few enough units that most of them are cached.
    const std::int32_t warm = warm_[static_cast<std::size_t>(row.lease_id)];
    const std::int32_t end = warm + row.cached_slots + row.cached_slots / 4;
    return random_.in(std::min(warm, row.length - 1), std::min(end, row.length - 1));
  }

  Random random_;
  Scale scale_;
  ResolveInput input_;
  std::vector<RowState> seats_;
  std::vector<std::int32_t> warm_;  // by lease: where the units that it selects often begin
};

}  // namespace sparse_kvcm::testing
