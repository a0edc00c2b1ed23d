#include "sparse_kvcm/storage.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {
namespace {

const StorageConfig& checked(const StorageConfig& config) {
  check(config);
  return config;
}

const BufferPlace& dense_place(const StorageState& state, const char* function,
                               std::int32_t layer_id, std::string_view role) {
  const BufferPlace& place = state.layout.place(layer_id, role);
  if (place.is_sparse) {
    fail_argument(function, "layer ", layer_id, "'s \"", role,
                  "\" is sparse: its pages are in host memory, unit by unit, and have no page "
                  "index; resolve and fetch bring its units to the arena");
  }
  return place;
}

std::byte* base(StorageState& state, const BufferPlace& place) {
  return state.pool_groups[static_cast<std::size_t>(place.pool_group)].pool(place.pool)->address();
}

}  // namespace

Storage::Storage(const StorageConfig& config, const StorageOptions& options)
    : Storage(checked(config), backend_for(config.device), options) {}
Storage::Storage(const StorageConfig& config, std::shared_ptr<Backend> backend,
                 const StorageOptions& options)
    : state_(std::make_shared<StorageState>(config, std::move(backend), options)) {}
Storage::~Storage() = default;

const StorageConfig& Storage::config() const { return state_->layout.config(); }
const StorageLayout& Storage::layout() const { return state_->layout; }

bool Storage::is_sparse(std::int32_t layer_id, std::string_view role) const {
  return state_->layout.place(layer_id, role).is_sparse;
}

bool Storage::supports_index_mode(std::int32_t layer_id, std::string_view role,
                                  PageIndexMode mode) const {
  const BufferPlace& place = state_->layout.place(layer_id, role);
  const LayerGroupDesc& group =
      state_->layout.layer_groups()[static_cast<std::size_t>(place.layer_group)];
  const bool scratch = config().swa_scratch_reuse && group.life_cycle.sliding_window_size;
  return !place.is_sparse && (mode == PageIndexMode::kPerLayer || !scratch);
}

PageIndexConverter Storage::get_page_index_converter(std::int32_t layer_id, std::string_view role,
                                                     PageIndexMode mode) const {
  constexpr const char* kFunction = "Storage.get_page_index_converter";
  PageIndexConverter converter = dense_place(*state_, kFunction, layer_id, role).converter;
  if (!supports_index_mode(layer_id, role, mode)) {
    fail_argument(kFunction, "mode must be PER_LAYER for layer ", layer_id,
                  ", a window with swa_scratch_reuse, got SHARED");
  }
  converter.mode = mode;
  return converter;
}

std::uintptr_t Storage::get_mem_pool_base_address(std::int32_t layer_id, std::string_view role,
                                                  PageIndexMode mode) const {
  constexpr const char* kFunction = "Storage.get_mem_pool_base_address";
  const BufferPlace& place = dense_place(*state_, kFunction, layer_id, role);
  static_cast<void>(get_page_index_converter(layer_id, role, mode));
  const auto address = reinterpret_cast<std::uintptr_t>(base(*state_, place));
  const bool shared = mode == PageIndexMode::kShared;
  return shared ? address + static_cast<std::uintptr_t>(place.offset_bytes()) : address;
}

std::int64_t Storage::get_page_stride(std::int32_t layer_id, std::string_view role) const {
  return dense_place(*state_, "Storage.get_page_stride", layer_id, role).page_bytes;
}

std::int32_t Storage::get_page_index_scale(std::int32_t layer_id, std::string_view role) const {
  return dense_place(*state_, "Storage.get_page_index_scale", layer_id, role).converter.scale;
}

std::int64_t Storage::get_page_index_upper_bound(std::int32_t layer_id,
                                                 std::string_view role) const {
  const BufferPlace& place =
      dense_place(*state_, "Storage.get_page_index_upper_bound", layer_id, role);
  const auto held = state_->lock();
  const std::int64_t slots =
      state_->pool_groups[static_cast<std::size_t>(place.pool_group)].num_addressed();
  const PageIndexConverter& converter = place.converter;
  return (converter.scale * slots - converter.position) * converter.expansion;
}

