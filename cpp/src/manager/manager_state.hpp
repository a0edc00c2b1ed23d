// What a manager, its requests and its Batches share. Lives until the last of them is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.hpp"
#include "manager/timeline.hpp"
#include "sparse/arena.hpp"
#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage/host_history.hpp"

namespace sparse_kvcm {

// Slots of a request's leases. A request that fits into one as a whole is all window: wholly
// resident, never fetched.
struct LeaseShape {
  std::int32_t cached_slots = 0;  // N; 0 = all window
  std::int32_t window_slots = 0;  // W
};

// Host history of all groups; the largest number where there is no larger one.
[[nodiscard]] std::int64_t history_bytes(const KvCacheManagerConfig& config);

class ManagerState {
 public:
  // REQUIRES: a checked config.
  ManagerState(const KvCacheManagerConfig& config, std::shared_ptr<Backend> backend,
               const KvCacheManagerOptions& options = {});

  // Throws InvalidState if `stream` is being captured: what follows must not be in a graph.
  void check_not_capturing(const char* function, Stream stream) const;
  // Throws InvalidArgument unless `group` is one of the config's.
  void check_group(const char* function, std::int32_t group) const;

  // Of a request with this need; `cached_slots` as in KvCacheOptions.
  [[nodiscard]] LeaseShape lease_shape(const KvCacheOptions& options) const;

  // Moves units between the arena and host history in all groups.
  void move_units(std::span<const ops::UnitMove> moves, ops::MoveDirection direction,
                  Stream stream);
  // Empties leases at `clock`.
  void reset_leases(std::span<const ops::LeaseReset> leases, std::uint32_t clock, Stream stream);
  [[nodiscard]] const ops::GroupMemory& memory(std::int32_t group) const {
    return memories_[static_cast<std::size_t>(group)];
  }
  [[nodiscard]] std::int32_t num_groups() const {
    return static_cast<std::int32_t>(config.groups.size());
  }

  const KvCacheManagerConfig config;
  const std::shared_ptr<Backend> backend;
  const std::shared_ptr<Storage> storage;  // host history, and whose pages are in use
  HostHistory history;
  Arena arena;
  Timeline timeline;
  std::vector<std::int32_t> layers;        // member layers, group by group
  std::vector<std::int32_t> layer_groups;  // [layers.size()]
  std::uint64_t next_batch_id = 1;

 private:
  std::vector<ops::GroupMemory> memories_;  // [num_groups]
};

}  // namespace sparse_kvcm
