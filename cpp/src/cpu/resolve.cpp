// One bit per unit marks the distinct ordinals that a selection wants from the cache. One scan of
// the entries takes the hits out of that set and sorts the other entries into buckets; what is left
// of the set missed. The bucket at which the victims run out, and how many it gives, then tell
// victims from survivors. A table by ordinal holds the slot of every wanted unit.
//
// Bits are walked by ascending ordinal and entries by ascending slot, so ties break as the contract
// asks and the order of the selection leaves no trace.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "core/row_state.hpp"
#include "cpu/cpu_backend.hpp"
#include "cpu/launch.hpp"
#include "sparse_kvcm/entry.hpp"

namespace sparse_kvcm {
namespace {

using ops::ResolveParams;

// A set of ordinals, walked in ascending order.
class OrdinalSet {
 public:
  // Empties the set and admits ordinals in [0, limit).
  void reset(std::int32_t limit) {
    limit_ = limit;
    size_ = 0;
    words_.assign(static_cast<std::size_t>(limit) / 64 + 1, 0);
  }

  void insert(std::int32_t ordinal) {
    size_ += (word(ordinal) & bit(ordinal)) == 0 ? 1 : 0;
    word(ordinal) |= bit(ordinal);
  }

  // Removes `ordinal`, >= 0. Returns whether it was there.
  bool take(std::int32_t ordinal) {
    if (ordinal >= limit_ || (word(ordinal) & bit(ordinal)) == 0) return false;
    word(ordinal) ^= bit(ordinal);
    --size_;
    return true;
  }

  [[nodiscard]] std::int32_t size() const { return size_; }

  template <class Visit>
  void for_each(Visit visit) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t rest = words_[i]; rest != 0; rest &= rest - 1) {
        visit(static_cast<std::int32_t>(i * 64) + std::countr_zero(rest));
      }
    }
  }

 private:
  std::uint64_t& word(std::int32_t ordinal) {
    return words_[static_cast<std::uint32_t>(ordinal) / 64];
  }
  static std::uint64_t bit(std::int32_t ordinal) {
    return std::uint64_t{1} << (static_cast<std::uint32_t>(ordinal) % 64);
  }

  std::int32_t limit_ = 0;
  std::int32_t size_ = 0;
  std::vector<std::uint64_t> words_;
};

// Memory that one launch uses for row after row.
struct Scratch {
  OrdinalSet wanted;                          // after the scan: the misses
  std::vector<std::int32_t> slot_of_ordinal;  // of wanted units
  std::vector<std::int16_t> bucket_of_entry;  // [N], kSelected or the entry's bucket
  std::array<std::int32_t, kNumBuckets> histogram{};
};
constexpr std::int16_t kSelected = -1;
constexpr std::int32_t kOldestBucket = 2 * kMaxAge;

// One row of a launch, with its clocks.
struct RowLaunch {
  const ResolveParams& params;
  std::int64_t i;  // launch position
  const RowState& state;
  std::uint32_t last;
  std::uint32_t clock;

  // Ordinals below it that are in the cache or can be fetched into it.
  [[nodiscard]] std::int32_t cached_end() const {
    return std::min(state.watermark, state.window_begin);
  }
  [[nodiscard]] const std::int32_t* selection() const {
    return params.selection + i * params.selection_stride;
  }
};

void collect_wanted(const RowLaunch& row, Scratch& scratch) {
  const std::int32_t* selection = row.selection();
  const auto cached_end = static_cast<std::size_t>(row.cached_end());
  scratch.wanted.reset(row.cached_end());
  if (scratch.slot_of_ordinal.size() < cached_end) scratch.slot_of_ordinal.resize(cached_end);
  for (std::int32_t j = 0; j < row.params.k; ++j) {
    if (selection[j] >= 0 && selection[j] < row.cached_end()) scratch.wanted.insert(selection[j]);
  }
}

// Finds and restamps the hits, ages the rest. Returns the number of hits.
std::int32_t scan_entries(const RowLaunch& row, Scratch& scratch) {
  const std::uint32_t last = row.last;  // a copy: the stores below are of its type
  const std::uint32_t clock = row.clock;
  const auto cached_slots = static_cast<std::size_t>(row.state.cached_slots);
  Entry* entries = row.params.entries + row.state.base;
  std::int32_t* slot_of_ordinal = scratch.slot_of_ordinal.data();
  scratch.bucket_of_entry.resize(cached_slots);
  scratch.histogram.fill(0);
  std::int32_t hits = 0;
  for (std::size_t n = 0; n < cached_slots; ++n) {
    const Entry entry = entries[n];
    const std::int32_t ordinal = entry_ordinal(entry);
    if (scratch.wanted.take(ordinal)) {  // never true of an empty entry
      slot_of_ordinal[ordinal] = row.state.base + static_cast<std::int32_t>(n);
      entries[n] = pack_entry(clock, true, ordinal);
      scratch.bucket_of_entry[n] = kSelected;
      ++hits;
      continue;
    }
    const std::int32_t bucket = entry_bucket(entry, last, clock);
    scratch.bucket_of_entry[n] = static_cast<std::int16_t>(bucket);
    ++scratch.histogram[static_cast<std::size_t>(bucket)];
    if (bucket >= kOldestBucket && entry != kEmptyEntry) {
      entries[n] = pack_entry(clock - kMaxAge, entry_resident(entry), ordinal);
    }
  }
  return hits;
}

