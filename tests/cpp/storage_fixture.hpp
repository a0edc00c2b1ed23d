// Configurations of real models for the storage tests, and short ways to say small ones.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "sparse_kvcm/storage_config.hpp"

namespace sparse_kvcm::testing {

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;
inline constexpr std::int64_t kGiB = std::int64_t{1} << 30;

// A dense layer; `window` 0 = none.
[[nodiscard]] LayerConfig dense_layer(std::int32_t id, std::vector<BufferConfig> buffers,
                                      std::int32_t window = 0, std::int32_t sinks = 0);
[[nodiscard]] LayerConfig sparse_layer(std::int32_t id, std::int64_t page_bytes);

// Dense layers on a GPU tier of `quota`, pages of 4 tokens.
[[nodiscard]] StorageConfig small_config(std::vector<LayerConfig> layers,
                                         std::int64_t quota = 64 * kMiB);

// 61 layers that all own an indexer; latents of 656 B on the host, pages of 64 tokens.
[[nodiscard]] StorageConfig v32_config(std::int64_t gpu_quota, std::int64_t host_quota);
// 78 layers, 21 indexers; latents of 576 B on the host, pages of 64 tokens.
[[nodiscard]] StorageConfig glm_config(std::int64_t gpu_quota, std::int64_t host_quota);
// 43 layers of V4-Flash: windows, compressor states, ratio-4 entries on the host, ratio-128 entries
// on the GPU; pages of 256 tokens.
[[nodiscard]] StorageConfig v4_config(std::int64_t gpu_quota, std::int64_t host_quota);

}  // namespace sparse_kvcm::testing
