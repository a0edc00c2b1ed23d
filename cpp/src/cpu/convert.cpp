#include <cstdint>

#include "cpu/cpu_backend.hpp"
#include "cpu/launch.hpp"

namespace sparse_kvcm {
namespace {

using ops::ConvertParams;

bool in_arena(const ConvertParams& params, std::int32_t slot) {
  return slot >= 0 && slot < params.num_slots;
}

std::int64_t kernel_index(const ConvertParams& params, std::int32_t slot) {
  if (!in_arena(params, slot)) return kNoSlot;
  return params.first + slot / params.units_per_page * params.page_stride +
         slot % params.units_per_page * params.unit_stride;
}

// Writes one row of the output. Returns its error bits.
std::uint32_t convert_row(const ConvertParams& params, std::int64_t i) {
  std::uint32_t errors = 0;
  for (std::int64_t cell = i * params.k; cell < (i + 1) * params.k; ++cell) {
    const std::int32_t slot = params.slots[cell];
    const std::int64_t index = kernel_index(params, slot);
    if (params.out32 != nullptr) {
      params.out32[cell] = static_cast<std::int32_t>(index);
    } else {
      params.out64[cell] = index;
    }
    if (slot != kNoSlot && !in_arena(params, slot)) errors |= kErrorLease;
  }
  return errors;
}

// kErrorUncovered if a selected unit of the row has no slot, else 0.
std::uint32_t check_coverage(const ConvertParams& params, std::int64_t i, const RowState& row) {
  const std::int32_t* selection = params.selection + i * params.selection_stride;
  for (std::int64_t j = 0; j < params.k; ++j) {
    const bool selected = selection[j] >= 0 && selection[j] < row.length;
    if (selected && params.slots[i * params.k + j] == kNoSlot) return kErrorUncovered;
  }
  return 0;
}

}  // namespace

void CpuBackend::convert(const ConvertParams& params, Stream) {
  for (std::int64_t i = 0; i < params.b; ++i) {
    const std::uint32_t errors = convert_row(params, i);
    if (params.errors.errors == nullptr) continue;  // given wherever there is a selection
    const RowState* row = nullptr;
    if (params.selection != nullptr) row = find_seat(params.launch, i, params.errors);
    if (row != nullptr) {
      report(params.launch, i, errors | check_coverage(params, i, *row), params.errors);
    } else {
      params.errors.errors[i] |= errors;
    }
  }
}

}  // namespace sparse_kvcm
