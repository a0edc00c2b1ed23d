// Buckets of entries at one step: entry_bucket() of entry.hpp in few instructions.
//
// The upper byte of an entry is 2 stamp + resident, so 2 last + 1 less that byte is, mod 256, twice
// the age at the last step plus one if it was not resident.
#pragma once

#include <cstdint>

#include "sparse_kvcm/entry.hpp"

namespace sparse_kvcm::device {

// Bucket of an entry that this step selects. Free: an unselected entry is at least one step old.
inline constexpr std::uint32_t kSelectedBucket = 0;
// The two buckets of entries of the greatest age.
inline constexpr std::uint32_t kOldestBucket = 2 * kMaxAge;

class Staleness {
 public:
  __device__ Staleness(std::uint32_t last, std::uint32_t clock)
      : newest_(2 * last + 1), shift_(2 * saturated_age(clock - last)) {}

  [[nodiscard]] __device__ std::uint32_t bucket(Entry entry) const {
    const std::uint32_t at_last = (newest_ - (entry >> 24)) & 0xFF;
    const std::uint32_t now = min(at_last + shift_, at_last | kOldestBucket);
    return entry == kEmptyEntry ? kNumBuckets - 1 : now;
  }

 private:
  std::uint32_t newest_;
  std::uint32_t shift_;
};

}  // namespace sparse_kvcm::device