std::vector<std::vector<PoolDesc>> Storage::pool_group_descs() const {
  const auto held = state_->lock();
  std::vector<std::vector<PoolDesc>> descs;
  for (std::size_t g = 0; g < state_->pool_groups.size(); ++g) {
    const PoolGroupDesc& group = state_->layout.pool_groups()[g];
    const PoolGroup& memory = state_->pool_groups[g];
    std::vector<PoolDesc> pools;
    pools.reserve(group.slot_bytes.size());
    for (std::int32_t pool = 0; pool < memory.num_pools(); ++pool) {
      pools.push_back({reinterpret_cast<std::uintptr_t>(memory.pool(pool)->address()),
                       group.slot_bytes[static_cast<std::size_t>(pool)], memory.num_addressed(),
                       std::min(memory.num_addressed(), memory.num_filled()),
                       config().cache_tiers[static_cast<std::size_t>(group.level)].tier});
    }
    descs.push_back(std::move(pools));
  }
  return descs;
}

MemoryView Storage::pool_memory(std::int32_t pool_group, std::int32_t pool) const {
  const auto held = state_->lock();
  constexpr const char* kFunction = "Storage.pool_memory";
  const std::vector<PoolGroupDesc>& groups = state_->layout.pool_groups();
  if (pool_group < 0 || std::cmp_greater_equal(pool_group, groups.size())) {
    fail_argument(kFunction, "pool_group must be in [0, ", groups.size(), "), got ", pool_group);
  }
  const PoolGroup& group = state_->pool_groups[static_cast<std::size_t>(pool_group)];
  if (pool < 0 || pool >= group.num_pools()) {
    fail_argument(kFunction, "pool must be in [0, ", group.num_pools(), "), got ", pool);
  }
  const std::shared_ptr<MappedRange>& memory = group.pool(pool);
  const std::int64_t slot_bytes =
      groups[static_cast<std::size_t>(pool_group)].slot_bytes[static_cast<std::size_t>(pool)];
  return {memory->is_host_memory() ? memory->address() : nullptr,
          memory->address(),
          {group.num_addressed(), slot_bytes},
          memory};
}

std::shared_ptr<RequestPages> Storage::create_request_pages(std::int32_t expected_length) {
  if (expected_length < 0) {
    fail_argument("Storage.create_request_pages", "expected_length must be >= 0, got ",
                  expected_length);
  }
  state_->check_free("Storage.create_request_pages");
  return std::make_shared<RequestPages>(state_, expected_length);
}

std::vector<PoolGroupStatistics> Storage::get_storage_statistics(std::int32_t level) const {
  const auto held = state_->lock();
  state_->check_level("Storage.get_storage_statistics", level);
  std::vector<PoolGroupStatistics> all;
  for (std::size_t g = 0; g < state_->pool_groups.size(); ++g) {
    if (state_->layout.pool_groups()[g].level != level) continue;
    all.push_back(state_->statistics(static_cast<std::int32_t>(g)));
  }
  return all;
}

std::vector<LayerGroupStatistics> Storage::get_and_reset_statistics() {
  const auto held = state_->lock();
  std::vector<LayerGroupStatistics> fresh(state_->counters.size());
  return std::exchange(state_->counters, std::move(fresh));
}

std::int64_t Storage::get_num_bytes(std::int32_t level) const {
  const auto held = state_->lock();
  state_->check_level("Storage.get_num_bytes", level);
  std::int64_t bytes = 0;
  for (std::size_t g = 0; g < state_->pool_groups.size(); ++g) {
    if (state_->layout.pool_groups()[g].level == level) {
      bytes += state_->pool_groups[g].mapped_bytes();
    }
  }
  return bytes;
}

std::int64_t Storage::get_quota(std::int32_t level) const {
  const auto held = state_->lock();
  state_->check_level("Storage.get_quota", level);
  return state_->quotas[static_cast<std::size_t>(level)];
}

void Storage::resize(std::int32_t level, std::int64_t quota) {
  const auto held = state_->lock();
  state_->check_free("Storage.resize");
  state_->resize(level, quota);
}
void Storage::trim() {
  const auto held = state_->lock();
  state_->trim();
}

void Storage::wait_usable(std::int32_t level) const { state_->wait_usable(level); }

std::vector<std::string> Storage::warnings() const { return state_->warnings(); }

std::int32_t Storage::clamp_max_seq_len_for_mem(std::int32_t batch_size, std::int32_t upper) const {
  std::vector<std::int64_t> totals;
  {
    const auto held = state_->lock();
    for (const PoolGroup& group : state_->pool_groups) totals.push_back(group.num_slots());
  }
  return state_->layout.clamp_max_seq_len(totals, batch_size, upper);
}

}  // namespace sparse_kvcm
