// The distinct cached ordinals of a selection in shared memory, ranked ascending. Two forms with one
// result: a bitmap over the row's history with prefix counts, and, where the history is too long
// for shared memory, a sorted list.
//
// `insert` is called by each thread for its part of the selection, `finish` by the whole block
// after a barrier; it ends with one. `find` gives the rank of an ordinal, or kNoRank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/block_scan.cuh"

namespace sparse_kvcm::device {

inline constexpr int kNoRank = -1;

// One bit per unit, and for each 32-bit word the number of members below it.
template <int kThreads>
class BitmapIndex {
 public:
  // Shared memory for histories of up to `units`, in bytes.
  __host__ __device__ static std::int64_t bytes(std::int32_t units) {
    return padded_words(units) * std::int64_t{6};
  }
  // Empties a bitmap for up to `units`; needs no row yet, so it hides behind the first loads.
  __device__ static void clear(std::byte* memory, std::int32_t units) {
    auto* wide = reinterpret_cast<uint4*>(memory);
    for (int w = threadIdx.x; w < padded_words(units) / 4; w += kThreads) wide[w] = {0, 0, 0, 0};
  }

  __device__ BitmapIndex(std::byte* memory, std::int32_t units, std::int32_t cached_end)
      : words_(reinterpret_cast<std::uint32_t*>(memory)),
        below_(reinterpret_cast<std::uint16_t*>(words_ + padded_words(units))),
        limit_(static_cast<std::uint32_t>(cached_end)) {}

  __device__ void insert(std::int32_t, std::int32_t ordinal) {
    if (static_cast<std::uint32_t>(ordinal) < limit_) {
      atomicOr(&words_[ordinal / 32], 1u << (ordinal % 32));
    }
  }

  // Each warp counts a stretch of words, a pair per lane; behind the barrier it counts again, on
  // top of what the warps below have.
  __device__ std::int32_t finish(std::uint32_t* warp_totals) {
    constexpr int kWarps = kThreads / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int num_pairs = static_cast<int>(limit_ + 63) / 64;
    const int stretch = (num_pairs + kWarps - 1) / kWarps;
    const int first = static_cast<int>(threadIdx.x) / kWarpSize * stretch;
    const int last = min(first + stretch, num_pairs);
    const auto* pairs = reinterpret_cast<const uint2*>(words_);
    std::uint32_t mine = 0;
    for (int p = first + lane; p < last; p += kWarpSize) {
      mine += __popc(pairs[p].x) + __popc(pairs[p].y);
    }
    mine = __reduce_add_sync(kFullWarp, mine);
    if (lane == 0) warp_totals[threadIdx.x / kWarpSize] = mine;
    __syncthreads();
    const BlockSums sums = end_block_scan<kThreads>(0, warp_totals);
    std::uint32_t below = sums.below;
    for (int p = first; p < last; p += kWarpSize) {
      const uint2 pair = p + lane < last ? pairs[p + lane] : uint2{0, 0};
      const std::uint32_t low = __popc(pair.x);
      const std::uint32_t bits = low + __popc(pair.y);
      const std::uint32_t up_to = warp_sum_up_to(bits);
      const std::uint32_t here = below + up_to - bits;
      if (p + lane < last) {
        reinterpret_cast<std::uint32_t*>(below_)[p + lane] = here | (here + low) << 16;
      }
      below += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    }
    __syncthreads();
    return static_cast<std::int32_t>(sums.total);
  }

  [[nodiscard]] __device__ int find(std::uint32_t ordinal) const {
    const bool in_range = ordinal < limit_;
    const std::uint32_t w = in_range ? ordinal / 32 : 0;
    const std::uint32_t word = words_[w];
    const std::uint32_t bit = 1u << (ordinal % 32);
    if (!in_range || (word & bit) == 0) return kNoRank;
    return below_[w] + __popc(word & (bit - 1));
  }

 private:
  __host__ __device__ static std::int32_t padded_words(std::int32_t units) {
    return (units + 255) / 256 * 8;
  }

  std::uint32_t* words_;
  std::uint16_t* below_;
  std::uint32_t limit_;
};

// Ascending distinct ordinals; a rank is found by bisection.
template <int kThreads>
class SortedIndex {
 public:
  // Shared memory for a selection of `k`, in bytes.
  __host__ __device__ static std::int64_t bytes(std::int32_t k) {
    return std::int64_t{padded(k)} * 8;
  }
  static constexpr std::int32_t kNoOrdinal = 0x7FFFFFFF;

  __device__ SortedIndex(std::byte* memory, std::int32_t k, std::int32_t cached_end)
      : keys_(reinterpret_cast<std::int32_t*>(memory)),
        list_(keys_ + padded(k)),
        limit_(static_cast<std::uint32_t>(cached_end)),
        k_(k) {}

  __device__ void insert(std::int32_t j, std::int32_t ordinal) {
    keys_[j] = static_cast<std::uint32_t>(ordinal) < limit_ ? ordinal : kNoOrdinal;
  }

  __device__ std::int32_t finish(std::uint32_t* warp_totals) {
    const int n = padded(k_);
    for (int j = k_ + static_cast<int>(threadIdx.x); j < n; j += kThreads) keys_[j] = kNoOrdinal;
    sort(n);
    const int stretch = (n + kThreads - 1) / kThreads;
    const int first = static_cast<int>(threadIdx.x) * stretch;
    const int last = min(first + stretch, n);
    std::uint32_t mine = 0;
    for (int j = first; j < last; ++j) mine += is_first(j);
    const std::uint32_t below_in_warp = begin_block_scan(mine, warp_totals);
    __syncthreads();
    const BlockSums sums = end_block_scan<kThreads>(below_in_warp, warp_totals);
    std::uint32_t rank = sums.below;
    for (int j = first; j < last; ++j) {
      if (is_first(j)) list_[rank++] = keys_[j];
    }
    __syncthreads();
    size_ = static_cast<std::int32_t>(sums.total);
    return size_;
  }

  [[nodiscard]] __device__ int find(std::uint32_t ordinal) const {
    int low = 0;
    int high = size_;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (static_cast<std::uint32_t>(list_[middle]) < ordinal) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < size_ && static_cast<std::uint32_t>(list_[low]) == ordinal ? low : kNoRank;
  }

 private:
  __host__ __device__ static std::int32_t padded(std::int32_t k) {
    std::int32_t n = 1;
    while (n < k) n *= 2;
    return n;
  }
  __device__ bool is_first(int j) const {
    return keys_[j] != kNoOrdinal && (j == 0 || keys_[j - 1] != keys_[j]);
  }
  // Bitonic, n a power of two.
  __device__ void sort(int n) {
    for (int size = 2; size <= n; size *= 2) {
      for (int stride = size / 2; stride > 0; stride /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < n / 2; i += kThreads) {
          const int low = i / stride * stride * 2 + i % stride;
          const std::int32_t a = keys_[low];
          const std::int32_t b = keys_[low + stride];
          if ((a > b) == ((low & size) == 0)) {
            keys_[low] = b;
            keys_[low + stride] = a;
          }
        }
      }
    }
    __syncthreads();
  }

  std::int32_t* keys_;
  std::int32_t* list_;
  std::uint32_t limit_;
  std::int32_t k_;
  std::int32_t size_ = 0;
};

}  // namespace sparse_kvcm::device
