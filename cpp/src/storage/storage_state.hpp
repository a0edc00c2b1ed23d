// What a Storage and the RequestPages on it share. Lives until the last of them is gone.
//
// One lock guards all that changes. Storage takes it in every call but wait_usable. RequestPages
// take it too, unless the storage has an owner: he holds it in all that he does with them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage/pool_group.hpp"

namespace sparse_kvcm {

struct SlotOfGroup {
  std::int32_t layer_group = 0;
  std::int32_t slot = 0;
  bool is_cold = false;  // it lies in the cold pools
};

class StorageState {
 public:
  StorageState(const StorageConfig& config, std::shared_ptr<Backend> backend,
               const StorageOptions& options = {});
  ~StorageState() { stop_filling(); }
  StorageState(const StorageState&) = delete;
  StorageState& operator=(const StorageState&) = delete;

  [[nodiscard]] std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  [[nodiscard]] std::unique_lock<std::mutex> lock_unless_owned() {
    return owner_ == nullptr ? lock() : std::unique_lock<std::mutex>();
  }

  // As Storage's. All that follows expects the lock, but for wait_usable, the checks and warnings.
  void resize(std::int32_t level, std::int64_t quota);
  void trim();
  void wait_usable(std::int32_t level) const;
  [[nodiscard]] PoolGroupStatistics statistics(std::int32_t pool_group);
  void check_level(const char* function, std::int32_t level) const;
  // Throws InvalidState if the storage has an owner.
  void check_free(const char* function) const;
  [[nodiscard]] std::vector<std::string> warnings() const;

  // Adds to a layer group's counters, if pages are counted.
  void count(std::int32_t layer_group, const LayerGroupStatistics& more);

  // Returns dense slots for reuse after the work that `stream` had. If the device cannot record
  // that point, they stay in use, and settle() tries again.
  void give_back(Stream stream, std::vector<SlotOfGroup> slots) noexcept;
  void settle();

  // Where the pages of a layer group live.
  [[nodiscard]] PoolGroup& home(std::int32_t layer_group) {
    const LayerGroupDesc& group = layout.layer_groups()[static_cast<std::size_t>(layer_group)];
    return pool_groups[static_cast<std::size_t>(group.pool_group)];
  }

  // Where they go while a request is suspended. REQUIRES: it has such a place.
  [[nodiscard]] PoolGroup& cold_home(std::int32_t layer_group) {
    const LayerGroupDesc& group = layout.layer_groups()[static_cast<std::size_t>(layer_group)];
    return pool_groups[static_cast<std::size_t>(group.cold_pool_group)];
  }

  const StorageLayout layout;
  const std::shared_ptr<Backend> backend;
  std::vector<PoolGroup> pool_groups;
  std::vector<std::int64_t> quotas;            // [num_levels]
  std::vector<LayerGroupStatistics> counters;  // [num_layer_groups]

 private:
  class Warnings;
  struct Return {
    Stream stream;
    std::vector<SlotOfGroup> slots;
  };

  [[nodiscard]] bool try_release(const Return& given);
  void make_pool_groups();
  void fill_at_once(const FillProgress& progress);
  void check_memory(std::int32_t level, const std::vector<std::int64_t>& slots) const;
  void grow(std::int32_t level, const std::vector<std::int64_t>& slots);
  void trim_if_possible() noexcept;
  void start_filling() noexcept;
  void stop_filling() noexcept;
  void check_indices(const std::vector<std::int64_t>& slots) const;

  std::mutex mutex_;
  std::vector<Return> unsettled_;
  const char* owner_;
  std::shared_ptr<Warnings> warnings_;  // drivers have it too
  std::shared_ptr<Filler> filler_;
  bool in_background_;                    // what is not filled
  std::vector<std::int64_t> max_quotas_;  // [num_levels]
};

}  // namespace sparse_kvcm
