// Copies of one unit between a host row and the arena, by one warp.
//
// A host row lies in up to three stretches of falling alignment (unit_layout.hpp): what can move in
// 16-byte words, then in 8, then in 4. Within a stretch lane l takes words l, l + 32, ...; the
// piece that a word belongs to only moves forward, so each lane keeps its own place in the list.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/block_scan.cuh"
#include "cuda/device/copy_layout.hpp"

namespace sparse_kvcm::device {

// A read of host memory that is used once: no place in L1, read-only path.
__device__ inline uint4 read_host(const uint4* source) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(source));
  return word;
}
__device__ inline uint2 read_host(const uint2* source) {
  uint2 word;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(word.x), "=r"(word.y)
               : "l"(source));
  return word;
}
__device__ inline unsigned read_host(const unsigned* source) {
  unsigned word;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(source));
  return word;
}

// Where byte `at` of a unit's host row lies in the arena. `piece` is the lane's place in the list.
__device__ inline std::byte* arena_place(const CopyPiece* pieces, int& piece, std::int32_t at,
                                         std::int32_t page, std::int32_t offset) {
  while (at >= pieces[piece].host_begin + pieces[piece].bytes) ++piece;
  const CopyPiece& found = pieces[piece];
  return found.arena + page * found.page_bytes + static_cast<std::int64_t>(offset) * found.bytes +
         (at - found.host_begin);
}

// Words [begin, end) bytes of the row, host to arena. Reads kAhead words before it stores them: the
// link's latency is long, and a warp has nothing else to do.
template <class Word, int kAhead>
__device__ inline void load_stretch(const CopyPiece* pieces, const std::byte* row,
                                    std::int32_t begin, std::int32_t end, std::int32_t page,
                                    std::int32_t offset, int& piece) {
  constexpr std::int32_t kStep = kWarpSize * static_cast<std::int32_t>(sizeof(Word));
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % kWarpSize;
  for (std::int32_t at = begin + lane * static_cast<std::int32_t>(sizeof(Word)); at < end;
       at += kAhead * kStep) {
    Word words[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * kStep < end) {
        words[a] = read_host(reinterpret_cast<const Word*>(row + at + a * kStep));
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * kStep < end) {
        *reinterpret_cast<Word*>(arena_place(pieces, piece, at + a * kStep, page, offset)) =
            words[a];
      }
    }
  }
}

template <class Word, int kAhead>
__device__ inline void store_stretch(const CopyPiece* pieces, std::byte* row, std::int32_t begin,
                                     std::int32_t end, std::int32_t page, std::int32_t offset,
                                     int& piece) {
  constexpr std::int32_t kStep = kWarpSize * static_cast<std::int32_t>(sizeof(Word));
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % kWarpSize;
  for (std::int32_t at = begin + lane * static_cast<std::int32_t>(sizeof(Word)); at < end;
       at += kAhead * kStep) {
    Word words[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * kStep < end) {
        words[a] = *reinterpret_cast<const Word*>(
            arena_place(pieces, piece, at + a * kStep, page, offset));
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * kStep < end) *reinterpret_cast<Word*>(row + at + a * kStep) = words[a];
    }
  }
}

// Host history to arena. `slot` and `host_unit` are in range and the same for the whole warp.
__device__ inline void load_unit(const CopyGroup& group, const CopyPiece* pieces,
                                 std::int64_t host_unit, std::int32_t slot) {
  const std::byte* row = group.host + host_unit * group.host_unit_bytes;
  const std::int32_t page = slot / group.units_per_page;
  const std::int32_t offset = slot % group.units_per_page;
  int piece = 0;
  load_stretch<uint4, 5>(pieces, row, 0, group.end16, page, offset, piece);
  load_stretch<uint2, 2>(pieces, row, group.end16, group.end8, page, offset, piece);
  load_stretch<unsigned, 2>(pieces, row, group.end8, group.end4, page, offset, piece);
}

// Arena to host history.
__device__ inline void store_unit(const CopyGroup& group, const CopyPiece* pieces,
                                  std::int32_t slot, std::int64_t host_unit) {
  std::byte* row = group.host + host_unit * group.host_unit_bytes;
  const std::int32_t page = slot / group.units_per_page;
  const std::int32_t offset = slot % group.units_per_page;
  int piece = 0;
  store_stretch<uint4, 5>(pieces, row, 0, group.end16, page, offset, piece);
  store_stretch<uint2, 2>(pieces, row, group.end16, group.end8, page, offset, piece);
  store_stretch<unsigned, 2>(pieces, row, group.end8, group.end4, page, offset, piece);
}

}  // namespace sparse_kvcm::device
