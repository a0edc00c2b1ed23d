// Storage owns the pools of all tiers and the slots in them.
//
// Every pool is one range of addresses, reserved once; memory is mapped at its end, in granules, so
// that tiers grow and shrink while no address moves and no live slot is touched. Memory of a slot
// is not zeroed. Host pools are touched and pinned first, in the background unless told otherwise:
// slots come into use as they are ready.
//
// Thread-safe, its RequestPages included: one lock, which every call takes as a whole, but for
// wait_usable, which holds up nobody. That of a KvCacheManager shares the manager's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sparse_kvcm/memory_view.hpp"
#include "sparse_kvcm/storage_layout.hpp"

namespace sparse_kvcm {

class Backend;       // src/backend
class RequestPages;  // request_pages.hpp
class StorageState;  // src/storage

struct PoolDesc {
  std::uintptr_t base_address = 0;  // on the device; for host memory that the host sees, the same
  std::int64_t slot_bytes = 0;
  std::int64_t num_slots =
      0;  // that there are, those that drain and those still to be filled included
  std::int64_t num_usable =
      0;  // the first of them, which are filled: nobody may touch the others yet
  CacheTier storage_medium = CacheTier::kGpuMem;
};

// Slots of one pool group. total = available + unavailable, available = free + evictable.
struct PoolGroupStatistics {
  std::int32_t pool_group = 0;
  std::vector<std::int64_t> slot_bytes;
  std::int64_t total = 0;
  std::int64_t free = 0;       // can be had now
  std::int64_t evictable = 0;  // 0 as long as no page outlives its request
  std::int64_t available = 0;
  std::int64_t unavailable = 0;
  std::int64_t draining = 0;  // of the unavailable: beyond the size that a shrink has set
  friend bool operator==(const PoolGroupStatistics&, const PoolGroupStatistics&) = default;
};

// Pages of one layer group since the last call, by count. For metrics. Slots of both tiers count as
// taken and returned; what was copied between them counts apart.
struct LayerGroupStatistics {
  std::int64_t num_taken = 0;
  std::int64_t num_returned = 0;
  std::int64_t num_refused = 0;         // calls that found too few
  std::int64_t num_copied_to_host = 0;  // pages that a suspend moved
  std::int64_t num_copied_to_gpu = 0;   // and a resume
  LayerGroupStatistics& operator+=(const LayerGroupStatistics& more) {
    num_taken += more.num_taken;
    num_returned += more.num_returned;
    num_refused += more.num_refused;
    num_copied_to_host += more.num_copied_to_host;
    num_copied_to_gpu += more.num_copied_to_gpu;
    return *this;
  }
  friend bool operator==(const LayerGroupStatistics&, const LayerGroupStatistics&) = default;
};

// When host pools are filled, by as many threads as there are cores. kAtOnce: by construction.
// kInBackground: while the Storage is there already; what a resize adds is always filled so.
enum class StorageFill : std::uint8_t { kInBackground, kAtOnce };

// What a Storage is told about its own making.
struct StorageOptions {
  StorageFill fill = StorageFill::kInBackground;
  FillProgress progress = nullptr;  // over all host pools, with kAtOnce; may be empty
  // Who alone changes it, a string that outlives it, or null: others can only look, and its size is
  // fixed, so that copies between host pages and a GPU never cross two registrations.
  const char* owner = nullptr;
};

class Storage {
 public:
  // Throws InvalidArgument for a bad config or one whose page indices exceed 31 bits, NotAvailable
  // for a device that is not there, HostMemoryError or DeviceMemoryError if memory lacks, and what
  // options.progress throws; all of it or nothing.
  explicit Storage(const StorageConfig& config, const StorageOptions& options = {});
  // On a backend that was made elsewhere, for tests.
  Storage(const StorageConfig& config, std::shared_ptr<Backend> backend,
          const StorageOptions& options = {});
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  [[nodiscard]] const StorageConfig& config() const;
  [[nodiscard]] const StorageLayout& layout() const;

