// The pinned host pools that hold every unit below the watermark: one pool per selection group,
// [pages, units_per_page, host_unit_bytes], unit-major (unit_layout.hpp). One page id serves the
// same page in every group's pool.
//
// Owns the memory and the page ids. Thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/kv_cache.hpp"
#include "storage/page_allocator.hpp"

namespace sparse_kvcm {

class HostHistory {
 public:
  // `progress` is told of the pools of all groups together. Throws HostMemoryError if the memory is
  // not there, and what `progress` throws. REQUIRES: a checked config.
  HostHistory(const KvCacheManagerConfig& config, Backend& backend,
              const FillProgress& progress = {});

  [[nodiscard]] PageAllocator& page_ids() { return page_ids_; }
  [[nodiscard]] const PageAllocator& page_ids() const { return page_ids_; }
  [[nodiscard]] const HostRowLayout& row_layout(std::int32_t group) const;
  [[nodiscard]] const BufferPtr& pool(std::int32_t group) const;
  // What did not go as wished when the pools were made, a sentence each, none twice.
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }

  // The host unit of `ordinal` in a request with these pages.
  [[nodiscard]] std::int64_t host_unit(const std::vector<std::int32_t>& pages,
                                       std::int32_t ordinal) const;
  [[nodiscard]] std::int32_t pages_for(std::int32_t units) const;

  // Packs units [first, first + num_units) of one group into its pool; `layers` has one element
  // per member layer. On the calling thread; returns when done.
  void write(std::int32_t group, std::span<const UnitRows> layers,
             const std::vector<std::int32_t>& pages, std::int32_t first, std::int32_t num_units);

 private:
  struct Pool {
    HostRowLayout row;
    std::vector<std::int32_t> source_offsets;  // of each piece within a row of UnitRows
    std::size_t page_bytes = 0;
    BufferPtr memory;
  };
  void allocate(Backend& backend, std::size_t num_pages, const FillProgress& progress);

  std::int32_t units_per_page_;
  std::vector<Pool> pools_;  // [num_groups]
  PageAllocator page_ids_;
  std::vector<std::string> warnings_;
};

}  // namespace sparse_kvcm
