// Where the victims run out: the histogram of buckets, read from the stalest down.
#pragma once

#include <cstdint>

#include "cuda/device/block_scan.cuh"
#include "sparse_kvcm/entry.hpp"

namespace sparse_kvcm::device {

// Bucket of a threshold that the counted entries do not reach.
inline constexpr std::uint32_t kNoThreshold = 0xFFFFFFFFu;

// Which entries are victims: all of the buckets above `bucket`, and the first `count` of `bucket`.
struct Threshold {
  std::uint32_t bucket;
  std::uint32_t count;
};

// Called by one warp; writes `threshold`. Lane l holds the eight buckets from 255 - 8 l down.
__device__ inline void find_threshold(const std::uint32_t* histogram, std::uint32_t num_victims,
                                      Threshold& threshold) {
  constexpr int kPerLane = kNumBuckets / kWarpSize;
  static_assert(kPerLane == 8);
  const unsigned lane = threadIdx.x % kWarpSize;
  const auto* quads = reinterpret_cast<const uint4*>(histogram) + 2 * (kWarpSize - 1 - lane);
  const uint4 low = quads[0];
  const uint4 high = quads[1];
  const std::uint32_t counts[kPerLane] = {high.w, high.z, high.y, high.x,
                                          low.w,  low.z,  low.y,  low.x};
  std::uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) mine += counts[i];
  std::uint32_t above = warp_sum_up_to(mine) - mine;
  if (lane == kWarpSize - 1 && (num_victims == 0 || above + mine < num_victims)) {
    threshold = {num_victims == 0 ? kNumBuckets - 1 : kNoThreshold, 0};
  }
  if (above >= num_victims || above + mine < num_victims) return;
  std::uint32_t i = 0;
  std::uint32_t up_to = above;
#pragma unroll
  for (int b = 0; b < kPerLane - 1; ++b) {  // no test waits for the one before it
    up_to += counts[b];
    const bool passed = up_to < num_victims;
    above = passed ? up_to : above;
    i += passed;
  }
  threshold = {kNumBuckets - 1 - lane * kPerLane - i, num_victims - above};
}

}  // namespace sparse_kvcm::device
