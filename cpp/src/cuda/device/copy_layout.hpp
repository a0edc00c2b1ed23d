// What copy kernels take as parameters instead of ops::GroupMemory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparse_kvcm::device {

// ops::Piece with what a lane needs at hand.
struct CopyPiece {
  std::byte* arena = nullptr;  // first byte of page 0
  std::int64_t page_bytes = 0;
  std::int32_t bytes = 0;
  std::int32_t host_begin = 0;
};

// A group as kernels read it. `pieces` lie in constant or shared memory.
struct CopyGroup {
  std::byte* host = nullptr;
  std::int64_t host_unit_bytes = 0;
  std::int32_t units_per_page = 1;
  std::int32_t first_piece = 0;
  std::int32_t end16 = 0;  // bytes of the row that move in 16-byte words
  std::int32_t end8 = 0;   // ... in 8-byte words, behind those
  std::int32_t end4 = 0;   // ... in 4-byte words: the row without its padding
};

}  // namespace sparse_kvcm::device
