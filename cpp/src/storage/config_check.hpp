// Parts of check(StorageConfig) that others need too, and what is asked of a checked one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.hpp"
#include "sparse_kvcm/storage_config.hpp"

namespace sparse_kvcm {

// Throw InvalidArgument in the name of `function`, for a value outside [low, high], a page or a
// batch that is wrong.
template <class T>
void check_range(const char* function, std::string_view field, T value, T low, T high) {
  if (value < low || value > high) {
    fail_argument(function, field, " must be in [", low, ", ", high, "], got ", value);
  }
}
void check_page(const char* function, std::int32_t tokens_per_block, std::int32_t tokens_per_unit);
void check_batch(const char* function, const std::string& field, const BatchDesc& batch);

// Kernel pages of a buffer per page. REQUIRES: a checked config.
[[nodiscard]] std::int32_t expansion_of(const StorageConfig& config, const BufferConfig& buffer);
// Its bytes in a page of the config.
[[nodiscard]] std::int64_t buffer_bytes(const StorageConfig& config, const BufferConfig& buffer);

// The request with the most tokens. REQUIRES: a checked batch.
[[nodiscard]] KvCacheDesc longest_of(const BatchDesc& batch);

}  // namespace sparse_kvcm
