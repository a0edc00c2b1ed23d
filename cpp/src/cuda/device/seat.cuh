// The rows of a launch and their error words as kernels see them.
#pragma once

#include <cstdint>

#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm::device {

inline constexpr std::int32_t kNoSeat = -2;  // neither a seated row nor padding

// The seat of one entry of `rows`: its index, kPaddingRow or kNoSeat.
__device__ inline std::int32_t find_seat(std::int32_t row, const RowState* row_states,
                                         std::int32_t num_rows) {
  if (row == kPaddingRow) return kPaddingRow;
  return row >= 0 && row < num_rows && row_states[row].lease_id >= 0 ? row : kNoSeat;
}

// ORs `bits` into an error word, which may be absent. Any thread that sees a fault calls it.
__device__ inline void raise(std::uint32_t* word, std::uint32_t bits) {
  if (word != nullptr && bits != 0) atomicOr(word, bits);
}

}  // namespace sparse_kvcm::device
