// The rows of a launch as the CPU operations walk them.
#pragma once

#include <cstdint>

#include "sparse_kvcm/ops.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

// The state of the seat at launch position `i`, or null for padding and for an entry of `rows` that
// names no seat, which is reported.
inline const RowState* find_seat(const ops::LaunchRows& launch, std::int64_t i,
                                 const ops::LaunchErrors& errors) {
  const std::int32_t row = launch.rows[i];
  if (row == kPaddingRow) return nullptr;
  if (row >= 0 && row < launch.num_rows && launch.row_states[row].lease_id >= 0) {
    return &launch.row_states[row];
  }
  if (errors.batch_error != nullptr) *errors.batch_error |= kBatchErrorRow;
  return nullptr;
}

// ORs `bits` into both words of the seat at launch position `i`.
inline void report(const ops::LaunchRows& launch, std::int64_t i, std::uint32_t bits,
                   const ops::LaunchErrors& errors) {
  errors.errors[i] |= bits;
  if (errors.row_errors != nullptr) errors.row_errors[launch.rows[i]] |= bits;
}

}  // namespace sparse_kvcm
