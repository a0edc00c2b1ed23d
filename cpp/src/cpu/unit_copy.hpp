// Where a unit's bytes lie, and copies between the two places.
#pragma once

#include <cstdint>
#include <cstring>

#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm {

inline std::byte* arena_unit(const ops::GroupMemory& memory, const ops::Piece& piece,
                             std::int64_t slot) {
  const std::int64_t page = slot / memory.units_per_page;
  const std::int64_t offset = slot % memory.units_per_page;
  return piece.arena + page * piece.page_bytes + offset * piece.bytes;
}

inline void load_unit(const ops::GroupMemory& memory, std::int64_t host_unit, std::int64_t slot) {
  const std::byte* row = memory.host + host_unit * memory.host_unit_bytes;
  for (const ops::Piece& piece : memory.pieces) {
    std::memcpy(arena_unit(memory, piece, slot), row + piece.host_offset,
                static_cast<std::size_t>(piece.bytes));
  }
}

inline void store_unit(const ops::GroupMemory& memory, std::int64_t slot, std::int64_t host_unit) {
  std::byte* row = memory.host + host_unit * memory.host_unit_bytes;
  for (const ops::Piece& piece : memory.pieces) {
    std::memcpy(row + piece.host_offset, arena_unit(memory, piece, slot),
                static_cast<std::size_t>(piece.bytes));
  }
}

}  // namespace sparse_kvcm
