// Measured choices, as data.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

namespace sparse_kvcm {

// How many host rows fetch keeps in flight: more hide the link's latency, but the wider a stretch
// of host memory they lie in, the more address translations they need at once.
struct FetchTuning {
  std::int32_t max_row_bytes = 0;  // of a unit's host row, padding left out
  std::int32_t in_flight = 0;      // a multiple of 8
};

// By rising max_row_bytes; the last has no bound.
inline constexpr FetchTuning kFetchTuning[] = {
#include "cuda/fetch_tuning.inc"
};

constexpr bool is_valid(std::span<const FetchTuning> table) {
  std::int32_t below = 0;
  for (const FetchTuning& row : table) {
    if (row.max_row_bytes <= below || row.in_flight < 8 || row.in_flight % 8 != 0) return false;
    below = row.max_row_bytes;
  }
  return below == std::numeric_limits<std::int32_t>::max();
}
static_assert(is_valid(kFetchTuning));

constexpr std::int32_t rows_in_flight(std::int32_t row_bytes) {
  const FetchTuning* tuning = kFetchTuning;
  while (row_bytes > tuning->max_row_bytes) ++tuning;
  return tuning->in_flight;
}

}  // namespace sparse_kvcm
