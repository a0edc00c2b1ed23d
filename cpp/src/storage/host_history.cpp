#include "storage/host_history.hpp"

#include <cstring>
#include <numeric>

#include "core/rounding.hpp"

namespace sparse_kvcm {

HostHistory::HostHistory(const KvCacheManagerConfig& config, Backend& backend)
    : units_per_page_(config.units_per_page()),
      page_ids_(static_cast<std::int32_t>(config.host_pages)) {
  for (const SelectionGroupConfig& group : config.groups) {
    Pool pool;
    pool.row = pack_host_row(group.layout, static_cast<std::int32_t>(group.layers.size()));
    const std::vector<std::int32_t>& regions = group.layout.region_bytes();
    for (const HostPiece& piece : pool.row.pieces) {
      pool.source_offsets.push_back(
          std::accumulate(regions.begin(), regions.begin() + piece.region, 0));
    }
    pool.memory = backend.allocate_pinned(
        static_cast<std::size_t>(config.host_pages * units_per_page_ * pool.row.unit_bytes));
    pools_.push_back(std::move(pool));
  }
}

const HostRowLayout& HostHistory::row_layout(std::int32_t group) const {
  return pools_[static_cast<std::size_t>(group)].row;
}

const BufferPtr& HostHistory::pool(std::int32_t group) const {
  return pools_[static_cast<std::size_t>(group)].memory;
}

std::int64_t HostHistory::host_unit(const std::vector<std::int32_t>& pages,
                                    std::int32_t ordinal) const {
  const auto page = static_cast<std::size_t>(ordinal / units_per_page_);
  return std::int64_t{pages[page]} * units_per_page_ + ordinal % units_per_page_;
}

std::int32_t HostHistory::pages_for(std::int32_t units) const {
  return ceil_div(units, units_per_page_);
}

void HostHistory::write(std::int32_t group, std::span<const UnitRows> layers,
                        const std::vector<std::int32_t>& pages, std::int32_t first,
                        std::int32_t num_units) {
  const Pool& pool = pools_[static_cast<std::size_t>(group)];
  for (std::int32_t i = 0; i < num_units; ++i) {
    std::byte* row = pool.memory->data() + host_unit(pages, first + i) * pool.row.unit_bytes;
    for (std::size_t p = 0; p < pool.row.pieces.size(); ++p) {
      const HostPiece& piece = pool.row.pieces[p];
      const UnitRows& source = layers[static_cast<std::size_t>(piece.member)];
      std::memcpy(row + piece.offset, source.data + i * source.row_stride + pool.source_offsets[p],
                  static_cast<std::size_t>(piece.bytes));
    }
  }
}

}  // namespace sparse_kvcm
