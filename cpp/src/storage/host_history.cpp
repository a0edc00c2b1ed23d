#include "storage/host_history.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

std::int32_t sparse_group(const StorageLayout& layout) {
  const auto found = std::ranges::find_if(layout.layer_groups(), [](const LayerGroupDesc& group) {
    return group.life_cycle.is_sparse;
  });
  if (found == layout.layer_groups().end()) return -1;
  return static_cast<std::int32_t>(found - layout.layer_groups().begin());
}

}  // namespace

HostHistory::HostHistory(StorageState& storage)
    : storage_(storage), layer_group_(sparse_group(storage.layout)) {
  const StorageConfig& config = storage.layout.config();
  units_per_page_ = config.tokens_per_block / config.tokens_per_unit;
  for (std::size_t g = 0; g < config.selection_groups.size(); ++g) {
    const SelectionGroupConfig& group = config.selection_groups[g];
    Pool pool;
    pool.row = pack_host_row(group.layout, static_cast<std::int32_t>(group.layers.size()));
    const std::vector<std::int32_t>& regions = group.layout.region_bytes();
    for (const HostPiece& piece : pool.row.pieces) {
      pool.source_offsets.push_back(
          std::accumulate(regions.begin(), regions.begin() + piece.region, 0));
    }
    pool.memory = pool_group().pool(static_cast<std::int32_t>(g));
    pools_.push_back(std::move(pool));
  }
}

const HostRowLayout& HostHistory::row_layout(std::int32_t group) const {
  return pools_[static_cast<std::size_t>(group)].row;
}

MemoryView HostHistory::pool(std::int32_t group) const {
  const Pool& pool = pools_[static_cast<std::size_t>(group)];
  return {pool.memory->address(),
          pool.memory->address(),
          {pool_group().num_slots(), units_per_page_, pool.row.unit_bytes},
          pool.memory};
}

std::int64_t HostHistory::bytes() const {
  std::int64_t bytes = 0;
  for (const Pool& pool : pools_) {
    bytes += pool.row.unit_bytes * units_per_page_ * pool_group().num_slots();
  }
  return bytes;
}

std::int64_t HostHistory::host_unit(std::span<const std::int32_t> pages,
                                    std::int32_t ordinal) const {
  const auto page = static_cast<std::size_t>(ordinal / units_per_page_);
  return std::int64_t{pages[page]} * units_per_page_ + ordinal % units_per_page_;
}

bool HostHistory::take_pages(std::vector<std::int32_t>& pages, std::int32_t units,
                             std::int32_t need) {
  if (layer_group_ < 0) return true;
  const std::size_t before = pages.size();
  const bool enough = pool_group().pages().grow(pages, ceil_div(units, units_per_page_),
                                                ceil_div(need, units_per_page_));
  storage_.count(layer_group_,
                 {static_cast<std::int64_t>(pages.size() - before), 0, enough ? 0 : 1});
  return enough;
}

void HostHistory::keep_pages(std::vector<std::int32_t>& pages, std::int32_t kept) {
  if (layer_group_ < 0) return;
  const std::size_t before = pages.size();
  pool_group().pages().shrink(pages, kept);
  storage_.count(layer_group_, {0, static_cast<std::int64_t>(before - pages.size()), 0});
}

void HostHistory::trim_pages(std::vector<std::int32_t>& pages, std::int32_t units) {
  keep_pages(pages, ceil_div(units, units_per_page_));
}

void HostHistory::write(std::int32_t group, std::span<const UnitRows> layers,
                        std::span<const std::int32_t> pages, std::int32_t first,
                        std::int32_t num_units) const {
  const Pool& pool = pools_[static_cast<std::size_t>(group)];
  std::vector<PieceSource> sources;
  for (std::size_t p = 0; p < pool.row.pieces.size(); ++p) {
    const UnitRows& layer = layers[static_cast<std::size_t>(pool.row.pieces[p].member)];
    sources.push_back({layer.data + pool.source_offsets[p], layer.row_stride, 0});
  }
  write(group, sources, std::max(num_units, 1), pages, first, num_units);
}

void HostHistory::write(std::int32_t group, const HistoryPages& source,
                        std::span<const std::int32_t> pages) const {
  const HostRowLayout& row = row_layout(group);
  const std::size_t members =
      storage_.layout.config().selection_groups[static_cast<std::size_t>(group)].layers.size();
  const std::size_t regions = source.regions.size() / members;
  std::vector<PieceSource> sources;
  for (const HostPiece& piece : row.pieces) {
    const RegionPages& from = source.regions[static_cast<std::size_t>(piece.member) * regions +
                                             static_cast<std::size_t>(piece.region)];
    sources.push_back({from.data, piece.bytes, from.page_stride});
  }
  write(group, sources, source.units_per_page, pages, source.first, source.num_units);
}

void HostHistory::write(std::int32_t group, std::span<const PieceSource> sources,
                        std::int32_t units_per_page, std::span<const std::int32_t> pages,
                        std::int32_t first, std::int32_t num_units) const {
  const Pool& pool = pools_[static_cast<std::size_t>(group)];
  for (std::int32_t done = 0; done < num_units;) {
    const std::int32_t ordinal = first + done;
    const std::int32_t left = units_per_page_ - ordinal % units_per_page_;
    const std::int32_t count = std::min(num_units - done, left);
    repack(pool.row, sources, units_per_page, done, count,
           pool.memory->address() + host_unit(pages, ordinal) * pool.row.unit_bytes);
    done += count;
  }
}

}  // namespace sparse_kvcm
