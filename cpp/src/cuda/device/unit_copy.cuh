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
#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm::device {

// A read of host memory that is used once: no place in L1.
__device__ inline uint4 read_host(const uint4* source) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(source));
  return word;
}
__device__ inline uint2 read_host(const uint2* source) {
  uint2 word;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(word.x), "=r"(word.y)
               : "l"(source));
  return word;
}
__device__ inline unsigned read_host(const unsigned* source) {
  unsigned word;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(source));
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

// Moves the bytes [begin, end) of a host row in words, by read(at) and write(at, word). Reads
// kAhead words before it writes them: the link's latency is long. Between the two it calls
// meanwhile().
template <class Word, int kAhead, class Read, class Write, class Meanwhile>
__device__ inline void copy_stretch(std::int32_t begin, std::int32_t end, const Read& read,
                                    const Write& write, const Meanwhile& meanwhile) {
  constexpr std::int32_t kStep = kWarpSize * static_cast<std::int32_t>(sizeof(Word));
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % kWarpSize;
  const std::int32_t mine = begin + lane * static_cast<std::int32_t>(sizeof(Word));
  for (std::int32_t first = begin; first < end; first += kAhead * kStep) {
    const std::int32_t at = mine + (first - begin);
    Word words[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * kStep < end) words[a] = read(at + a * kStep);
    }
    meanwhile();
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (at + a * kStep < end) write(at + a * kStep, words[a]);
    }
  }
}

// One unit, all pieces. `slot` and `host_unit` are in range and the same for the whole warp, which
// calls meanwhile() together, once or more, while it waits for its reads.
template <ops::MoveDirection kDirection, class Meanwhile>
__device__ inline void copy_unit(const CopyGroup& group, const CopyPiece* pieces,
                                 std::int64_t host_unit, std::int32_t slot,
                                 const Meanwhile& meanwhile) {
  std::byte* row = group.host + host_unit * group.host_unit_bytes;
  const std::int32_t page = slot / group.units_per_page;
  const std::int32_t offset = slot % group.units_per_page;
  int piece = 0;
  const auto stretch = [&]<class Word, int kAhead>(std::int32_t begin, std::int32_t end) {
    const auto host = [&](std::int32_t at) { return reinterpret_cast<Word*>(row + at); };
    const auto arena = [&](std::int32_t at) {
      return reinterpret_cast<Word*>(arena_place(pieces, piece, at, page, offset));
    };
    if constexpr (kDirection == ops::MoveDirection::kHostToArena) {
      // Streaming stores: dirty lines that linger in L2 slow the reads of host memory behind them,
      // by a third for rows of 576 B (SPARSE_ATTENTION_DESIGN.md, "On the GPU").
      copy_stretch<Word, kAhead>(
          begin, end, [&](std::int32_t at) { return read_host(host(at)); },
          [&](std::int32_t at, const Word& word) { __stcs(arena(at), word); }, meanwhile);
    } else {
      copy_stretch<Word, kAhead>(
          begin, end, [&](std::int32_t at) { return *arena(at); },
          [&](std::int32_t at, const Word& word) { *host(at) = word; }, meanwhile);
    }
  };
  stretch.template operator()<uint4, 5>(0, group.end16);
  stretch.template operator()<uint2, 2>(group.end16, group.end8);
  stretch.template operator()<unsigned, 2>(group.end8, group.end4);
}

}  // namespace sparse_kvcm::device
