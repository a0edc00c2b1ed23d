// Making the storage of whole models: 61, 78 and 43 layers with all their buffers.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "sparse_kvcm/storage.hpp"

namespace sparse_kvcm::bench {
namespace {

constexpr std::int64_t kGpuQuota = std::int64_t{1} << 30;
constexpr std::int64_t kHostQuota = 1;  // the least there can be
constexpr std::int32_t kDenseIds = 1000;

StorageConfig empty_config(Device device, std::int32_t tokens_per_block,
                           std::int32_t tokens_per_unit) {
  StorageConfig config;
  config.device = device;
  config.tokens_per_block = tokens_per_block;
  config.tokens_per_unit = tokens_per_unit;
  config.cache_tiers = {{CacheTier::kGpuMem, kGpuQuota, 0}, {CacheTier::kHostMem, kHostQuota, 0}};
  return config;
}

void add_dense(StorageConfig& config, std::vector<BufferConfig> buffers,
               std::optional<std::int32_t> window) {
  const auto id = kDenseIds + static_cast<std::int32_t>(config.layers.size());
  config.layers.push_back({id, std::move(buffers), window, {}});
}

// Members with latents on the host, and the leader's indexer keys on the GPU.
void add_selection_group(StorageConfig& config, std::vector<std::int32_t> members,
                         const UnitLayout& layout) {
  const std::int32_t units = config.tokens_per_block / config.tokens_per_unit;
  for (const std::int32_t id : members) {
    config.layers.push_back({id, {{"KEY", layout.page_bytes(units), {}, true}}, {}, {}});
  }
  add_dense(config, {{"INDEX_KEY", std::int64_t{132} * units, {}, false}}, {});
  config.selection_groups.push_back({std::move(members), 512, layout});
}

StorageConfig v32(Device device) {
  StorageConfig config = empty_config(device, 64, 1);
  for (std::int32_t layer = 0; layer < 61; ++layer) {
    add_selection_group(config, {layer}, UnitLayout({656}));
  }
  return config;
}

StorageConfig glm(Device device) {
  StorageConfig config = empty_config(device, 64, 1);
  for (const std::int32_t layer : {0, 1}) add_selection_group(config, {layer}, UnitLayout({576}));
  for (std::int32_t layer = 2; layer < 78; layer += 4) {
    add_selection_group(config, {layer, layer + 1, layer + 2, layer + 3}, UnitLayout({576}));
  }
  return config;
}

// V4-Flash: two layers of windows alone, then ratio 4 and ratio 128 in turns.
StorageConfig v4(Device device) {
  StorageConfig config = empty_config(device, 256, 4);
  constexpr std::int32_t kWindow = 128;
  const BufferConfig window{"SWA", 584 * 256, {}, false};
  for (std::int32_t layer = 0; layer < 43; ++layer) {
    if (layer < 2) {
      add_dense(config, {window}, kWindow);
    } else if (layer % 2 == 0) {
      add_dense(config, {window}, kWindow);
      add_dense(config,
                {{"COMPRESSOR_KV", 4096 * 256, {}, false},
                 {"COMPRESSOR_SCORE", 4096 * 256, {}, false},
                 {"INDEXER_COMPRESSOR_KV", 1024 * 256, {}, false},
                 {"INDEXER_COMPRESSOR_SCORE", 1024 * 256, {}, false}},
                8);
      add_selection_group(config, {layer}, UnitLayout({576, 8}, 576));
    } else {
      add_dense(config,
                {window,
                 {"COMPRESSOR_KV", 2048 * 256, {}, false},
                 {"COMPRESSOR_SCORE", 2048 * 256, {}, false}},
                kWindow);
      add_dense(config, {{"COMPRESS", 584 * 2, {}, false}}, {});
    }
  }
  return config;
}

Measurement plan(Context& context, const std::function<StorageConfig(Device)>& model) {
  const StorageConfig config = model(context.device());
  return time_ms(context.median_seconds([&] {
    static_cast<void>(StorageLayout(config).slots_for_quota(kGpuLevel, kGpuQuota));
  }),
                 {});
}

Measurement build(Context& context, const std::function<StorageConfig(Device)>& model) {
  const StorageConfig config = model(context.device());
  return time_ms(context.median_seconds([&] { const Storage storage(config); }), {});
}

// A request of 32K tokens: prefilled in chunks of 8K, one step of decoding, gone.
Measurement request(Context& context) {
  StorageConfig config = v4(context.device());
  config.swa_scratch_reuse = SwaScratchReuseConfig{0};
  config.constraints = {{{{32'769, 32'768}}, 0}, {{{32'768, 24'576}}, 0}};
  Storage storage(config);
  storage.wait_usable(kSparseHistoryLevel);
  return time_ms(context.median_seconds([&] {
    const auto pages = storage.create_request_pages(32'769);
    bool fits = true;
    for (std::int32_t length = 0; length < 32'768; length += 8'192) {
      fits = pages->resize(length + 8'192, length, 0) && fits;
    }
    if (!pages->resize(32'769, 32'768, 0) || !fits) throw NotAvailable("storage is too small");
  }),
                 {});
}

// 256 steps of decoding, a page, of one request behind 32K tokens of history.
Measurement decode(Context& context) {
  StorageConfig config = v4(context.device());
  config.constraints = {{{{33'024, 33'023}}, 0}};
  Storage storage(config);
  storage.wait_usable(kSparseHistoryLevel);
  return time_ms(context.median_seconds([&] {
    const auto pages = storage.create_request_pages(33'024);
    for (std::int32_t length = 32'768; length < 33'024; ++length) {
      if (!pages->resize(length + 1, length, 0)) throw NotAvailable("storage is too small");
    }
  }),
                 {});
}

const Registration kPlans[] = {
    {"storage", "plan_v32_61", [](Context& c) { return plan(c, v32); }},
    {"storage", "plan_glm_78", [](Context& c) { return plan(c, glm); }},
    {"storage", "plan_v4_43", [](Context& c) { return plan(c, v4); }},
};
const Registration kBuilds[] = {
    {"storage", "build_v32_61", [](Context& c) { return build(c, v32); }},
    {"storage", "build_glm_78", [](Context& c) { return build(c, glm); }},
    {"storage", "build_v4_43", [](Context& c) { return build(c, v4); }},
};
const Registration kRequest("storage", "request_v4_32k", request);
const Registration kDecode("storage", "decode_v4_256_steps", decode);

}  // namespace
}  // namespace sparse_kvcm::bench
