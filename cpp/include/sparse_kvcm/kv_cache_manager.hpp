// The KvCacheManager owns host history, the arena and all metadata, and makes requests and Batches.
//
// All memory is taken at construction and given back at destruction, which waits until the last
// request and Batch is gone.
//
// Thread-safe with its requests and Batches: each call holds the manager's one lock, and none waits
// for a device under it unless it says so. A single request, and a single Batch, belongs to one
// thread at a time; a Batch and the requests in it count as one. storage() is to look at from the
// thread that has no other call running.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sparse_kvcm/batch.hpp"
#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/kv_cache.hpp"
#include "sparse_kvcm/memory_view.hpp"
#include "sparse_kvcm/storage.hpp"

namespace sparse_kvcm {

class ManagerState;  // src/manager

struct MemoryUse {
  std::int64_t arena_bytes = 0;     // device: leases of all member layers, trash page included
  std::int64_t metadata_bytes = 0;  // device: entries and clocks of all groups
  std::int64_t dense_bytes = 0;     // device: pools of dense layers
  std::int64_t host_bytes = 0;      // pinned host history
  std::int64_t cold_bytes = 0;      // pinned host memory for dense pages of suspended requests
  friend bool operator==(const MemoryUse&, const MemoryUse&) = default;
};

// What a manager of `config` will hold: what its memory_use() says once it is made. Takes no
// memory.
// Throws InvalidArgument for a bad config.
[[nodiscard]] MemoryUse planned_memory(const KvCacheManagerConfig& config);

// Pages and slots in use; equal to a fresh manager's once every request is closed.
struct Occupancy {
  std::int64_t free_host_pages = 0;
  std::int64_t free_arena_slots = 0;
  std::int64_t largest_free_arena_run = 0;  // in slots: the largest lease that can be had now
  std::int32_t free_leases = 0;
};

// A pool group on the GPU or on the host, and how full it is.
struct PoolGroupUse {
  PoolGroupStatistics slots;
  std::int32_t level = 0;
  double utilization = 0;  // unavailable / total, what max_util_for_resume bounds on the GPU
};

// What was physically copied between the GPU and the host since the last call, fetches apart, whose
// counts are on the device. Units count once for all member layers.
struct CopyStatistics {
  std::int64_t pages_to_host = 0;  // of dense layer groups, by suspend
  std::int64_t pages_to_gpu = 0;   // by resume
  std::int64_t units_to_host = 0;  // flushed by publish and suspend
  std::int64_t units_to_gpu = 0;   // loaded into windows
  std::int64_t bytes_to_host = 0;
  std::int64_t bytes_to_gpu = 0;
  friend bool operator==(const CopyStatistics&, const CopyStatistics&) = default;
};

class KvCacheManager {
 public:
  // Host history is touched and pinned here, at some 10 GB/s; options.progress tells how far it is.
  // Throws InvalidArgument for a bad config, NotAvailable for a device that is not there,
  // HostMemoryError if host memory lacks, DeviceMemoryError if device memory does, and what
  // options.progress throws. Nothing stays behind.
  explicit KvCacheManager(const KvCacheManagerConfig& config,
                          const KvCacheManagerOptions& options = {});
  // On a state that was made elsewhere, for tests with a backend of their own.
  explicit KvCacheManager(std::shared_ptr<ManagerState> state);
  ~KvCacheManager();
  KvCacheManager(const KvCacheManager&) = delete;
  KvCacheManager& operator=(const KvCacheManager&) = delete;

  // A SUSPENDED request without history. Takes no memory yet.
  // Throws InvalidArgument for a need outside [1, kMaxUnits] or of more than 2^31 - 1 tokens,
  // cached_slots that are not a multiple of a page or below the largest top_k (unless the lease is
  // all window), or a lease larger than the arena.
  [[nodiscard]] std::shared_ptr<KvCache> create_kv_cache(const KvCacheOptions& options);
  // Throws InvalidArgument for bad options.
  [[nodiscard]] std::shared_ptr<Batch> create_batch(const BatchOptions& options);

  [[nodiscard]] const KvCacheManagerConfig& config() const;
  [[nodiscard]] std::int32_t num_groups() const;
  // Layer ids of all member layers, group by group, leader first: the order of import_history.
  [[nodiscard]] const std::vector<std::int32_t>& layers() const;
  // The group of a layer. Throws InvalidArgument for an unknown layer.
  [[nodiscard]] std::int32_t group_of(std::int32_t layer) const;
  // First slot of the trash page, which is never leased and may be written freely; a resident
  // manager has none, and says 0.
  [[nodiscard]] std::int32_t trash_slot() const;

  // The arena of one member layer, [arena_pages + 1, page_bytes]; the last page is trash.
  [[nodiscard]] MemoryView arena(std::int32_t layer) const;
  // Host history of one group, [host_pages, units_per_page, host_unit_bytes].
  [[nodiscard]] MemoryView host_history(std::int32_t group) const;

  // What did not go as wished at construction, a sentence each: host memory that is not on the
  // GPU's NUMA node, an environment variable that is not understood. The manager works, maybe
  // slower.
  [[nodiscard]] std::vector<std::string> warnings() const;

  // The storage of all layers, made from storage_config(config): to look at, and for the addresses
  // and index converters of dense layers. It has the manager as its owner, so it cannot be resized
  // and gives nobody else pages.
  [[nodiscard]] std::shared_ptr<const Storage> storage() const;

  [[nodiscard]] MemoryUse memory_use() const;
  [[nodiscard]] Occupancy occupancy() const;
  // All pool groups of the storage, in its order.
  [[nodiscard]] std::vector<PoolGroupUse> pool_group_use() const;
  [[nodiscard]] CopyStatistics get_and_reset_copy_statistics();

  // Why every call but close() raises CorruptedError from now on; empty if they do not.
  [[nodiscard]] std::string poison_reason() const;

  [[nodiscard]] const std::shared_ptr<ManagerState>& state() const { return state_; }

 private:
  std::shared_ptr<ManagerState> state_;
};

}  // namespace sparse_kvcm
