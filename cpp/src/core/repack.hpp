// Packs units into host rows (unit_layout.hpp), from wherever their pieces lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sparse_kvcm/unit_layout.hpp"

namespace sparse_kvcm {

// Where one piece of a host row comes from, for all units: that of unit u of page p lies at
// data + p * page_stride + u * unit_stride.
struct PieceSource {
  const std::byte* data = nullptr;
  std::int64_t unit_stride = 0;
  std::int64_t page_stride = 0;
};

// Writes units [first, first + num_units) of the source to as many consecutive rows from `rows` on.
// `sources` [pieces of the row], in its order. What rounds a row up becomes zero.
// Past the caches; anyone may read when it returns.
// REQUIRES: first, num_units >= 0; units_per_page >= 1; `rows` is aligned to 16 B.
void repack(const HostRowLayout& row, std::span<const PieceSource> sources,
            std::int32_t units_per_page, std::int64_t first, std::int64_t num_units,
            std::byte* rows);

}  // namespace sparse_kvcm
