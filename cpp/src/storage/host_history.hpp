// Host history as the engine sees it: the sparse pool group of a Storage, one pool per selection
// group, [pages, units_per_page, host_unit_bytes], unit-major (unit_layout.hpp). One page id serves
// the same page in every group's pool.
//
// Thread-compatible. REQUIRES: the storage outlives it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/repack.hpp"
#include "sparse_kvcm/kv_cache.hpp"
#include "sparse_kvcm/memory_view.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {

class HostHistory {
 public:
  // Of a storage whose pools are filled. Without sparse layers there is no history: taking pages
  // succeeds, and takes none.
  explicit HostHistory(StorageState& storage);

  // The sparse layer group; -1 = none.
  [[nodiscard]] std::int32_t layer_group() const { return layer_group_; }
  [[nodiscard]] const HostRowLayout& row_layout(std::int32_t group) const;
  // [pages, units_per_page, host_unit_bytes]
  [[nodiscard]] MemoryView pool(std::int32_t group) const;
  [[nodiscard]] std::int32_t num_free_pages() const {
    return layer_group_ < 0 ? 0 : pool_group().num_free();
  }
  [[nodiscard]] std::int64_t bytes() const;

  // The host unit of `ordinal` in a request with these pages.
  [[nodiscard]] std::int64_t host_unit(std::span<const std::int32_t> pages,
                                       std::int32_t ordinal) const;

  // Appends pages until there are enough for `units`, or none is free; false then. `need` is the
  // most units that the request may ever have. Never gives any back.
  bool take_pages(std::vector<std::int32_t>& pages, std::int32_t units, std::int32_t need);
  // Gives back all but the first `kept` pages; those behind the ones that `units` need.
  void keep_pages(std::vector<std::int32_t>& pages, std::int32_t kept);
  void trim_pages(std::vector<std::int32_t>& pages, std::int32_t units);

  // Pack units [first, first + num_units) of one group into its pool. On the calling thread; return
  // when done. Without the lock if `pages`, those of the request, belong to the caller.
  // `layers` [members].
  void write(std::int32_t group, std::span<const UnitRows> layers,
             std::span<const std::int32_t> pages, std::int32_t first, std::int32_t num_units) const;
  void write(std::int32_t group, const HistoryPages& source,
             std::span<const std::int32_t> pages) const;

 private:
  struct Pool {
    HostRowLayout row;
    std::vector<std::int32_t> source_offsets;  // of each piece within a row of UnitRows
    std::shared_ptr<MappedRange> memory;
  };

  [[nodiscard]] PoolGroup& pool_group() const { return storage_.home(layer_group_); }
  void write(std::int32_t group, std::span<const PieceSource> sources, std::int32_t units_per_page,
             std::span<const std::int32_t> pages, std::int32_t first, std::int32_t num_units) const;

  StorageState& storage_;
  std::int32_t layer_group_;  // the sparse one
  std::int32_t units_per_page_;
  std::vector<Pool> pools_;  // [num_groups]
};

}  // namespace sparse_kvcm
