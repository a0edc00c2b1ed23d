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

class BatchMemory {
 public:
  BatchMemory(const KvCacheManagerConfig& config, const BatchOptions& options, Backend& backend);

  RowState* row_states = nullptr;
  std::int32_t* page_table = nullptr;
  std::int64_t max_pages = 0;
  StepState* step = nullptr;
  std::uint32_t* row_errors = nullptr;
  std::uint32_t* batch_error = nullptr;  // directly behind row_errors
  std::int64_t step_words = 0;           // from row_errors on
  std::vector<ResolveOutputs> outputs;   // [num_groups]

 private:
  BufferPtr buffer_;
};

}  // namespace sparse_kvcm
