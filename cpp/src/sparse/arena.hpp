// The arena: the device memory of all leases, and the cache state that resolve keeps for them.
//
//   per member layer    [arena_pages + 1, page_bytes]; the page behind the leases is the trash page
//   per selection group entries [num_slots] and the clock of each lease's last resolve [max_leases]
//
// One lease covers the same slots in every member layer and every group. Owns the memory.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.hpp"
#include "sparse/lease_allocator.hpp"
#include "sparse_kvcm/config.hpp"

namespace sparse_kvcm {

class Arena {
 public:
  // Throws DeviceMemoryError if the memory is not there. REQUIRES: a checked config.
  Arena(const KvCacheManagerConfig& config, Backend& backend);

  // What the constructor allocates: for one member layer of `group`, and per selection group.
  [[nodiscard]] static std::int64_t member_bytes(const KvCacheManagerConfig& config,
                                                 const SelectionGroupConfig& group);
  [[nodiscard]] static std::int64_t entries_bytes(const KvCacheManagerConfig& config);
  [[nodiscard]] static std::int64_t last_bytes(const KvCacheManagerConfig& config);

  [[nodiscard]] LeaseAllocator& leases() { return leases_; }
  [[nodiscard]] const LeaseAllocator& leases() const { return leases_; }
  // Slots that leases can have; also the first slot of the trash page.
  [[nodiscard]] std::int32_t num_slots() const { return num_slots_; }
  [[nodiscard]] const BufferPtr& memory(std::int32_t group, std::int32_t member) const;
  [[nodiscard]] Entry* entries(std::int32_t group) const;
  [[nodiscard]] std::uint32_t* last(std::int32_t group) const;

  // Bytes of entries and clocks of one group.
  [[nodiscard]] std::int64_t metadata_bytes(std::int32_t group) const;
  // Where the group's bytes lie, in the order of its host row.
  [[nodiscard]] std::span<const ops::Piece> pieces(std::int32_t group) const;
  // What empties `leases` in every group at `clock`; borrows the span. Valid as long as this arena.
  [[nodiscard]] ops::ResetParams reset_params(std::span<const ops::LeaseReset> leases,
                                              std::uint32_t clock) const;

 private:
  struct Group {
    std::vector<BufferPtr> members;
    std::vector<ops::Piece> pieces;
    BufferPtr entries;
    BufferPtr last;
  };
  void add_group(const KvCacheManagerConfig& config, const SelectionGroupConfig& selection,
                 Backend& backend);

  std::int32_t num_slots_;
  std::int32_t max_leases_;
  std::vector<Group> groups_;
  std::vector<Entry*> all_entries_;       // [num_groups]
  std::vector<std::uint32_t*> all_last_;  // [num_groups]
  LeaseAllocator leases_;
};

}  // namespace sparse_kvcm
