#include "storage/host_history.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/host_limits.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {

HostHistory::HostHistory(const KvCacheManagerConfig& config, Backend& backend,
                         const FillProgress& progress)
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
    pool.page_bytes = static_cast<std::size_t>(units_per_page_ * pool.row.unit_bytes);
    pools_.push_back(std::move(pool));
  }
  allocate(backend, static_cast<std::size_t>(config.host_pages), progress);
}

// What does not fit as a whole is refused before the first pool is touched.
void HostHistory::allocate(Backend& backend, std::size_t num_pages, const FillProgress& progress) {
  std::size_t total = 0;
  for (const Pool& pool : pools_) {
    const std::size_t bytes = num_pages * pool.page_bytes;
    total += std::min(bytes, std::numeric_limits<std::size_t>::max() - total);
  }
  check_host_memory("KvCacheManager", total);

  std::int64_t done = 0;
  PinnedOptions options;
  if (progress) {
    options.progress = [&](std::int64_t pool_done, std::int64_t) {
      progress(done + pool_done, static_cast<std::int64_t>(total));
    };
  }
  options.warn = [this](const std::string& warning) {
    const auto known = std::find(warnings_.begin(), warnings_.end(), warning);
    if (known == warnings_.end()) warnings_.push_back(warning);
  };
  for (Pool& pool : pools_) {
    options.page_bytes = pool.page_bytes;
    pool.memory = backend.allocate_pinned(num_pages * pool.page_bytes, options);
    done += static_cast<std::int64_t>(pool.memory->bytes());
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
