#include "page_bytes.hpp"

#include <algorithm>
#include <cstring>

namespace sparse_kvcm::testing {
namespace {

constexpr std::uint32_t kPoison = 0xDEADBEEF;

}  // namespace

PageBytes::PageBytes(const KvCacheManager& manager, std::shared_ptr<Backend> backend)
    : storage_(manager.storage()), backend_(std::move(backend)) {
  const std::vector<LayerGroupDesc>& groups = storage_->layout().layer_groups();
  std::int64_t most = 4;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].life_cycle.is_sparse) continue;
    dense_groups_.push_back(static_cast<std::int32_t>(g));
    most = std::max(most, std::ranges::max(pool_bytes(static_cast<std::int32_t>(g))));
  }
  pinned_ = backend_->allocate_pinned(static_cast<std::size_t>(most));
}

const std::vector<std::int64_t>& PageBytes::pool_bytes(std::int32_t layer_group) const {
  const StorageLayout& layout = storage_->layout();
  const auto pools = static_cast<std::size_t>(
      layout.layer_groups()[static_cast<std::size_t>(layer_group)].pool_group);
  return layout.pool_groups()[pools].slot_bytes;
}

std::vector<std::uint32_t> PageBytes::words(const PageTag& tag, std::int32_t pool,
                                            std::int64_t bytes) const {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(bytes) / 4);
  std::uint32_t word = (tag.request + 1) * 0x9E3779B1U;
  word ^= static_cast<std::uint32_t>(tag.layer_group * 0x01000193 + tag.page * 0x10001 + pool);
  for (std::uint32_t& w : words) w = word = word * 1664525U + 1013904223U;
  return words;
}

std::byte* PageBytes::place(std::int32_t layer_group, std::int32_t pool, std::int32_t slot) const {
  const LayerGroupDesc& group =
      storage_->layout().layer_groups()[static_cast<std::size_t>(layer_group)];
  return storage_->pool_memory(group.pool_group, pool).device_data +
         slot * pool_bytes(layer_group)[static_cast<std::size_t>(pool)];
}

void PageBytes::write(std::int32_t slot, const PageTag& tag) const {
  const std::vector<std::int64_t>& pools = pool_bytes(tag.layer_group);
  for (std::int32_t pool = 0; std::cmp_less(pool, pools.size()); ++pool) {
    const auto data = words(tag, pool, pools[static_cast<std::size_t>(pool)]);
    const Upload upload{place(tag.layer_group, pool, slot), data.data(), data.size() * 4};
    backend_->upload({&upload, 1}, 0);
  }
  backend_->synchronize(*backend_->record(0));
}

bool PageBytes::holds(std::int32_t slot, const PageTag& tag) const {
  const std::vector<std::int64_t>& pools = pool_bytes(tag.layer_group);
  for (std::int32_t pool = 0; std::cmp_less(pool, pools.size()); ++pool) {
    const auto data = words(tag, pool, pools[static_cast<std::size_t>(pool)]);
    backend_->download(*pinned_, place(tag.layer_group, pool, slot), data.size() * 4, 0);
    backend_->synchronize(*backend_->record(0));
    if (std::memcmp(pinned_->data(), data.data(), data.size() * 4) != 0) return false;
  }
  return true;
}

void PageBytes::poison(std::int32_t layer_group, std::int32_t slot) const {
  const std::vector<std::int64_t>& pools = pool_bytes(layer_group);
  for (std::int32_t pool = 0; std::cmp_less(pool, pools.size()); ++pool) {
    const std::vector<std::uint32_t> data(
        static_cast<std::size_t>(pools[static_cast<std::size_t>(pool)]) / 4, kPoison);
    const Upload upload{place(layer_group, pool, slot), data.data(), data.size() * 4};
    backend_->upload({&upload, 1}, 0);
  }
  backend_->synchronize(*backend_->record(0));
}

void PageBytes::write_all(const KvCache& cache, std::uint32_t request) const {
  for (const std::int32_t group : dense_groups_) {
    const std::vector<std::int32_t> table = cache.get_base_page_indices(group);
    for (std::int32_t page = 0; std::cmp_less(page, table.size()); ++page) {
      const std::int32_t slot = table[static_cast<std::size_t>(page)];
      if (slot >= 0) write(slot, {request, group, page});
    }
  }
}

bool PageBytes::holds_all(const KvCache& cache, std::uint32_t request) const {
  const std::int32_t tokens = storage_->config().tokens_per_block;
  const std::int32_t history = cache.history_length();
  for (const std::int32_t group : dense_groups_) {
    const std::vector<std::int32_t> table = cache.get_base_page_indices(group);
    for (std::int32_t page = 0; std::cmp_less(page, table.size()) && page * tokens < history;
         ++page) {
      const std::int32_t slot = table[static_cast<std::size_t>(page)];
      if (slot >= 0 && !holds(slot, {request, group, page})) return false;
    }
  }
  return true;
}

}  // namespace sparse_kvcm::testing