  // Addressing, for dense buffers. All throw InvalidArgument for an unknown layer or role, and for
  // a sparse buffer: its pages are on the host, unit by unit, where no kernel index reaches;
  // resolve and fetch bring units to the arena.
  //
  // What page indices of `mode` count from.
  [[nodiscard]] std::uintptr_t get_mem_pool_base_address(std::int32_t layer_id,
                                                         std::string_view role,
                                                         PageIndexMode mode) const;
  // Bytes from page index to page index.
  [[nodiscard]] std::int64_t get_page_stride(std::int32_t layer_id, std::string_view role) const;
  // Pages of that buffer's size per slot.
  [[nodiscard]] std::int32_t get_page_index_scale(std::int32_t layer_id,
                                                  std::string_view role) const;
  // Page indices of mode SHARED are below it: the pages from that mode's address to the end of the
  // pool, slots that drain included.
  [[nodiscard]] std::int64_t get_page_index_upper_bound(std::int32_t layer_id,
                                                        std::string_view role) const;
  // Throws InvalidArgument too where supports_index_mode() is false.
  [[nodiscard]] PageIndexConverter get_page_index_converter(std::int32_t layer_id,
                                                            std::string_view role,
                                                            PageIndexMode mode) const;
  // SHARED is not for windows with scratch reuse: where a scratch page lies depends on the layer.
  [[nodiscard]] bool supports_index_mode(std::int32_t layer_id, std::string_view role,
                                         PageIndexMode mode) const;
  // Throws InvalidArgument for an unknown layer or role.
  [[nodiscard]] bool is_sparse(std::int32_t layer_id, std::string_view role) const;

  // Pools of each pool group, [num_pool_groups][pools].
  [[nodiscard]] std::vector<std::vector<PoolDesc>> pool_group_descs() const;
  // Memory of one pool, [num_slots, slot_bytes] as in its PoolDesc. Slots at or beyond num_usable
  // must not be touched yet, those that a later shrink takes away not any more. Throws
  // InvalidArgument for an unknown pool.
  [[nodiscard]] MemoryView pool_memory(std::int32_t pool_group, std::int32_t pool) const;

  // A request without pages. Throws InvalidArgument for a negative length, InvalidState if the
  // storage has an owner.
  // `expected_length`: tokens that it may ever have, which keeps its host pages in one run; a hint.
  [[nodiscard]] std::shared_ptr<RequestPages> create_request_pages(
      std::int32_t expected_length = 0);

  // Capacity. All throw InvalidArgument for an unknown level.
  //
  // Every pool group with slots at `level`, in the order of the layout. Looks at what has become
  // free or been filled by now, which is why it takes the lock as changes do.
  [[nodiscard]] std::vector<PoolGroupStatistics> get_storage_statistics(std::int32_t level) const;
  // [num_layer_groups]; zeroes unless the config has enable_stats.
  [[nodiscard]] std::vector<LayerGroupStatistics> get_and_reset_statistics();
  // Bytes that are mapped: the quota's, less what max_host_pages leaves of it, and those that still
  // drain.
  [[nodiscard]] std::int64_t get_num_bytes(std::int32_t level) const;
  [[nodiscard]] std::int64_t get_quota(std::int32_t level) const;
  // Gives a tier another quota: raised to the least and to granules as at construction, and divided
  // by the same ratio. Pool groups that grow do so at once, or nothing changes and
  // DeviceMemoryError or HostMemoryError is thrown. Those that shrink give up free slots at once
  // and others as they come back; their memory goes back at trim() or the next resize, as does what
  // a device that fails does not let go of.
  // Waits for the device if memory is unmapped.
  // Throws InvalidArgument if quota < 1 or it becomes more than max_quota, HostMemoryError if the
  // machine, a control group or memlock does not allow it, InvalidState if the storage has an
  // owner.
  void resize(std::int32_t level, std::int64_t quota);
  // Unmaps what shrinking has drained. Waits for the device if there is something; throws
  // std::runtime_error, and changes nothing, if it fails.
  void trim();
  // Waits until the pools of a level are filled, as far as a resize meanwhile leaves them. Throws
  // HostMemoryError if the machine ran out of memory on the way, or it could not be pinned; slots
  // up to there stay in use.
  void wait_usable(std::int32_t level) const;

  // The longest sequence, at most `upper`, that fits beside `batch_size` - 1 requests of one token,
  // as StorageLayout::clamp_max_seq_len says, into the total slots, not the free ones. 0 if none
  // does.
  // Throws InvalidArgument if batch_size < 1 or upper < 0.
  [[nodiscard]] std::int32_t clamp_max_seq_len_for_mem(std::int32_t batch_size,
                                                       std::int32_t upper) const;

  // What did not go as wished so far, a sentence each, none twice: host memory that is not on the
  // GPU's NUMA node, an environment variable that is not understood.
  [[nodiscard]] std::vector<std::string> warnings() const;

  [[nodiscard]] const std::shared_ptr<StorageState>& state() const { return state_; }

 private:
  std::shared_ptr<StorageState> state_;
};

}  // namespace sparse_kvcm
