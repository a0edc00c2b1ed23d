#include "cuda/copy_group.hpp"

#include <algorithm>
#include <numeric>

namespace sparse_kvcm {
namespace {

// The widest word, 16, 8 or 4 bytes, that divides all of a piece's addresses. Offsets and sizes are
// multiples of 4 (ops_check).
std::int64_t word_bytes(const ops::GroupMemory& memory, const ops::Piece& piece) {
  std::int64_t common = std::gcd(std::int64_t{16}, std::int64_t{piece.bytes});
  common = std::gcd(common, piece.page_bytes);
  common = std::gcd(common, std::int64_t{piece.host_offset});
  common = std::gcd(common, memory.host_unit_bytes);
  common =
      std::gcd(common, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(piece.arena)));
  return std::gcd(common, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory.host)));
}

}  // namespace

device::CopyGroup make_copy_group(const ops::GroupMemory& memory, device::CopyPiece* pieces,
                                  std::int32_t first_piece) {
  device::CopyGroup group;
  group.host = memory.host;
  group.host_unit_bytes = memory.host_unit_bytes;
  group.units_per_page = memory.units_per_page;
  group.first_piece = first_piece;
  std::int64_t width = 16;
  for (const ops::Piece& piece : memory.pieces) {
    *pieces++ = {piece.arena, piece.page_bytes, piece.bytes, piece.host_offset};
    width = std::min(width, word_bytes(memory, piece));
    const std::int32_t end = piece.host_offset + piece.bytes;
    if (width == 16) group.end16 = end;
    if (width >= 8) group.end8 = end;
    group.end4 = end;
  }
  return group;
}

}  // namespace sparse_kvcm
