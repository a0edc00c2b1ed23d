// resolve for one row by one block. ops.hpp has the contract, cpu/resolve.cpp the plain form.
//
// The distinct cached ordinals get ranks (ordinal_index.cuh). One pass over the entries finds the
// slot of each rank that is cached; ranks without one are the misses, numbered in order. A histogram
// of the other entries' buckets says at which bucket the victims run out, and a scan in slot order
// numbers them: the i-th victim's slot is the i-th miss's. Nothing depends on the order in which
// threads run.
//
// Each thread owns a stretch of consecutive entries. One tile of them stays in registers from pass
// to pass; with kOneTile that is all there are, else each pass reads them again.
#pragma once

#include <cstdint>

#include "core/row_state.hpp"
#include "cuda/device/block_scan.cuh"
#include "cuda/device/ordinal_index.cuh"
#include "cuda/device/resolve_memory.cuh"
#include "cuda/device/seat.cuh"
#include "cuda/device/victims.cuh"
#include "sparse_kvcm/entry.hpp"
#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm::device {

inline constexpr int kTile = 8;        // entries that a thread keeps
inline constexpr int kUnitsAhead = 4;  // selected units that a thread keeps
// Buckets below it, three steps old and younger, hold most entries and hardly ever a victim: they
// are counted only where the others do not suffice.
inline constexpr std::uint32_t kFirstCounted = 8;

// The thread's part of a selection: units threadIdx.x, threadIdx.x + kThreads and so on. The first
// kUnitsAhead stay in registers, read before the row is known.
template <int kThreads>
class SelectionPart {
 public:
  __device__ SelectionPart(const std::int32_t* selection, std::int32_t k)
      : selection_(selection), k_(k) {
#pragma unroll
    for (int u = 0; u < kUnitsAhead; ++u) {
      const int j = static_cast<int>(threadIdx.x) + u * kThreads;
      ahead_[u] = j < k ? __ldg(selection + j) : -1;
    }
  }
  // Calls use(position, ordinal).
  template <class Use>
  __device__ void for_each(const Use& use) const {
#pragma unroll
    for (int u = 0; u < kUnitsAhead; ++u) {
      const int j = static_cast<int>(threadIdx.x) + u * kThreads;
      if (j < k_) use(j, ahead_[u]);
    }
    for (int j = static_cast<int>(threadIdx.x) + kUnitsAhead * kThreads; j < k_; j += kThreads) {
      use(j, __ldg(selection_ + j));
    }
  }

 private:
  const std::int32_t* __restrict__ selection_;
  std::int32_t k_;
  std::int32_t ahead_[kUnitsAhead];
};

template <int kThreads, class Index, bool kOneTile>
class RowResolver {
 public:
  __device__ RowResolver(const ops::ResolveParams& params, const RowState& state, std::int64_t i,
                         const RowMemory& memory, const Index& index,
                         const SelectionPart<kThreads>& selected)
      : p_(params), state_(state), i_(i), m_(memory), index_(index), selected_(selected) {
    entries_ = p_.entries + state_.base;
    const int stretch = entries_per_thread(state_.cached_slots);
    first_ = min(static_cast<int>(threadIdx.x) * stretch, state_.cached_slots);
    end_ = min(first_ + stretch, state_.cached_slots);
    num_tiles_ = kOneTile ? 1 : (stretch + kTile - 1) / kTile;
    wide_ = reinterpret_cast<std::uintptr_t>(entries_) % 16 == 0;
    load_tile(0);
  }

  // A multiple of four, so that a stretch begins where a vector may.
  __device__ static int entries_per_thread(std::int32_t cached_slots) {
    return (cached_slots + 4 * kThreads - 1) / (4 * kThreads) * 4;
  }

  // Builds the index. Touches shared memory only.
  __device__ void index_selection() {
    selected_.for_each([&](int j, std::int32_t ordinal) { index_.insert(j, ordinal); });
    __syncthreads();
    num_ranks_ = index_.finish(m_.index_totals);
  }

  __device__ void run(std::uint32_t last, std::uint32_t clock) {
    last_ = last;
    clock_ = clock;
    find_hits();
    __syncthreads();
    if (kOneTile) bucket_tile(0);
    fill_histogram(kFirstCounted, kNumBuckets);
    const std::uint32_t misses_below = count_misses();
    __syncthreads();
    const std::uint32_t num_misses = number_misses(misses_below);
    Threshold threshold = share_threshold(num_misses);
    if (threshold.bucket == kNoThreshold) {
      fill_histogram(0, kFirstCounted);
      __syncthreads();
      threshold = share_threshold(num_misses);
    }
    const std::uint32_t victims_below = count_victims(threshold);
    __syncthreads();
    choose_victims(threshold, victims_below);
    __syncthreads();
    write_outputs(num_misses);
  }

