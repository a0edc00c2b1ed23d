// The device memory of a Batch: one allocation, fixed addresses.
//
//   row_states  RowState [max_rows]
//   page_tables int32 [num_layer_groups, max_rows, max_pages]
//   page_counts int32 [num_layer_groups, max_rows]
//   step        StepState [1]
//   row_errors  uint32 [num_groups, max_rows], then the batch error word, then the cursors of
//   fetch,
//               [num_groups, 2]: all zero when a step begins
//   outputs     of resolve, per group
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/batch.hpp"
#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/storage_layout.hpp"

namespace sparse_kvcm {

// Refuses options that a Batch cannot have, in the name of `function`.
void check(const char* function, const KvCacheManagerConfig& config, const BatchOptions& options);

class BatchMemory {
 public:
  // `layout` is that of the manager's storage.
  BatchMemory(const KvCacheManagerConfig& config, const BatchOptions& options,
              const StorageLayout& layout, Backend& backend);

  // What the constructor allocates, and what steps will take of pinned memory.
  [[nodiscard]] static BatchMemoryUse planned_use(const KvCacheManagerConfig& config,
                                                  const BatchOptions& options);
  [[nodiscard]] BatchMemoryUse use() const;

  // The allocation as 32-bit words; all members lie in it.
  [[nodiscard]] std::int32_t* words() const {
    return reinterpret_cast<std::int32_t*>(buffer_->device_data());
  }
  // Of one row in one layer group.
  [[nodiscard]] std::int32_t* table(std::int32_t layer_group, std::int32_t row) const {
    return page_tables + (std::int64_t{layer_group} * max_rows + row) * max_pages;
  }
  [[nodiscard]] std::int32_t* count(std::int32_t layer_group, std::int32_t row) const {
    return page_counts + std::int64_t{layer_group} * max_rows + row;
  }

  std::int32_t max_rows = 0;
  std::int32_t num_layer_groups = 0;
  std::int32_t sparse_group = -1;  // the layer group whose pages are in host history; -1 = none
  std::int64_t max_pages = 0;
  RowState* row_states = nullptr;
  std::int32_t* page_tables = nullptr;
  std::int32_t* page_counts = nullptr;
  StepState* step = nullptr;
  std::uint32_t* row_errors = nullptr;
  std::uint32_t* batch_error = nullptr;  // directly behind row_errors
  std::int64_t report_words = 0;         // errors, from row_errors on
  std::int64_t step_words = 0;           // errors and cursors, from row_errors on
  std::vector<ResolveOutputs> outputs;   // [num_groups]

 private:
  // Without memory.
  BatchMemory(const KvCacheManagerConfig& config, const BatchOptions& options,
              const StorageLayout& layout);
  // Lays the arrays out, and says how many bytes they take. Without a `base` there are none.
  std::int64_t carve(const KvCacheManagerConfig& config, std::byte* base);
  [[nodiscard]] std::int64_t staging_bytes() const;

  BufferPtr buffer_;
};

}  // namespace sparse_kvcm
