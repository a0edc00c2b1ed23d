// What every backend must ask of a row before it follows the row's numbers into memory.
//
// Invariant that a consistent row gives: the slots [base, base + N + W) lie in the arena, a cached
// ordinal fits an entry, and the window [window_begin, length) fits its ring without overlap.
#pragma once

#include <cstdint>

#include "sparse_kvcm/ops.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

// `row` is seated: lease_id >= 0. Sums in 64 bits, since any field may hold anything.
constexpr bool row_is_consistent(const RowState& row, const ops::ResolveParams& params) {
  const std::int64_t end = std::int64_t{row.base} + row.cached_slots + row.window_slots;
  const bool lease_fits =
      row.lease_id < params.num_leases && row.base >= 0 && row.cached_slots >= 0 &&
      row.window_slots >= 1 && end <= params.num_slots && row.cached_slots <= kMaxCachedSlots &&
      (row.cached_slots == 0 ? row.window_begin == 0 : params.k <= row.cached_slots);
  const bool lengths_fit =
      row.length <= kMaxUnits && 0 <= row.committed && row.committed <= row.length &&
      0 <= row.watermark && row.watermark <= row.committed && 0 <= row.window_begin &&
      row.window_begin <= row.committed && row.length - row.window_begin <= row.window_slots &&
      row.length - row.committed <= params.max_new_units;
  return lease_fits && lengths_fit;
}

// The slot of a window ordinal in a consistent row.
constexpr std::int32_t window_slot(const RowState& row, std::int32_t ordinal) {
  return row.base + row.cached_slots + ordinal % row.window_slots;
}

}  // namespace sparse_kvcm
