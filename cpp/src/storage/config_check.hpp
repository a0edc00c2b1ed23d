// Parts of check(StorageConfig) that others need too, and what is asked of a checked one.
#pragma once

#include <cstdint>
#include <string>

#include "sparse_kvcm/storage_config.hpp"

namespace sparse_kvcm {

// Throws InvalidArgument in the name of `function` for what is wrong with `field`, a batch.
void check_batch(const char* function, const std::string& field, const BatchDesc& batch);

// Kernel pages of a buffer per page. REQUIRES: a checked config.
[[nodiscard]] std::int32_t expansion_of(const StorageConfig& config, const BufferConfig& buffer);

// The request with the most tokens. REQUIRES: a checked batch.
[[nodiscard]] KvCacheDesc longest_of(const BatchDesc& batch);

}  // namespace sparse_kvcm
