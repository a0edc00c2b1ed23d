// resolve for one row by one block. ops.hpp has the contract, cpu/resolve.cpp the plain form.
//
// The selection goes into an index (ordinal_index.cuh). One pass over the entries looks each up:
// those selected leave their slot there, the others go into a histogram of buckets. Then each
// selected unit finds its slot in the index, or is a miss; misses are numbered by ordinal. The
// histogram says at which bucket the victims run out, and a scan in slot order numbers them: the
// i-th victim's slot is the i-th miss's. Nothing depends on the order in which threads run.
//
// Each thread owns a stretch of consecutive entries. One tile of them stays in registers from pass
// to pass; with kOneTile that is all there are, else each pass reads them again.
#pragma once

#include <cstdint>

#include "cuda/device/block_scan.cuh"
#include "cuda/device/entry_tile.cuh"
#include "cuda/device/miss_set.cuh"
#include "cuda/device/ordinal_index.cuh"
#include "cuda/device/resolve_memory.cuh"
#include "cuda/device/selection_part.cuh"
#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm::device {

// Buckets below it, three steps old and younger, hold most entries and hardly ever a victim: they
// are counted only where the others do not suffice.
inline constexpr std::uint32_t kFirstCounted = 8;

// What a row without units gives: padding, nobody seated, a fault.
__device__ inline void write_nothing(const ops::ResolveParams& p, std::int64_t i,
                                     std::uint32_t error) {
  for (int j = threadIdx.x; j < p.k; j += blockDim.x) p.slots[i * p.k + j] = kNoSlot;
  for (int j = threadIdx.x; j < p.max_new_units; j += blockDim.x) {
    p.write_slots[i * p.max_new_units + j] = p.no_write_slot;
  }
  if (threadIdx.x != 0) return;
  p.miss_counts[i] = 0;
  p.hit_counts[i] = 0;
  p.errors.errors[i] = error;
  if (p.errors.row_errors != nullptr) raise(p.errors.row_errors + p.launch.rows[i], error);
}

template <int kThreads, class Index, bool kOneTile>
class RowResolver {
 public:
  // REQUIRES: the head has no refusal, and shared memory is clear behind a barrier.
  __device__ RowResolver(const ops::ResolveParams& params, std::int64_t i, const RowMemory& memory,
                         const Index& index, const MissSet<kThreads>& misses,
                         const SelectionPart<kThreads>& selected)
      : p_(params),
        i_(i),
        m_(memory),
        head_(*memory.head),
        index_(index),
        misses_(misses),
        selected_(selected),
        entries_(params.entries + head_.base) {
    const int stretch = entries_per_thread(head_.cached_slots);
    first_ = min(static_cast<int>(threadIdx.x) * stretch, head_.cached_slots);
    end_ = min(first_ + stretch, head_.cached_slots);
    num_tiles_ = kOneTile ? 1 : (stretch + kTile - 1) / kTile;
    load_tile(0);
  }

  // A multiple of four, so that a stretch begins where a vector may.
  __device__ static int entries_per_thread(std::int32_t cached_slots) {
    constexpr std::uint32_t kRound = 4 * kThreads;
    return static_cast<int>((static_cast<std::uint32_t>(cached_slots) + kRound - 1) / kRound * 4);
  }

  __device__ void run() {
    // By one thread for all: should the row be in the launch twice, the block still agrees.
    if (threadIdx.x == 0) m_.head->last = p_.last[head_.lease_id];
    if (threadIdx.x == kWarpSize) m_.head->window_first = head_.window_begin % head_.window_slots;
    selected_.for_each_ahead([&](int, int j, std::int32_t o) { index_.insert(j, o); });
    selected_.for_each_later([&](int, int j, std::int32_t o) { index_.insert(j, o); });
    index_.finish(m_.index_totals);
    if (head_.open == 0 || head_.last == head_.clock) {
      write_nothing(p_, i_, kErrorStale);
      return;
    }
    const std::uint32_t hits = place_hits();
    __syncthreads();  // the index has every slot found, the histogram every entry
    write_hits();
    __syncthreads();  // the set has every miss
    const Key keys = index_.num_keys();
    const std::uint32_t below_in_warp =
        begin_block_scan(misses_.count(keys) | hits << 16, m_.miss_totals);
    __syncthreads();  // every warp's total
    const BlockSums sums = end_block_scan<kThreads>(below_in_warp, m_.miss_totals);
    misses_.number_from(keys, sums.below & 0xFFFF);
    const std::uint32_t num_misses = sums.total & 0xFFFF;
    if (threadIdx.x >= kWarpSize) write_counts(num_misses, sums.total >> 16);
    Threshold threshold = share_threshold(num_misses);
    if (threshold.bucket == kNoThreshold) {
      fill_young_buckets();
      __syncthreads();
      threshold = share_threshold(num_misses);
      if (threshold.bucket == kNoThreshold) {  // entries share an ordinal
        write_nothing(p_, i_, kErrorLease);
        return;
      }
    }
    const std::uint32_t victims_below = count_victims(threshold);
    if (threadIdx.x == kWarpSize) p_.last[head_.lease_id] = head_.clock;
    __syncthreads();  // every warp's total
    choose_victims(threshold, victims_below);
    __syncthreads();  // the misses are numbered, the victims listed, the other entries written
    write_misses();
  }

