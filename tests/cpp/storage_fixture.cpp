#include "storage_fixture.hpp"

#include <utility>

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kIndexer = 1000;  // ids of layers that a model does not number
constexpr std::int32_t kState = 2000;
constexpr std::int32_t kCompress = 3000;

StorageConfig empty_config(std::int64_t gpu_quota, std::int64_t host_quota) {
  StorageConfig config;
  config.cache_tiers = {{CacheTier::kGpuMem, gpu_quota, 0}, {CacheTier::kHostMem, host_quota, 0}};
  return config;
}

void add_selection_group(StorageConfig& config, const std::vector<std::int32_t>& layers,
                         std::int32_t top_k, const UnitLayout& layout) {
  const std::int32_t units = config.tokens_per_block / config.tokens_per_unit;
  for (const std::int32_t id : layers) {
    config.layers.push_back(sparse_layer(id, layout.page_bytes(units)));
  }
  config.layers.push_back(
      dense_layer(kIndexer + layers.front(), {{"INDEX_KEY", 132 * units, {}, false}}));
  config.selection_groups.push_back({layers, top_k, layout});
}

}  // namespace

LayerConfig dense_layer(std::int32_t id, std::vector<BufferConfig> buffers, std::int32_t window,
                        std::int32_t sinks) {
  LayerConfig layer{id, std::move(buffers), {}, {}};
  if (window > 0) layer.sliding_window_size = window;
  if (sinks > 0) layer.num_sink_tokens = sinks;
  return layer;
}

LayerConfig sparse_layer(std::int32_t id, std::int64_t page_bytes) {
  return {id, {{"KEY", page_bytes, {}, true}}, {}, {}};
}

StorageConfig small_config(std::vector<LayerConfig> layers, std::int64_t quota) {
  StorageConfig config;
  config.tokens_per_block = 4;
  config.cache_tiers = {{CacheTier::kGpuMem, quota, 0}};
  config.layers = std::move(layers);
  return config;
}

StorageConfig v32_config(std::int64_t gpu_quota, std::int64_t host_quota) {
  StorageConfig config = empty_config(gpu_quota, host_quota);
  for (std::int32_t layer = 0; layer < 61; ++layer) {
    add_selection_group(config, {layer}, 2048, UnitLayout({656}));
  }
  return config;
}

StorageConfig glm_config(std::int64_t gpu_quota, std::int64_t host_quota) {
  StorageConfig config = empty_config(gpu_quota, host_quota);
  const UnitLayout layout({576});
  add_selection_group(config, {0}, 2048, layout);
  add_selection_group(config, {1}, 2048, layout);
  for (std::int32_t layer = 2; layer < 78; layer += 4) {
    add_selection_group(config, {layer, layer + 1, layer + 2, layer + 3}, 2048, layout);
  }
  return config;
}

StorageConfig v4_config(std::int64_t gpu_quota, std::int64_t host_quota) {
  StorageConfig config = empty_config(gpu_quota, host_quota);
  config.tokens_per_block = 256;
  config.tokens_per_unit = 4;
  constexpr std::int32_t kWindow = 128;
  constexpr std::int64_t kEntry = 584;
  for (std::int32_t layer = 0; layer < 43; ++layer) {
    std::vector<BufferConfig> window{{"SWA", kEntry * 256, {}, false}};
    if (layer >= 2 && layer % 2 == 1) {  // ratio 128
      window.push_back({"COMPRESSOR_KV", 2048 * 256, {}, false});
      window.push_back({"COMPRESSOR_SCORE", 2048 * 256, {}, false});
      config.layers.push_back(
          dense_layer(kCompress + layer, {{"COMPRESS", kEntry * 2, {}, false}}));
    } else if (layer >= 2) {  // ratio 4
      config.layers.push_back(dense_layer(kState + layer,
                                          {{"COMPRESSOR_KV", 4096 * 256, {}, false},
                                           {"COMPRESSOR_SCORE", 4096 * 256, {}, false},
                                           {"INDEXER_KV", 1024 * 256, {}, false},
                                           {"INDEXER_SCORE", 1024 * 256, {}, false}},
                                          8));
      add_selection_group(config, {kCompress + layer}, 512, UnitLayout({576, 8}, 576));
    }
    config.layers.push_back(dense_layer(layer, std::move(window), kWindow));
  }
  return config;
}

}  // namespace sparse_kvcm::testing
