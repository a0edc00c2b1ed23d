// Measured choices, as data. NVIDIA H200, PCIe Gen5 x16, 2026-11-29, rows of 576 B;
// SPARSE_ATTENTION_DESIGN.md, "On the GPU", has the sweep.
#pragma once

#include <cstdint>

namespace sparse_kvcm {

// How many host rows fetch keeps in flight. More hide the link's latency, but the wider a stretch
// of host memory they lie in, the more address translations they need at once.
struct FetchTuning {
  std::int32_t max_row_bytes = 0;  // of a unit's host row, padding left out
  std::int32_t dense = 0;          // misses lie closer than kSparseBytes on average
  std::int32_t sparse = 0;
};
inline constexpr std::int64_t kSparseBytes = 128 * 1024;

inline constexpr FetchTuning kFetchTuning[] = {
    {1'280, 320, 208},
    {1 << 30, 320, 320},
};

constexpr FetchTuning fetch_tuning(std::int32_t row_bytes) {
  const FetchTuning* tuning = kFetchTuning;
  while (row_bytes > tuning->max_row_bytes) ++tuning;  // the last has no bound
  return *tuning;
}

}  // namespace sparse_kvcm
