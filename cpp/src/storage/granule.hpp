// The granules of a tier, and how many pools take.
#pragma once

#include <cstdint>
#include <vector>

namespace sparse_kvcm {

// Of a tier of this quota, in bytes (StorageLayout::granule_bytes).
[[nodiscard]] std::int64_t granule_for(std::int64_t quota);

// Granules that `num_slots` slots of a pool group take: at least one per pool.
[[nodiscard]] std::int64_t granules_for(const std::vector<std::int64_t>& slot_bytes,
                                        std::int64_t num_slots, std::int64_t granule);

// The most slots that `granules` hold, at least one granule in each pool.
[[nodiscard]] std::int64_t slots_for(const std::vector<std::int64_t>& slot_bytes,
                                     std::int64_t granules, std::int64_t granule);

}  // namespace sparse_kvcm
