// resolve written a second time, from the contract in ops.hpp and entry.hpp's table of bits alone:
// sets, maps and sorts, one sentence of the contract after the other, as slow as it likes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "resolve_fixture.hpp"

namespace sparse_kvcm::testing {

class ResolveOracle {
 public:
  explicit ResolveOracle(const ResolveInput& input) : input_(input), result_(input) {
    for (std::size_t i = 0; i < input.b(); ++i) launch_row(i);
  }

  [[nodiscard]] const ResolveResult& result() const { return result_; }

 private:
  using Wide = std::int64_t;

  static std::uint32_t packed(std::uint32_t clock, std::uint32_t resident, std::int32_t ordinal) {
    return (clock % 128) * (1u << 25) + resident * (1u << 24) + static_cast<std::uint32_t>(ordinal);
  }

  bool is_inconsistent(const RowState& row) const {
    const Wide n = row.cached_slots, w = row.window_slots, length = row.length;
    const Wide committed = row.committed, begin = row.window_begin, watermark = row.watermark;
    const bool slots_leave_arena =
        row.base < 0 || n < 0 || row.base + n + w > static_cast<Wide>(input_.entries.size());
    return row.lease_id >= static_cast<Wide>(input_.last.size()) || slots_leave_arena || w < 1 ||
           n > 65'535 || (n > 0 && input_.k > n) || length > (1 << 24) - 1 ||
           !(0 <= committed && committed <= length) ||
           !(0 <= watermark && watermark <= committed) || !(0 <= begin && begin <= committed) ||
           length - begin > w || length - committed > input_.max_new_units || (n == 0 && begin > 0);
  }

  void launch_row(std::size_t i) {
    const auto k = static_cast<std::size_t>(input_.k);
    const auto new_units = static_cast<std::size_t>(input_.max_new_units);
    for (std::size_t j = 0; j < k; ++j) result_.slots[i * k + j] = -1;
    for (std::size_t j = 0; j < new_units; ++j) {
      result_.write_slots[i * new_units + j] = input_.no_write_slot;
    }
    result_.miss_counts[i] = result_.hit_counts[i] = 0;
    result_.errors[i] = 0;

    const std::int32_t r = input_.rows[i];
    if (r == -1) return;
    if (r < 0 || r >= static_cast<Wide>(input_.row_states.size()) ||
        input_.row_states[static_cast<std::size_t>(r)].lease_id < 0) {
      result_.batch_error[0] |= kBatchErrorRow;
      return;
    }
    const RowState& row = input_.row_states[static_cast<std::size_t>(r)];
    if (is_inconsistent(row)) {
      result_.errors[i] = kErrorLease;
    } else if (input_.step.open == 0 ||
               result_.last[static_cast<std::size_t>(row.lease_id)] == input_.step.clock) {
      result_.errors[i] = kErrorStale;
    } else {
      seated_row(i, row);
    }
    result_.row_errors[static_cast<std::size_t>(r)] |= result_.errors[i];
  }

  void seated_row(std::size_t i, const RowState& row) {
    std::set<std::int32_t> wanted;
    for (std::int32_t j = 0; j < input_.k; ++j) {
      const std::int32_t ordinal = input_.selected(i, j);
      if (ordinal >= 0 && ordinal < row.window_begin && ordinal < row.watermark) {
        wanted.insert(ordinal);
      }
    }
    const auto slot_of = place(i, row, wanted);
    for (std::int32_t j = 0; j < input_.k; ++j) {
      const std::int32_t ordinal = input_.selected(i, j);
      std::int32_t& slot =
          result_.slots[i * static_cast<std::size_t>(input_.k) + static_cast<std::size_t>(j)];
      if (ordinal == -1) continue;
      if (ordinal < 0 || ordinal >= row.length) {
        result_.errors[i] |= kErrorRange;
      } else if (ordinal >= row.window_begin) {
        slot = row.base + row.cached_slots + ordinal % row.window_slots;
      } else if (ordinal >= row.watermark) {
        result_.errors[i] |= kErrorHole;
      } else {
        slot = slot_of.at(ordinal);
      }
    }
    for (std::int32_t unit = row.committed; unit < row.length; ++unit) {
      result_.write_slots[i * static_cast<std::size_t>(input_.max_new_units) +
                          static_cast<std::size_t>(unit - row.committed)] =
          row.base + row.cached_slots + unit % row.window_slots;
    }
  }

  // Finds hits, evicts for misses, ages the rest. Returns the slot of every wanted ordinal.
  std::map<std::int32_t, std::int32_t> place(std::size_t i, const RowState& row,
                                             const std::set<std::int32_t>& wanted) {
    const Wide clock = input_.step.clock;
    const Wide last = result_.last[static_cast<std::size_t>(row.lease_id)];
    std::map<std::int32_t, std::int32_t> slot_of;
    std::vector<std::tuple<Wide, std::int32_t>> candidates;  // -bucket, slot
    for (std::int32_t slot = row.base; slot < row.base + row.cached_slots; ++slot) {
      std::uint32_t& entry = result_.entries[static_cast<std::size_t>(slot)];
      const Wide stamp = entry / (1u << 25), resident = entry / (1u << 24) % 2;
      const auto ordinal = static_cast<std::int32_t>(entry % (1u << 24));
      if (entry != 0xFFFFFFFFu && wanted.contains(ordinal) && !slot_of.contains(ordinal)) {
        slot_of[ordinal] = slot;
        entry = packed(input_.step.clock, 1, ordinal);
        continue;
      }
      const Wide mod_128 = ((last - stamp) % 128 + 128) % 128;
      const Wide mod_2_32 = ((clock - last) % (Wide{1} << 32) + (Wide{1} << 32)) % (Wide{1} << 32);
      const Wide age = std::min<Wide>(127, mod_128 + mod_2_32);
      const Wide bucket = entry == 0xFFFFFFFFu ? 255 : 2 * age + (1 - resident);
      candidates.emplace_back(-bucket, slot);
      if (entry != 0xFFFFFFFFu && age == 127) {
        entry = packed(input_.step.clock - 127, static_cast<std::uint32_t>(resident), ordinal);
      }
    }
    result_.hit_counts[i] = static_cast<std::int32_t>(slot_of.size());
    evict(i, wanted, candidates, slot_of);
    result_.last[static_cast<std::size_t>(row.lease_id)] = input_.step.clock;
    return slot_of;
  }

  void evict(std::size_t i, const std::set<std::int32_t>& wanted,
             std::vector<std::tuple<Wide, std::int32_t>> candidates,
             std::map<std::int32_t, std::int32_t>& slot_of) {
    std::sort(candidates.begin(), candidates.end());
    candidates.resize(wanted.size() - slot_of.size());
    std::set<std::int32_t> victims;
    for (const auto& [bucket, slot] : candidates) victims.insert(slot);
    auto victim = victims.begin();
    auto cell = i * static_cast<std::size_t>(input_.k);
    for (const std::int32_t ordinal : wanted) {
      if (slot_of.contains(ordinal)) continue;
      result_.entries[static_cast<std::size_t>(*victim)] = packed(input_.step.clock, 0, ordinal);
      result_.miss_ordinals[cell] = ordinal;
      result_.miss_slots[cell++] = slot_of[ordinal] = *victim++;
      ++result_.miss_counts[i];
    }
  }

  const ResolveInput& input_;
  ResolveResult result_;
};

inline ResolveResult expected_resolve(const ResolveInput& input) {
  return ResolveOracle(input).result();
}

}  // namespace sparse_kvcm::testing