 private:
  // Should two entries hold one ordinal (only a caller of `ops` can do that), the lower slot hits.
  __device__ void find_hits() {
    for (int tile = 0; tile < num_tiles_; ++tile) {
      if (!kOneTile) load_tile(tile);
      rank_tile();
#pragma unroll
      for (int e = 0; e < kTile; ++e) {
        if (rank_[e] != kNoRank) atomicMin(&m_.slot_of_rank[rank_[e]], first_ + tile * kTile + e);
      }
    }
  }

  // Counts the entries with buckets in [first, end).
  __device__ void fill_histogram(std::uint32_t first, std::uint32_t end) {
    for (int tile = 0; tile < num_tiles_; ++tile) {
      rebucket_tile(tile);
#pragma unroll
      for (int e = 0; e < kTile; ++e) {
        const std::uint32_t stale = bucket(e);
        if (stale != kSelectedBucket && stale >= first && stale < end) {
          atomicAdd(&m_.histogram[stale], 1u);
        }
      }
    }
  }

  __device__ Threshold share_threshold(std::uint32_t num_misses) {
    if (threadIdx.x < kWarpSize) find_threshold(m_.histogram, num_misses, m_.threshold);
    __syncthreads();
    return {m_.threshold[0], m_.threshold[1]};
  }

  // Ranks go by fours: those of a thread lie side by side, and cells past the last rank stay
  // kUnplaced, so they are masked by number.
  template <class Use>
  __device__ void for_each_miss(const Use& use) {
    const int stretch = (num_ranks_ + 4 * kThreads - 1) / (4 * kThreads) * 4;
    const int first = static_cast<int>(threadIdx.x) * stretch;
    const int end = min(first + stretch, num_ranks_);
    for (int r = first; r < end; r += 4) {
      const int4 slots = *reinterpret_cast<const int4*>(m_.slot_of_rank + r);
      if (slots.x == kUnplaced) use(r);
      if (slots.y == kUnplaced && r + 1 < end) use(r + 1);
      if (slots.z == kUnplaced && r + 2 < end) use(r + 2);
      if (slots.w == kUnplaced && r + 3 < end) use(r + 3);
    }
  }
  // Returns the sum of lower lanes.
  __device__ std::uint32_t count_misses() {
    std::uint32_t misses = 0;
    for_each_miss([&](int) { ++misses; });
    return begin_block_scan(misses, m_.miss_totals);
  }
  // Returns the misses of the row.
  __device__ std::uint32_t number_misses(std::uint32_t below_in_warp) {
    const BlockSums sums = end_block_scan<kThreads>(below_in_warp, m_.miss_totals);
    std::int32_t miss = static_cast<std::int32_t>(sums.below);
    for_each_miss([&](int r) { m_.slot_of_rank[r] = ~miss++; });
    return sums.total;
  }

  // Of the thread's entries: those above the threshold in the low half, those at it in the high.
  __device__ std::uint32_t count_victims(const Threshold& threshold) {
    std::uint32_t counts = 0;
    for (int tile = 0; tile < num_tiles_; ++tile) {
      rebucket_tile(tile);
#pragma unroll
      for (int e = 0; e < kTile; ++e) {
        if (bucket(e) >= threshold.bucket) counts += bucket(e) > threshold.bucket ? 1u : 1u << 16;
      }
    }
    return begin_block_scan(counts, m_.victim_totals);
  }

  // Lists the victims' slots and writes the entries that stay.
  __device__ void choose_victims(const Threshold& threshold, std::uint32_t below_in_warp) {
    const BlockSums sums = end_block_scan<kThreads>(below_in_warp, m_.victim_totals);
    std::uint32_t at = sums.below >> 16;
    std::uint32_t victim = (sums.below & 0xFFFF) + min(at, threshold.count);
    for (int tile = 0; tile < num_tiles_; ++tile) {
      rebucket_tile(tile);
#pragma unroll
      for (int e = 0; e < kTile; ++e) {
        const std::uint32_t stale = bucket(e);
        const bool at_threshold = stale == threshold.bucket;
        if (stale > threshold.bucket || (at_threshold && at < threshold.count)) {
          m_.victim_slot[victim++] = static_cast<std::uint16_t>(first_ + tile * kTile + e);
        }
        at += at_threshold;
        if (stale == kSelectedBucket) {
          entry_[e] = pack_entry(clock_, true, entry_ordinal(entry_[e]));
        } else if (stale >= 2 * kMaxAge && entry_[e] != kEmptyEntry) {
          entry_[e] =
              pack_entry(clock_ - kMaxAge, entry_resident(entry_[e]), entry_ordinal(entry_[e]));
        }
      }
      store_tile(tile);
    }
  }

  __device__ void write_outputs(std::uint32_t num_misses) {
    std::int32_t* slots = p_.slots + i_ * p_.k;
    std::uint32_t errors = 0;
    selected_.for_each([&](int j, std::int32_t ordinal) {
      const int rank = index_.find(static_cast<std::uint32_t>(ordinal));
      slots[j] = rank != kNoRank ? cached_slot(rank, ordinal) : other_slot(ordinal, errors);
    });
    if (errors != 0) raise_errors(errors);
    for (int j = threadIdx.x; j < p_.max_new_units; j += kThreads) {
      const std::int32_t ordinal = state_.committed + j;
      p_.write_slots[i_ * p_.max_new_units + j] =
          ordinal < state_.length ? window_slot(state_, ordinal) : p_.no_write_slot;
    }
    if (threadIdx.x != 0) return;
    p_.miss_counts[i_] = static_cast<std::int32_t>(num_misses);
    p_.hit_counts[i_] = num_ranks_ - static_cast<std::int32_t>(num_misses);
    p_.last[state_.lease_id] = clock_;
  }

