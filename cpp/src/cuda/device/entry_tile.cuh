// Up to eight consecutive entries of a row in a thread's registers, and their buckets.
#pragma once

#include <cstdint>

#include "cuda/device/staleness.cuh"
#include "sparse_kvcm/entry.hpp"

namespace sparse_kvcm::device {

inline constexpr int kTile = 8;
inline constexpr std::uint32_t kHighBits = 0x80808080u;  // of each byte

// Some entries of a tile: the high bits of the bytes of two words.
class TileBits {
 public:
  // Words without other bits.
  __device__ TileBits(std::uint32_t low, std::uint32_t high) : bits_(low | high >> 4) {}

  [[nodiscard]] __device__ std::uint32_t count() const { return __popc(bits_); }
  [[nodiscard]] __device__ bool any() const { return bits_ != 0; }
  // The same with bit e for entry e.
  [[nodiscard]] __device__ std::uint32_t in_order() const {
    return gather(bits_ >> 7) | gather(bits_ >> 3) << 4;
  }

 private:
  // Bits 0, 8, 16 and 24 of a word as its only ones.
  [[nodiscard]] __device__ static std::uint32_t gather(std::uint32_t bits) {
    return (bits & kHighBits >> 7) * 0x10204080u >> 28;
  }
  std::uint32_t bits_;
};

class EntryTile {
 public:
  // `size` entries at `entries`, less than none or more than kTile as well; cells past them hold
  // the empty entry.
  __device__ void load(Entry* entries, int size) {
    entries_ = entries;
    size_ = size;
#pragma unroll
    for (int quad = 0; quad < kTile; quad += 4) {
      if (moves_whole(quad)) {
        const uint4 words = *reinterpret_cast<const uint4*>(entries_ + quad);
        entry_[quad] = words.x;
        entry_[quad + 1] = words.y;
        entry_[quad + 2] = words.z;
        entry_[quad + 3] = words.w;
        continue;
      }
#pragma unroll
      for (int e = quad; e < quad + 4; ++e) entry_[e] = e < size_ ? entries_[e] : kEmptyEntry;
    }
  }
  // Streaming: see unit_copy.cuh on dirty lines.
  __device__ void store() const {
#pragma unroll
    for (int quad = 0; quad < kTile; quad += 4) {
      if (moves_whole(quad)) {
        __stcs(reinterpret_cast<uint4*>(entries_ + quad),
               uint4{entry_[quad], entry_[quad + 1], entry_[quad + 2], entry_[quad + 3]});
        continue;
      }
#pragma unroll
      for (int e = quad; e < quad + 4; ++e) {
        if (e < size_) entries_[e] = entry_[e];
      }
    }
  }

  [[nodiscard]] __device__ std::uint32_t ordinal(int e) const { return entry_[e] & kOrdinalMask; }

  // By e ascending, from 0 on.
  __device__ std::uint32_t set_bucket(int e, bool selected, const Staleness& staleness) {
    const std::uint32_t bucket = selected ? kSelectedBucket : staleness.bucket(entry_[e]);
    const std::uint32_t before = e % 4 == 0 ? 0 : buckets_[e / 4];
    buckets_[e / 4] = before + (bucket << (8 * (e % 4)));
    return bucket;
  }
  [[nodiscard]] __device__ std::uint32_t num_selected() const {
    return __popc(zero_bytes(buckets_[0])) + __popc(zero_bytes(buckets_[1]));
  }
  // Cells past the size count as selected from now on. Returns how many there are; all of them had
  // the empty entry's bucket.
  __device__ std::uint32_t drop_buckets_past_size() {
    if (size_ >= kTile) return 0;
    buckets_[0] &= bytes_below(size_);
    buckets_[1] &= bytes_below(size_ - 4);
    return static_cast<std::uint32_t>(kTile - max(size_, 0));
  }

  // Which entries have a bucket above or at the threshold.
  [[nodiscard]] __device__ TileBits above(std::uint32_t threshold) const {
    const std::uint32_t limit = threshold * 0x01010101u;
    return {bytes_above(buckets_[0], limit), bytes_above(buckets_[1], limit)};
  }
  [[nodiscard]] __device__ TileBits at(std::uint32_t threshold) const {
    const std::uint32_t equal = threshold * 0x01010101u;
    return {zero_bytes(buckets_[0] ^ equal), zero_bytes(buckets_[1] ^ equal)};
  }
  [[nodiscard]] __device__ std::uint32_t bucket(int e) const {
    return buckets_[e / 4] >> (8 * (e % 4)) & 0xFF;
  }

  // Selected entries become (clock, resident, ordinal); the oldest keep the greatest age.
  __device__ void restamp(std::uint32_t clock) {
    constexpr unsigned kFourthByteOfSecond = 0x7210;
    const Entry selected = pack_entry(clock, true, 0);
#pragma unroll
    for (int e = 0; e < kTile; ++e) {
      if (bucket(e) == kSelectedBucket) {
        entry_[e] = __byte_perm(entry_[e], selected, kFourthByteOfSecond);
      }
    }
    if (!has_oldest(buckets_[0]) && !has_oldest(buckets_[1])) return;
    const Entry oldest = pack_entry(clock - kMaxAge, false, 0);
#pragma unroll
    for (int e = 0; e < kTile; ++e) {
      if (bucket(e) >= kOldestBucket && entry_[e] != kEmptyEntry) {
        entry_[e] = oldest | (entry_[e] & ((1u << 25) - 1));
      }
    }
  }

 private:
  [[nodiscard]] __device__ bool moves_whole(int quad) const {
    return quad + 4 <= size_ && reinterpret_cast<std::uintptr_t>(entries_) % 16 == 0;
  }
  // The low `count` bytes of a word, for any count.
  [[nodiscard]] __device__ static std::uint32_t bytes_below(int count) {
    return count <= 0 ? 0 : count >= 4 ? ~0u : (1u << (8 * count)) - 1;
  }
  // The highest bit of each byte that is zero.
  [[nodiscard]] __device__ static std::uint32_t zero_bytes(std::uint32_t word) {
    constexpr std::uint32_t kLowBits = 0x7F7F7F7Fu;
    return ~(((word & kLowBits) + kLowBits) | word | kLowBits);
  }
  // The highest bit of each byte of `word` that is greater than that of `limit`.
  [[nodiscard]] __device__ static std::uint32_t bytes_above(std::uint32_t word,
                                                            std::uint32_t limit) {
    // Of the seven low bits: whether the limit's reach the word's.
    const std::uint32_t reach = (limit | kHighBits) - (word & ~kHighBits);
    return ~((limit & ~word) | (~(limit ^ word) & reach)) & kHighBits;
  }
  // Whether one of four buckets is 254 or 255.
  [[nodiscard]] __device__ static bool has_oldest(std::uint32_t buckets) {
    return zero_bytes(~buckets & 0xFEFEFEFEu) != 0;
  }

  Entry* entries_;
  int size_;
  Entry entry_[kTile];
  std::uint32_t buckets_[kTile / 4];  // a byte each
};

}  // namespace sparse_kvcm::device
