// Sums over the threads of a block in two halves, so that one barrier of the caller serves several
// scans: before it each warp leaves its total, after it every thread reads the totals below it.
#pragma once

#include <cstdint>

namespace sparse_kvcm::device {

inline constexpr std::uint32_t kFullWarp = 0xFFFFFFFFu;
inline constexpr int kWarpSize = 32;

// Inclusive sum over the lanes of a warp.
__device__ inline std::uint32_t warp_sum_up_to(std::uint32_t value) {
  const unsigned lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (unsigned offset = 1; offset < kWarpSize; offset *= 2) {
    const std::uint32_t other = __shfl_up_sync(kFullWarp, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// First half: leaves the warp's total in `warp_totals` and returns the sum of lower lanes.
__device__ inline std::uint32_t begin_block_scan(std::uint32_t value, std::uint32_t* warp_totals) {
  const std::uint32_t up_to = warp_sum_up_to(value);
  if (threadIdx.x % kWarpSize == kWarpSize - 1) warp_totals[threadIdx.x / kWarpSize] = up_to;
  return up_to - value;
}

struct BlockSums {
  std::uint32_t below = 0;  // of all threads below this one
  std::uint32_t total = 0;  // of the block
};

// Second half, behind a barrier. `below_in_warp` is what the first half returned.
template <int kThreads>
__device__ inline BlockSums end_block_scan(std::uint32_t below_in_warp,
                                           const std::uint32_t* warp_totals) {
  constexpr unsigned kWarps = kThreads / kWarpSize;
  const unsigned lane = threadIdx.x % kWarpSize;
  const std::uint32_t total_of_lane = lane < kWarps ? warp_totals[lane] : 0;
  const bool is_below = lane < threadIdx.x / kWarpSize;
  const std::uint32_t warps_below = __reduce_add_sync(kFullWarp, is_below ? total_of_lane : 0);
  return {warps_below + below_in_warp, __reduce_add_sync(kFullWarp, total_of_lane)};
}

}  // namespace sparse_kvcm::device
