// Shared memory of a resolve block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse_kvcm/entry.hpp"

namespace sparse_kvcm::device {

// slot_of_rank of a rank that no entry holds, above every slot so that atomicMin replaces it. Later
// the complement of its miss index, a negative number, takes its place.
inline constexpr std::int32_t kUnplaced = 0x7FFFFFFF;

struct RowMemory {
  std::int32_t* slot_of_rank;    // [k], within the lease
  std::uint16_t* victim_slot;    // [k], of each miss, within the lease
  std::uint32_t* histogram;      // [kNumBuckets]
  std::uint32_t* index_totals;   // [32], of warps; scratch of the index
  std::uint32_t* miss_totals;    // [32]
  std::uint32_t* victim_totals;  // [32]
  std::uint32_t* threshold;      // [2]
  std::byte* index;              // 16-byte aligned

  // In bytes, without the index.
  __host__ __device__ static std::int64_t bytes(std::int32_t k) {
    return std::int64_t{padded(k)} * 6 + kWords * 4;
  }
  __device__ RowMemory(std::byte* memory, std::int32_t k) {
    slot_of_rank = reinterpret_cast<std::int32_t*>(memory);
    victim_slot = reinterpret_cast<std::uint16_t*>(slot_of_rank + padded(k));
    histogram = reinterpret_cast<std::uint32_t*>(victim_slot + padded(k));
    index_totals = histogram + kNumBuckets;
    miss_totals = index_totals + 32;
    victim_totals = miss_totals + 32;
    threshold = victim_totals + 32;
    index = reinterpret_cast<std::byte*>(threshold + 4);
  }
  template <int kThreads>
  __device__ void clear(std::int32_t k) const {
    auto* quads = reinterpret_cast<int4*>(slot_of_rank);
    for (int q = threadIdx.x; q < padded(k) / 4; q += kThreads) {
      quads[q] = {kUnplaced, kUnplaced, kUnplaced, kUnplaced};
    }
    for (int b = threadIdx.x; b < kNumBuckets; b += kThreads) histogram[b] = 0;
  }

 private:
  static constexpr std::int32_t kWords = kNumBuckets + 3 * 32 + 4;
  __host__ __device__ static std::int32_t padded(std::int32_t k) { return (k + 7) / 8 * 8; }
};

}  // namespace sparse_kvcm::device
