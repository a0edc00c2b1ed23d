// What a Storage and the RequestPages on it share. Lives until the last of them is gone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage/pool_group.hpp"

namespace sparse_kvcm {

class StorageState {
 public:
  StorageState(const StorageConfig& config, std::shared_ptr<Backend> backend);
  ~StorageState() { stop_filling(); }
  StorageState(const StorageState&) = delete;
  StorageState& operator=(const StorageState&) = delete;

  // As Storage's.
  void resize(std::int32_t level, std::int64_t quota);
  void trim();
  void wait_usable(std::int32_t level);
  [[nodiscard]] PoolGroupStatistics statistics(std::int32_t pool_group);
  void check_level(const char* function, std::int32_t level) const;

  // Where the pages of a layer group live.
  [[nodiscard]] PoolGroup& home(std::int32_t layer_group) {
    const LayerGroupDesc& group = layout.layer_groups()[static_cast<std::size_t>(layer_group)];
    return pool_groups[static_cast<std::size_t>(group.pool_group)];
  }

  const StorageLayout layout;
  const std::shared_ptr<Backend> backend;
  std::vector<PoolGroup> pool_groups;
  std::vector<std::int64_t> quotas;            // [num_levels]
  std::vector<LayerGroupStatistics> counters;  // [num_layer_groups]

 private:
  void make_pool_groups();
  void start_filling() noexcept;
  void stop_filling() noexcept;
  void check_indices(const std::vector<std::int64_t>& slots) const;

  std::vector<std::int64_t> max_quotas_;  // [num_levels]
};

}  // namespace sparse_kvcm
