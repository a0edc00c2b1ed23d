// The distinct cached ordinals of a selection in shared memory, and the slot that each has been
// found in. Three forms with one result. Each gives a selected ordinal a key; keys ascend with
// ordinals. The direct table is the fastest and covers the shortest histories, the bitmap longer
// ones, and the sorted list all.
//
//   insert        by each thread for its part of the selection; -1 past the selection's end as well
//   finish        by the whole block; begins and ends with a barrier
//   find          whether any ordinal is selected, and if so its key
//   selected_key  key of a selected ordinal
//   place, slot   the slot of a key; kNoSlotYet before `place`
//   num_keys      keys lie in [0, num_keys())
//
// `memory` is zeroed, 16-byte aligned and holds `bytes(...)`, which is a multiple of 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/block_scan.cuh"

namespace sparse_kvcm::device {

inline constexpr int kNoSlotYet = -1;

using Key = std::uint32_t;

struct Found {
  Key key;
  bool selected;
};

// Slots of ranks, as slot + 1.
class RankSlots {
 public:
  __host__ __device__ static std::uint32_t bytes(std::int32_t k) {
    return (static_cast<std::uint32_t>(k) + 7) / 8 * 16;
  }
  __device__ explicit RankSlots(std::byte* memory)
      : slots_(reinterpret_cast<std::uint16_t*>(memory)) {}
  __device__ void place(Key rank, int slot) { slots_[rank] = static_cast<std::uint16_t>(slot + 1); }
  [[nodiscard]] __device__ int slot(Key rank) const { return slots_[rank] - 1; }

 private:
  std::uint16_t* slots_;
};

// A cell per unit of the history: 0 if it is not selected, else 1 or slot + 2. An ordinal is its
// own key. One cell more, always 0, stands for all ordinals past the history.
template <int kThreads>
class DirectIndex {
 public:
  // Most entries of a row whose slots fit a cell.
  static constexpr std::int32_t kMaxSlots = 0xFFFF - 1;

  __host__ __device__ static std::uint32_t bytes(std::int32_t units) {
    return (static_cast<std::uint32_t>(units) / 8 + 1) * 16;
  }
  __device__ DirectIndex(std::byte* memory, std::int32_t cached_end)
      : cells_(reinterpret_cast<std::uint16_t*>(memory)),
        limit_(static_cast<std::uint32_t>(cached_end)) {}

  __device__ void insert(int, std::int32_t ordinal) {
    if (static_cast<std::uint32_t>(ordinal) < limit_) cells_[ordinal] = 1;
  }
  __device__ void finish(std::uint32_t*) { __syncthreads(); }
  [[nodiscard]] __device__ Found find(std::uint32_t ordinal) const {
    const Key cell = min(ordinal, limit_);
    return {cell, cells_[cell] != 0};
  }
  [[nodiscard]] __device__ Key selected_key(std::uint32_t ordinal) const { return ordinal; }
  __device__ void place(Key key, int slot) { cells_[key] = static_cast<std::uint16_t>(slot + 2); }
  [[nodiscard]] __device__ int slot(Key key) const { return cells_[key] - 2; }
  [[nodiscard]] __device__ Key num_keys() const { return limit_; }

 private:
  std::uint16_t* cells_;
  std::uint32_t limit_;
};

// One bit per unit, and for each 32-bit word the number of members below it: the rank is the key.
template <int kThreads>
class BitmapIndex {
 public:
  __host__ __device__ static std::uint32_t bytes(std::int32_t units, std::int32_t k) {
    return padded_words(units) * 6u + RankSlots::bytes(k);
  }
  // `units` is what the memory was sized for.
  __device__ BitmapIndex(std::byte* memory, std::int32_t units, std::int32_t cached_end)
      : words_(reinterpret_cast<std::uint32_t*>(memory)),
        below_(reinterpret_cast<std::uint16_t*>(words_ + padded_words(units))),
        slots_(reinterpret_cast<std::byte*>(below_ + padded_words(units))),
        limit_(static_cast<std::uint32_t>(cached_end)) {}

  __device__ void insert(int, std::int32_t ordinal) {
    if (static_cast<std::uint32_t>(ordinal) < limit_) {
      atomicOr(&words_[ordinal / 32], 1u << (ordinal % 32));
    }
  }

