// What a manager, its requests and its Batches share. Lives until the last of them is gone.
//
// The storage's lock guards all of it, requests and Batches included: the public classes take it,
// what lies behind them expects it taken.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "manager/timeline.hpp"
#include "sparse/arena.hpp"
#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/kv_cache_manager.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage/host_history.hpp"
#include "storage/storage_state.hpp"

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

  // Takes the lock for a call that changes something. Throws CorruptedError if the manager is
  // poisoned.
  [[nodiscard]] std::unique_lock<std::mutex> lock_for(const char* function);
  // Takes it to look, or to close.
  [[nodiscard]] std::unique_lock<std::mutex> lock() { return storage->state()->lock(); }
  // After device work that failed half-way on `stream`: it becomes a part of the order, or the
  // manager is poisoned.
  void fence_failure(const char* function, Stream stream) noexcept;

  // Throws InvalidState if `stream` is being captured: what follows must not be in a graph.
  void check_not_capturing(const char* function, Stream stream) const;
  // Throws InvalidArgument unless there is such a selection group, or layer group of the storage.
  void check_group(const char* function, std::int32_t group) const;
  void check_layer_group(const char* function, std::int32_t layer_group) const;

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
  [[nodiscard]] std::int32_t num_layer_groups() const {
    return static_cast<std::int32_t>(storage->layout().layer_groups().size());
  }
  // The layer group whose pages are in host history; -1 in a resident manager.
  [[nodiscard]] std::int32_t sparse_group() const { return history.layer_group(); }
  [[nodiscard]] bool is_resident() const { return config.is_resident(); }
  [[nodiscard]] bool has_dense_layers() const { return !config.dense_layers.empty(); }

  std::string poison;  // why the manager refuses to go on; empty = it does not
  CopyStatistics copies;

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
  std::int64_t unit_bytes_ = 0;             // of all groups, as moved
};

}  // namespace sparse_kvcm