// Gives the misses their victims' slots and writes the miss list.
void place_misses(const RowLaunch& row, Scratch& scratch) {
  std::int32_t bucket = kNumBuckets - 1;             // the last that gives victims
  std::int32_t from_bucket = scratch.wanted.size();  // how many victims it gives
  while (from_bucket > scratch.histogram[static_cast<std::size_t>(bucket)]) {
    from_bucket -= scratch.histogram[static_cast<std::size_t>(bucket)];
    --bucket;
  }

  Entry* entries = row.params.entries + row.state.base;
  std::int32_t* miss_ordinals = row.params.miss_ordinals + row.i * row.params.k;
  std::int32_t* miss_slots = row.params.miss_slots + row.i * row.params.k;
  std::int32_t n = 0;
  scratch.wanted.for_each([&](std::int32_t ordinal) {
    const auto is_victim = [&] {
      const std::int32_t candidate = scratch.bucket_of_entry[static_cast<std::size_t>(n)];
      return candidate > bucket || (candidate == bucket && from_bucket-- > 0);
    };
    while (!is_victim()) ++n;
    entries[n] = pack_entry(row.clock, false, ordinal);
    scratch.slot_of_ordinal[static_cast<std::size_t>(ordinal)] = row.state.base + n;
    *miss_ordinals++ = ordinal;
    *miss_slots++ = row.state.base + n;
    ++n;
  });
}

// Writes the slots of the selection. Returns the error bits of its ordinals.
std::uint32_t write_selected_slots(const RowLaunch& row, const Scratch& scratch) {
  const std::int32_t* selection = row.selection();
  std::int32_t* slots = row.params.slots + row.i * row.params.k;
  std::uint32_t errors = 0;
  for (std::int32_t j = 0; j < row.params.k; ++j) {
    const std::int32_t ordinal = selection[j];
    slots[j] = kNoSlot;
    if (ordinal == -1) continue;
    if (ordinal < 0 || ordinal >= row.state.length) {
      errors |= kErrorRange;
    } else if (ordinal >= row.state.window_begin) {
      slots[j] = window_slot(row.state, ordinal);
    } else if (ordinal >= row.state.watermark) {
      errors |= kErrorHole;
    } else {
      slots[j] = scratch.slot_of_ordinal[static_cast<std::size_t>(ordinal)];
    }
  }
  return errors;
}

// What every row has: no unit anywhere, no error.
void write_nothing(const ResolveParams& params, std::int64_t i) {
  std::fill_n(params.slots + i * params.k, params.k, kNoSlot);
  if (params.max_new_units > 0) {
    std::fill_n(params.write_slots + i * params.max_new_units, params.max_new_units,
                params.no_write_slot);
  }
  params.miss_counts[i] = 0;
  params.hit_counts[i] = 0;
  params.errors.errors[i] = 0;
}

void resolve_row(const ResolveParams& params, std::int64_t i, Scratch& scratch) {
  write_nothing(params, i);
  const RowState* seat = find_seat(params.launch, i, params.errors);
  if (seat == nullptr) return;
  const RowState state = *seat;  // once: what was checked is what is followed
  if (state.lease_id < 0 || !row_is_consistent(state, params)) {
    report(params.launch, i, kErrorLease, params.errors);
    return;
  }
  std::uint32_t& last = params.last[state.lease_id];
  if (params.step->open == 0 || last == params.step->clock) {
    report(params.launch, i, kErrorStale, params.errors);
    return;
  }

  const RowLaunch row{params, i, state, last, params.step->clock};
  collect_wanted(row, scratch);
  const std::int32_t hits = scan_entries(row, scratch);
  place_misses(row, scratch);
  last = row.clock;

  report(params.launch, i, write_selected_slots(row, scratch), params.errors);
  for (std::int32_t ordinal = state.committed; ordinal < state.length; ++ordinal) {
    params.write_slots[i * params.max_new_units + ordinal - state.committed] =
        window_slot(state, ordinal);
  }
  params.hit_counts[i] = hits;
  params.miss_counts[i] = scratch.wanted.size();
}

}  // namespace

void CpuBackend::resolve(const ResolveParams& params, Stream) {
  Scratch scratch;
  for (std::int64_t i = 0; i < params.launch.b; ++i) resolve_row(params, i, scratch);
}

}  // namespace sparse_kvcm