  // Each warp counts a stretch of words, a pair per lane; behind the barrier it counts again, on
  // top of what the warps below have.
  __device__ void finish(std::uint32_t* warp_totals) {
    constexpr int kWarps = kThreads / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int num_pairs = static_cast<int>(limit_ + 63) / 64;
    const int stretch = (num_pairs + kWarps - 1) / kWarps;
    const int first = static_cast<int>(threadIdx.x) / kWarpSize * stretch;
    const int last = min(first + stretch, num_pairs);
    const auto* pairs = reinterpret_cast<const uint2*>(words_);
    std::uint32_t mine = 0;
    __syncthreads();
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
    num_ranks_ = sums.total;
    __syncthreads();
  }

  [[nodiscard]] __device__ Found find(std::uint32_t ordinal) const {
    const bool in_range = ordinal < limit_;
    const std::uint32_t word = words_[in_range ? ordinal / 32 : 0];
    const bool selected = in_range && (word >> (ordinal % 32) & 1) != 0;
    return {selected ? rank(ordinal, word) : 0, selected};
  }
  [[nodiscard]] __device__ Key selected_key(std::uint32_t ordinal) const {
    return rank(ordinal, words_[ordinal / 32]);
  }
  __device__ void place(Key key, int slot) { slots_.place(key, slot); }
  [[nodiscard]] __device__ int slot(Key key) const { return slots_.slot(key); }
  [[nodiscard]] __device__ Key num_keys() const { return num_ranks_; }

 private:
  __host__ __device__ static std::uint32_t padded_words(std::int32_t units) {
    return (static_cast<std::uint32_t>(units) + 255) / 256 * 8;
  }
  [[nodiscard]] __device__ Key rank(std::uint32_t ordinal, std::uint32_t word) const {
    return below_[ordinal / 32] + __popc(word & ((1u << (ordinal % 32)) - 1));
  }

  std::uint32_t* words_;
  std::uint16_t* below_;
  RankSlots slots_;
  std::uint32_t limit_;
  std::uint32_t num_ranks_ = 0;
};

// Ascending distinct ordinals; a rank, the key, is found by bisection.
template <int kThreads>
class SortedIndex {
 public:
  __host__ __device__ static std::uint32_t bytes(std::int32_t k) {
    return (padded(k) + 1) / 2 * 16 + RankSlots::bytes(k);
  }
  static constexpr std::int32_t kNoOrdinal = 0x7FFFFFFF;

  __device__ SortedIndex(std::byte* memory, std::int32_t k, std::int32_t cached_end)
      : keys_(reinterpret_cast<std::int32_t*>(memory)),
        list_(keys_ + padded(k)),
        slots_(memory + (padded(k) + 1) / 2 * 16),
        limit_(static_cast<std::uint32_t>(cached_end)),
        k_(k) {}

  __device__ void insert(int j, std::int32_t ordinal) {
    if (j >= k_) return;
    keys_[j] = static_cast<std::uint32_t>(ordinal) < limit_ ? ordinal : kNoOrdinal;
  }

  __device__ void finish(std::uint32_t* warp_totals) {
    const int n = static_cast<int>(padded(k_));
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
    size_ = sums.total;
    __syncthreads();
  }

  [[nodiscard]] __device__ Found find(std::uint32_t ordinal) const {
    std::uint32_t low = 0;
    std::uint32_t high = size_;
#pragma unroll 1
    while (low < high) {
      const std::uint32_t middle = (low + high) / 2;
      if (static_cast<std::uint32_t>(list_[middle]) < ordinal) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return {low, low < size_ && static_cast<std::uint32_t>(list_[low]) == ordinal};
  }
  [[nodiscard]] __device__ Key selected_key(std::uint32_t ordinal) const {
    return find(ordinal).key;
  }
  __device__ void place(Key key, int slot) { slots_.place(key, slot); }
  [[nodiscard]] __device__ int slot(Key key) const { return slots_.slot(key); }
  [[nodiscard]] __device__ Key num_keys() const { return size_; }

 private:
  __host__ __device__ static std::uint32_t padded(std::int32_t k) {
    std::uint32_t n = 1;
    while (n < static_cast<std::uint32_t>(k)) n *= 2;
    return n;
  }
  __device__ bool is_first(int j) const {
    return keys_[j] != kNoOrdinal && (j == 0 || keys_[j - 1] != keys_[j]);
  }
  // Bitonic, n a power of two.
  __device__ void sort(int n) {
#pragma unroll 1
    for (int size = 2; size <= n; size *= 2) {
#pragma unroll 1
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
  RankSlots slots_;
  std::uint32_t limit_;
  std::int32_t k_;
  std::uint32_t size_ = 0;
};

}  // namespace sparse_kvcm::device
