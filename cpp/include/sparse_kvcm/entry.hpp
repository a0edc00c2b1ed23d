// The packed word that describes one cached slot.
//
//   bits 31-25  stamp: the clock, mod 128, of the step that last selected the unit
//   bit  24     resident: the unit was already in the slot at that step
//   bits 23-0   ordinal
//
// 0xFFFFFFFF is the empty entry. It is never restamped and never matches an ordinal.
// Source: SPARSE_ATTENTION_DESIGN.md, "resolve".
#pragma once

#include <cstdint>

namespace sparse_kvcm {

using Entry = std::uint32_t;

inline constexpr Entry kEmptyEntry = 0xFFFFFFFFu;
inline constexpr std::uint32_t kStampMask = 127;
inline constexpr std::uint32_t kOrdinalMask = 0x00FFFFFFu;
inline constexpr std::uint32_t kMaxAge = 127;
inline constexpr std::int32_t kNumBuckets = 256;

// One entry, unpacked. `empty` entries have stamp 0, resident false and ordinal -1.
struct DecodedEntry {
  bool empty = true;
  std::uint32_t stamp = 0;
  bool resident = false;
  std::int32_t ordinal = -1;
  friend bool operator==(const DecodedEntry&, const DecodedEntry&) = default;
};

constexpr Entry pack_entry(std::uint32_t clock, bool resident, std::int32_t ordinal) {
  return ((clock & kStampMask) << 25) | (static_cast<Entry>(resident) << 24) |
         (static_cast<Entry>(ordinal) & kOrdinalMask);
}

constexpr std::uint32_t entry_stamp(Entry entry) { return entry >> 25; }
constexpr bool entry_resident(Entry entry) { return ((entry >> 24) & 1u) != 0; }
constexpr std::int32_t entry_ordinal(Entry entry) {
  return static_cast<std::int32_t>(entry & kOrdinalMask);
}

constexpr DecodedEntry decode_entry(Entry entry) {
  if (entry == kEmptyEntry) return {};
  return {false, entry_stamp(entry), entry_resident(entry), entry_ordinal(entry)};
}

// No std::min: it would take the constant's address, which device code cannot.
constexpr std::uint32_t saturated_age(std::uint32_t steps) {
  return steps < kMaxAge ? steps : kMaxAge;
}

// Steps since the entry was last selected, saturated at 127. `last` is the clock of the lease's
// previous resolve, `clock` that of this one; both wrap at 2^32.
constexpr std::uint32_t entry_age(Entry entry, std::uint32_t last, std::uint32_t clock) {
  const std::uint32_t before_last = (last - entry_stamp(entry)) & kStampMask;
  return saturated_age(before_last + saturated_age(clock - last));
}

// Staleness of an unselected entry, 0 (used just now, resident) to 255 (empty, or the oldest age
// and never used again). Victims are taken from the highest bucket down.
constexpr std::int32_t entry_bucket(Entry entry, std::uint32_t last, std::uint32_t clock) {
  if (entry == kEmptyEntry) return kNumBuckets - 1;
  return static_cast<std::int32_t>(2 * entry_age(entry, last, clock)) +
         (entry_resident(entry) ? 0 : 1);
}

}  // namespace sparse_kvcm
