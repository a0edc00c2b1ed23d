// Hands out leases: contiguous arena slots, first fit, with coalescing on return. Every lease gets
// an id that is unique among live leases and a generation that is never used again.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "sparse_kvcm/kv_cache.hpp"

namespace sparse_kvcm {

class LeaseAllocator {
 public:
  // REQUIRES: num_slots >= 0, max_leases >= 0.
  LeaseAllocator(std::int32_t num_slots, std::int32_t max_leases);

  // Empty if no run of slots is long enough or every id is out; nothing changes then.
  // REQUIRES: cached_slots + window_slots > 0.
  [[nodiscard]] std::optional<Lease> acquire(std::int32_t cached_slots, std::int32_t window_slots);
  // REQUIRES: a lease of this allocator that has not been released.
  void release(const Lease& lease);

  [[nodiscard]] std::int64_t num_free_slots() const;
  [[nodiscard]] std::int64_t largest_free_run() const;
  [[nodiscard]] std::int32_t num_free_ids() const {
    return static_cast<std::int32_t>(free_ids_.size()) + max_leases_ - next_id_;
  }

 private:
  std::map<std::int32_t, std::int32_t> free_runs_;  // first slot -> slots; no two touch
  std::vector<std::int32_t> free_ids_;              // given back; last one is taken next
  std::int32_t next_id_ = 0;                        // never used so far, up to max_leases_
  std::int32_t max_leases_;
  std::uint64_t next_generation_ = 1;
};

}  // namespace sparse_kvcm
