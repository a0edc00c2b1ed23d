// Measured choices, as data. `scripts/bench --tune` sweeps them on the GPU at hand and writes
// fetch_tuning.inc.
#pragma once

#include <cstdint>

namespace sparse_kvcm {

// How many host rows fetch keeps in flight. More hide the link's latency, but the wider a stretch
// of host memory they lie in, the more address translations they need at once. Multiples of 8.
struct FetchTuning {
  std::int32_t max_row_bytes = 0;  // of a unit's host row, padding left out
  std::int32_t sparse_bytes = 0;   // misses further apart than this on average are sparse
  std::int32_t dense = 0;          // rows in flight where misses are dense
  std::int32_t sparse = 0;         // and where they are sparse
};

// By rising max_row_bytes; the last has no bound.
inline constexpr FetchTuning kFetchTuning[] = {
#include "cuda/fetch_tuning.inc"
};

constexpr FetchTuning fetch_tuning(std::int32_t row_bytes) {
  const FetchTuning* tuning = kFetchTuning;
  while (row_bytes > tuning->max_row_bytes) ++tuning;
  return *tuning;
}

}  // namespace sparse_kvcm
