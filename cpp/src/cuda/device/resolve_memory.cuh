// Shared memory of a resolve block: the head, then what starts as zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/row_head.cuh"
#include "cuda/device/victims.cuh"
#include "sparse_kvcm/entry.hpp"

namespace sparse_kvcm::device {

struct RowMemory {
  RowHead* head;
  std::uint32_t* histogram;      // [kNumBuckets]
  std::uint32_t* index_totals;   // [32], of warps; scratch of the index
  std::uint32_t* miss_totals;    // [32]
  std::uint32_t* victim_totals;  // [32]
  Threshold* threshold;
  std::uint16_t* victim_slot;  // [k], of each miss, within the lease
  std::byte* index;            // the index, then its misses; 16-byte aligned

  // In bytes, without the index; a multiple of 16.
  __host__ __device__ static std::uint32_t bytes(std::int32_t k) {
    return static_cast<std::uint32_t>(sizeof(RowHead)) + kWords * 4 +
           (static_cast<std::uint32_t>(k) + 7) / 8 * 16;
  }
  __device__ RowMemory(std::byte* memory, std::int32_t k) {
    head = reinterpret_cast<RowHead*>(memory);
    histogram = reinterpret_cast<std::uint32_t*>(head + 1);
    index_totals = histogram + kNumBuckets;
    miss_totals = index_totals + 32;
    victim_totals = miss_totals + 32;
    threshold = reinterpret_cast<Threshold*>(victim_totals + 32);
    victim_slot = reinterpret_cast<std::uint16_t*>(victim_totals + 32 + 4);
    index = memory + bytes(k);
  }

  // Zeroes all but the head; `bytes` is the size of the block's shared memory. Of all warps but the
  // first, which reads the head meanwhile.
  template <int kThreads>
  __device__ void clear(std::uint32_t bytes) const {
    auto* quads = reinterpret_cast<uint4*>(histogram);
    const auto num_quads = (bytes - static_cast<std::uint32_t>(sizeof(RowHead))) / 16;
#pragma unroll 4
    for (std::uint32_t q = threadIdx.x - kWarpSize; q < num_quads; q += kThreads - kWarpSize) {
      quads[q] = {0, 0, 0, 0};
    }
  }

 private:
  static constexpr std::uint32_t kWords = kNumBuckets + 3 * 32 + 4;
};

}  // namespace sparse_kvcm::device
