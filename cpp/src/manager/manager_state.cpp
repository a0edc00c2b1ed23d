#include "manager/manager_state.hpp"

#include <algorithm>
#include <exception>
#include <limits>

#include "core/check.hpp"
#include "core/host_limits.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kOwner = "KvCacheManager";

// What does not fit as a whole is refused before sizes that no machine has are computed with.
std::shared_ptr<Storage> make_storage(const KvCacheManagerConfig& config,
                                      const std::shared_ptr<Backend>& backend,
                                      const KvCacheManagerOptions& options) {
  check_host_memory(kOwner, static_cast<std::size_t>(history_bytes(config)));
  return std::make_shared<Storage>(storage_config(config), backend,
                                   StorageOptions{StorageFill::kAtOnce, options.progress, kOwner});
}

}  // namespace

std::int64_t history_bytes(const KvCacheManagerConfig& config) {
  std::int64_t total = 0;
  for (const SelectionGroupConfig& group : config.groups) {
    const HostRowLayout row =
        pack_host_row(group.layout, static_cast<std::int32_t>(group.layers.size()));
    total = capped_sum(total, row.unit_bytes * config.units_per_page() * config.host_pages);
  }
  return total;
}

ManagerState::ManagerState(const KvCacheManagerConfig& checked_config,
                           std::shared_ptr<Backend> chosen_backend,
                           const KvCacheManagerOptions& options)
    : config(checked_config),
      backend(std::move(chosen_backend)),
      storage(make_storage(config, backend, options)),
      history(*storage->state()),
      arena(config, *backend),
      timeline(*backend) {
  for (std::int32_t group = 0; group < num_groups(); ++group) {
    for (const std::int32_t layer : config.groups[static_cast<std::size_t>(group)].layers) {
      layers.push_back(layer);
      layer_groups.push_back(group);
    }
    memories_.push_back({arena.pieces(group), history.pool(group).device_data,
                         history.row_layout(group).unit_bytes, config.host_pages, arena.num_slots(),
                         config.units_per_page()});
    for (const ops::Piece& piece : memories_.back().pieces) unit_bytes_ += piece.bytes;
  }
}

std::unique_lock<std::mutex> ManagerState::lock_for(const char* function) {
  std::unique_lock held = lock();
  if (!poison.empty()) throw CorruptedError(message(function, poison));
  return held;
}

void ManagerState::fence_failure(const char* function, Stream stream) noexcept {
  try {
    timeline.leave(stream);
  } catch (const std::exception& error) {
    if (!poison.empty()) return;
    poison = message(function, "the device failed, and so did the fence behind what it had begun (",
                     error.what(), "); close this manager and make another");
  }
}

void ManagerState::check_not_capturing(const char* function, Stream stream) const {
  if (backend->is_capturing(stream)) {
    fail_state(function, "the stream is being captured; call it outside of the graph");
  }
}

void ManagerState::check_group(const char* function, std::int32_t group) const {
  if (group < 0 || group >= num_groups()) {
    fail_argument(function, "group must be in [0, ", num_groups(), "), got ", group);
  }
}

void ManagerState::check_layer_group(const char* function, std::int32_t layer_group) const {
  if (layer_group < 0 || layer_group >= num_layer_groups()) {
    fail_argument(function, "layer_group must be in [0, ", num_layer_groups(), "), got ",
                  layer_group);
  }
}

LeaseShape ManagerState::lease_shape(const KvCacheOptions& options) const {
  if (is_resident()) return {};
  const std::int32_t cached =
      options.cached_slots == -1 ? config.cached_slots : options.cached_slots;
  if (options.need > cached + config.window_slots) return {cached, config.window_slots};
  return {0, round_up(options.need, config.units_per_page())};
}

void ManagerState::move_units(std::span<const ops::UnitMove> moves, ops::MoveDirection direction,
                              Stream stream) {
  if (moves.empty()) return;
  backend->move_units({moves, memories_, direction}, stream);
  const auto count = static_cast<std::int64_t>(moves.size());
  const bool to_host = direction == ops::MoveDirection::kArenaToHost;
  (to_host ? copies.units_to_host : copies.units_to_gpu) += count;
  (to_host ? copies.bytes_to_host : copies.bytes_to_gpu) += count * unit_bytes_;
}

void ManagerState::reset_leases(std::span<const ops::LeaseReset> leases, std::uint32_t clock,
                                Stream stream) {
  if (!leases.empty()) backend->reset_leases(arena.reset_params(leases, clock), stream);
}

}  // namespace sparse_kvcm