 private:
  // Leaves the slots of selected entries in the index and counts the buckets of the others. Returns
  // how many of the thread's entries are selected.
  __device__ std::uint32_t place_hits() {
    std::uint32_t hits = 0;
#pragma unroll 1
    for (int t = 0; t < num_tiles_; ++t) {
      if (!kOneTile) load_tile(t);
      find_buckets([&](int e, const Found& found, std::uint32_t bucket) {
        if (found.selected) index_.place(found.key, first_ + t * kTile + e);
        if (bucket >= kFirstCounted) atomicAdd(&m_.histogram[bucket], 1u);
      });
      hits += tile_.num_selected();
      const std::uint32_t too_many = tile_.drop_buckets_past_size();
      if (too_many != 0) atomicSub(&m_.histogram[kNumBuckets - 1], too_many);
    }
    return hits;
  }

  // Sets the buckets of the tile and calls use(e, found, bucket) for each entry.
  template <class Use>
  __device__ void find_buckets(const Use& use) {
    const Staleness staleness(head_.last, head_.clock);
#pragma unroll
    for (int quad = 0; quad < kTile; quad += 4) {  // look-ups run ahead, four at a time
      Found found[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) found[e] = index_.find(tile_.ordinal(quad + e));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        use(quad + e, found[e], tile_.set_bucket(quad + e, found[e].selected, staleness));
      }
    }
  }
  __device__ void rebucket_tile(int t) {
    if (kOneTile) return;
    load_tile(t);
    find_buckets([](int, const Found&, std::uint32_t) {});
    tile_.drop_buckets_past_size();
  }

  __device__ Threshold share_threshold(std::uint32_t num_misses) {
    if (threadIdx.x < kWarpSize) find_threshold(m_.histogram, num_misses, *m_.threshold);
    __syncthreads();
    return *m_.threshold;
  }

  __device__ void fill_young_buckets() {
#pragma unroll 1
    for (int t = 0; t < num_tiles_; ++t) {
      rebucket_tile(t);
#pragma unroll
      for (int e = 0; e < kTile; ++e) {
        const std::uint32_t bucket = tile_.bucket(e);
        if (bucket != kSelectedBucket && bucket < kFirstCounted) {
          atomicAdd(&m_.histogram[bucket], 1u);
        }
      }
    }
  }

  // Of the thread's entries: those above the threshold in the low half, those at it in the high.
  __device__ std::uint32_t count_victims(const Threshold& threshold) {
    std::uint32_t counts = 0;
#pragma unroll 1
    for (int t = 0; t < num_tiles_; ++t) {
      rebucket_tile(t);
      counts += tile_.above(threshold.bucket).count() | tile_.at(threshold.bucket).count() << 16;
    }
    return begin_block_scan(counts, m_.victim_totals);
  }

  // Lists the victims' slots and writes the entries that stay.
  __device__ void choose_victims(const Threshold& threshold, std::uint32_t below_in_warp) {
    const BlockSums sums = end_block_scan<kThreads>(below_in_warp, m_.victim_totals);
    int at_below = static_cast<int>(sums.below >> 16);
    const int at_count = static_cast<int>(threshold.count);
    int victim = static_cast<int>(sums.below & 0xFFFF) + min(at_below, at_count);
#pragma unroll 1
    for (int t = 0; t < num_tiles_; ++t) {
      rebucket_tile(t);
      const TileBits above = tile_.above(threshold.bucket);
      const TileBits at = tile_.at(threshold.bucket);
      std::uint32_t victims = 0;
      if (above.any() || at.any()) {
        victims = above.in_order() | lowest_bits(at.in_order(), at_count - at_below);
      }
      at_below += static_cast<int>(at.count());
#pragma unroll 1
      for (; victims != 0; victims &= victims - 1) {
        const int e = __ffs(static_cast<int>(victims)) - 1;
        // More than k only where another block writes the same lease.
        if (victim < p_.k) {
          m_.victim_slot[victim++] = static_cast<std::uint16_t>(first_ + t * kTile + e);
        }
      }
      tile_.restamp(head_.clock);
      tile_.store();
    }
  }
  // The lowest `count` bits that are set in `bits`, for any count.
  [[nodiscard]] __device__ static std::uint32_t lowest_bits(std::uint32_t bits, int count) {
    if (count <= 0) return 0;
#pragma unroll 1
    for (int n = __popc(bits); n > count; --n) bits ^= 0x80000000u >> __clz(static_cast<int>(bits));
    return bits;
  }

  [[nodiscard]] __device__ bool is_cached(std::int32_t ordinal) const {
    return static_cast<std::uint32_t>(ordinal) < static_cast<std::uint32_t>(head_.cached_end);
  }
  [[nodiscard]] __device__ Key key_of(std::int32_t ordinal) const {
    return index_.selected_key(static_cast<std::uint32_t>(ordinal));
  }
  // Slot of a unit within the lease, kNoSlotYet if it is cached but not found, else kNotCached.
  [[nodiscard]] __device__ int look_up(std::int32_t ordinal) const {
    return is_cached(ordinal) ? index_.slot(key_of(ordinal)) : kNotCached;
  }
  // The row's output slots, from the thread's first on.
  [[nodiscard]] __device__ std::int32_t* my_slots() const {
    return p_.slots + (i_ * p_.k + threadIdx.x);
  }

  // Slots of all selected units but the misses, which go into the set.
  __device__ void write_hits() {
    int found[SelectionPart<kThreads>::kAhead];
    selected_.for_each_ahead(
        [&](int u, int, std::int32_t ordinal) { found[u] = look_up(ordinal); });
    std::uint32_t errors = 0;
    std::int32_t* slots = my_slots();
    selected_.for_each_ahead([&](int u, int, std::int32_t ordinal) {
      if (!selected_.has(u)) return;
      if (!write_slot(slots[u * kThreads], ordinal, found[u], errors)) missed_ |= 1u << u;
    });
    selected_.for_each_later([&](int u, int, std::int32_t ordinal) {
      if (!write_slot(slots[u * kThreads], ordinal, look_up(ordinal), errors)) {
        missed_ |= kMissedLater;
      }
    });
    if (errors == 0) return;
    raise(p_.errors.errors + i_, errors);  // zero by now
    if (p_.errors.row_errors != nullptr) {
      raise(p_.errors.row_errors + p_.launch.rows[i_], errors);
    }
  }
  // Returns false for a miss.
  __device__ bool write_slot(std::int32_t& output, std::int32_t ordinal, int found,
                             std::uint32_t& errors) {
    if (found == kNoSlotYet) {
      misses_.insert(key_of(ordinal));
      return false;
    }
    __stcs(&output, found >= 0 ? head_.base + found : uncached_slot(ordinal, errors));
    return true;
  }
  __device__ std::int32_t uncached_slot(std::int32_t ordinal, std::uint32_t& errors) const {
    if (ordinal == -1) return kNoSlot;
    if (ordinal < 0 || ordinal >= head_.length) {
      errors |= kErrorRange;
    } else if (ordinal >= head_.window_begin) {
      return head_.window_slot(ordinal);
    } else {
      errors |= kErrorHole;
    }
    return kNoSlot;
  }

  // The threads that selected a miss also write its entry and its place in the miss list; should
  // they be several, all write the same.
  __device__ void write_misses() const {
    if (missed_ == 0) return;
    std::int32_t* slots = my_slots();
#pragma unroll 1
    for (std::uint32_t ahead = missed_ & (kMissedLater - 1); ahead != 0; ahead &= ahead - 1) {
      const int u = __ffs(static_cast<int>(ahead)) - 1;
      write_miss(slots[u * kThreads], selected_.ahead(u));
    }
    if ((missed_ & kMissedLater) == 0) return;
    selected_.for_each_later([&](int u, int, std::int32_t ordinal) {
      if (look_up(ordinal) == kNoSlotYet) write_miss(slots[u * kThreads], ordinal);
    });
  }
  __device__ void write_miss(std::int32_t& output, std::int32_t ordinal) const {
    const std::uint32_t miss = misses_.number(key_of(ordinal));
    const std::int32_t slot = m_.victim_slot[miss];
    const std::int64_t cell = i_ * p_.k + miss;
    __stcs(&output, head_.base + slot);
    p_.miss_slots[cell] = head_.base + slot;
    p_.miss_ordinals[cell] = ordinal;
    entries_[slot] = pack_entry(head_.clock, false, ordinal);
  }

  // While the first warp finds the threshold. Should there be none, write_nothing comes later.
  __device__ void write_counts(std::uint32_t num_misses, std::uint32_t num_hits) const {
    const int first = static_cast<int>(threadIdx.x) - kWarpSize;
    for (int j = first; j < p_.max_new_units; j += kThreads - kWarpSize) {
      const std::int32_t ordinal = head_.committed + j;
      p_.write_slots[i_ * p_.max_new_units + j] =
          ordinal < head_.length ? head_.window_slot(ordinal) : p_.no_write_slot;
    }
    if (first != 0) return;
    p_.miss_counts[i_] = static_cast<std::int32_t>(num_misses);
    p_.hit_counts[i_] = static_cast<std::int32_t>(num_hits);
  }

  __device__ void load_tile(int t) {
    const int first = first_ + t * kTile;
    tile_.load(entries_ + first, end_ - first);
  }

  static constexpr int kNotCached = kNoSlotYet - 1;
  static constexpr std::uint32_t kMissedLater = 1u << SelectionPart<kThreads>::kAhead;

  const ops::ResolveParams& p_;
  const std::int64_t i_;
  const RowMemory& m_;
  const RowHead& head_;
  Index index_;
  MissSet<kThreads> misses_;
  const SelectionPart<kThreads>& selected_;
  Entry* entries_;
  EntryTile tile_;
  int first_;  // the thread's stretch of entries
  int end_;
  int num_tiles_;
  std::uint32_t missed_ = 0;  // a bit for each unit ahead, and kMissedLater for the others
};

}  // namespace sparse_kvcm::device
