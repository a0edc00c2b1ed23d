// The device memory of a Batch: one allocation, fixed addresses.
//
//   row_states  RowState [max_rows]
//   page_table  int32 [max_rows, max_pages]
//   step        StepState [1]
//   row_errors  uint32 [num_groups, max_rows], then the batch error word, then the cursors of fetch,
//               [num_groups, 2]: all zero when a step begins
//   outputs     of resolve, per group
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.hpp"
#include "sparse_kvcm/batch.hpp"
#include "sparse_kvcm/config.hpp"

namespace sparse_kvcm {

// Refuses options that a Batch cannot have, in the name of `function`.
void check(const char* function, const KvCacheManagerConfig& config, const BatchOptions& options);

class BatchMemory {
 public:
  BatchMemory(const KvCacheManagerConfig& config, const BatchOptions& options, Backend& backend);

  // What the constructor allocates, and what steps will take of pinned memory.
  [[nodiscard]] static BatchMemoryUse planned_use(const KvCacheManagerConfig& config,
                                                  const BatchOptions& options);
  [[nodiscard]] BatchMemoryUse use() const;

  RowState* row_states = nullptr;
  std::int32_t* page_table = nullptr;
  std::int64_t max_pages = 0;
  StepState* step = nullptr;
  std::uint32_t* row_errors = nullptr;
  std::uint32_t* batch_error = nullptr;  // directly behind row_errors
  std::int64_t report_words = 0;         // errors, from row_errors on
  std::int64_t step_words = 0;           // errors and cursors, from row_errors on
  std::vector<ResolveOutputs> outputs;   // [num_groups]

 private:
  BatchMemory() = default;
  // Lays the arrays out, and says how many bytes they take. Without a `base` there are none.
  std::int64_t carve(const KvCacheManagerConfig& config, const BatchOptions& options,
                     std::byte* base);

  BufferPtr buffer_;
  std::int64_t staging_bytes_ = 0;
};

}  // namespace sparse_kvcm
