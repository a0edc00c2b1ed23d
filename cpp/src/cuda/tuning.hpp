// Measured choices, as data. NVIDIA H200, PCIe Gen5 x16, 2026-11-29, rows of 576 B;
// SPARSE_ATTENTION_DESIGN.md, "On the GPU", has the sweep.
#pragma once

#include <cstdint>

namespace sparse_kvcm {

// How many host rows fetch keeps in flight. More hide the link's latency, but the wider a stretch
// of host memory they lie in, the more address translations they need at once.
struct FetchTuning {
  std::int32_t max_row_bytes = 0;  // of a unit's host row, padding left out
  std::int32_t in_flight = 0;      // a multiple of 8
};

inline constexpr FetchTuning kFetchTuning[] = {
    {1'280, 448},
    {1 << 30, 320},
};

constexpr std::int32_t rows_in_flight(std::int32_t row_bytes) {
  const FetchTuning* tuning = kFetchTuning;
  while (row_bytes > tuning->max_row_bytes) ++tuning;  // the last has no bound
  return tuning->in_flight;
}

}  // namespace sparse_kvcm