  // Where a cached unit is. The threads that selected a miss also write its entry and its place in
  // the miss list; all of them write the same.
  __device__ std::int32_t cached_slot(int rank, std::int32_t ordinal) {
    std::int32_t slot = m_.slot_of_rank[rank];
    if (slot < 0) {
      const std::int32_t miss = ~slot;
      slot = m_.victim_slot[miss];
      entries_[slot] = pack_entry(clock_, false, ordinal);
      p_.miss_ordinals[i_ * p_.k + miss] = ordinal;
      p_.miss_slots[i_ * p_.k + miss] = state_.base + slot;
    }
    return state_.base + slot;
  }

  __device__ std::int32_t other_slot(std::int32_t ordinal, std::uint32_t& errors) const {
    if (ordinal == -1) return kNoSlot;
    if (ordinal < 0 || ordinal >= state_.length) {
      errors |= kErrorRange;
    } else if (ordinal >= state_.window_begin) {
      return window_slot(state_, ordinal);
    } else {
      errors |= kErrorHole;
    }
    return kNoSlot;
  }

  // errors[i] is zero by now.
  __device__ void raise_errors(std::uint32_t errors) const {
    raise(p_.errors.errors + i_, errors);
    if (p_.errors.row_errors != nullptr) {
      raise(p_.errors.row_errors + p_.launch.rows[i_], errors);
    }
  }

  __device__ void load_tile(int tile) {
    const int first = first_ + tile * kTile;
#pragma unroll
    for (int quad = 0; quad < kTile; quad += 4) {
      if (wide_ && first + quad + 4 <= end_) {
        const uint4 words = *reinterpret_cast<const uint4*>(entries_ + first + quad);
        entry_[quad] = words.x;
        entry_[quad + 1] = words.y;
        entry_[quad + 2] = words.z;
        entry_[quad + 3] = words.w;
        continue;
      }
#pragma unroll
      for (int e = quad; e < quad + 4; ++e) {
        entry_[e] = first + e < end_ ? entries_[first + e] : kEmptyEntry;
      }
    }
  }

  __device__ void store_tile(int tile) {
    const int first = first_ + tile * kTile;
#pragma unroll
    for (int quad = 0; quad < kTile; quad += 4) {
      if (wide_ && first + quad + 4 <= end_) {
        *reinterpret_cast<uint4*>(entries_ + first + quad) = {entry_[quad], entry_[quad + 1],
                                                              entry_[quad + 2], entry_[quad + 3]};
        continue;
      }
#pragma unroll
      for (int e = quad; e < quad + 4; ++e) {
        if (first + e < end_) entries_[first + e] = entry_[e];
      }
    }
  }

  __device__ void rank_tile() {
#pragma unroll
    for (int e = 0; e < kTile; ++e) {
      rank_[e] = entry_[e] == kEmptyEntry ? kNoRank : index_.find(entry_[e] & kOrdinalMask);
    }
  }

  // Buckets of the tile, a byte each. Cells past the thread's stretch count as selected.
  __device__ void bucket_tile(int tile) {
    buckets_[0] = buckets_[1] = 0;
#pragma unroll
    for (int e = 0; e < kTile; ++e) {
      const int slot = first_ + tile * kTile + e;
      const bool hit = rank_[e] != kNoRank && m_.slot_of_rank[rank_[e]] == slot;
      const auto stale = static_cast<std::uint32_t>(entry_bucket(entry_[e], last_, clock_));
      buckets_[e / 4] |= (hit || slot >= end_ ? kSelectedBucket : stale) << (8 * (e % 4));
    }
  }
  __device__ void rebucket_tile(int tile) {
    if (kOneTile) return;
    load_tile(tile);
    rank_tile();
    bucket_tile(tile);
  }
  [[nodiscard]] __device__ std::uint32_t bucket(int e) const {
    return buckets_[e / 4] >> (8 * (e % 4)) & 0xFF;
  }

  const ops::ResolveParams& p_;
  const RowState& state_;
  const std::int64_t i_;
  const RowMemory& m_;
  Index index_;
  const SelectionPart<kThreads>& selected_;
  std::uint32_t last_ = 0;
  std::uint32_t clock_ = 0;
  std::int32_t num_ranks_ = 0;
  Entry* entries_;
  int first_;  // the thread's stretch of entries
  int end_;
  int num_tiles_;
  bool wide_;  // entries may move four at a time
  Entry entry_[kTile];
  int rank_[kTile];
  std::uint32_t buckets_[kTile / 4];
};

}  // namespace sparse_kvcm::device
