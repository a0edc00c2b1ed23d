#include <algorithm>
#include <cstdint>

#include "cpu/cpu_backend.hpp"
#include "cpu/launch.hpp"
#include "cpu/unit_copy.hpp"

namespace sparse_kvcm {
namespace {

using ops::FetchParams;

// Copies one miss of a seated row. Returns the error bit of a miss that cannot be copied.
std::uint32_t fetch_unit(const FetchParams& params, std::int32_t row, std::int32_t ordinal,
                         std::int32_t slot) {
  const ops::GroupMemory& memory = params.memory;
  if (ordinal < 0) return kErrorRange;
  if (ordinal >= params.launch.row_states[row].watermark) return kErrorHole;
  if (slot < 0 || slot >= memory.num_slots) return kErrorLease;
  const std::int64_t column = ordinal / memory.units_per_page;
  if (column >= params.max_pages) return kErrorPage;
  const std::int64_t page = params.page_table[row * params.max_pages + column];
  if (page < 0 || page >= memory.num_host_pages) return kErrorPage;
  load_unit(memory, page * memory.units_per_page + ordinal % memory.units_per_page, slot);
  return 0;
}

}  // namespace

void CpuBackend::fetch(const FetchParams& params, Stream) {
  for (std::int64_t i = 0; i < params.launch.b; ++i) {
    if (find_seat(params.launch, i, params.errors) == nullptr) continue;
    if (params.step != nullptr && params.step->open == 0) {
      report(params.launch, i, kErrorStale, params.errors);
      continue;
    }
    const std::int32_t row = params.launch.rows[i];
    const std::int32_t count = std::clamp(params.miss_counts[i], 0, params.k);
    std::uint32_t errors = 0;
    for (std::int64_t m = i * params.k; m < i * params.k + count; ++m) {
      errors |= fetch_unit(params, row, params.miss_ordinals[m], params.miss_slots[m]);
    }
    report(params.launch, i, errors, params.errors);
  }
}

}  // namespace sparse_kvcm
