// Making the storage of whole models: 61, 78 and 43 layers with all their buffers.
#include <chrono>
#include <cstdint>

#include "bench.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm::bench {
namespace {

using testing::glm_config;
using testing::v32_config;
using testing::v4_config;

constexpr std::int64_t kGpuQuota = std::int64_t{1} << 30;
constexpr std::int64_t kHostQuota = 1;  // the least there can be

using Model = StorageConfig (*)(std::int64_t gpu_quota, std::int64_t host_quota);

StorageConfig make(Model model, Device device) {
  StorageConfig config = model(kGpuQuota, kHostQuota);
  config.device = device;
  return config;
}

Measurement plan(Context& context, Model model) {
  const StorageConfig config = make(model, context.device());
  return time_ms(context.median_seconds([&] {
    static_cast<void>(StorageLayout(config).slots_for_quota(kGpuLevel, kGpuQuota));
  }),
                 {});
}

// Not its end, which is another matter.
Measurement build(Context& context, Model model) {
  const StorageConfig config = make(model, context.device());
  constexpr std::int32_t kCalls = 15;
  const double seconds = Context::median_of(kCalls, [&] {
    const auto begin = std::chrono::steady_clock::now();
    const Storage storage(config);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  });
  return time_ms(seconds, {});
}

// A request of 32K tokens: prefilled in chunks of 8K, one step of decoding, gone.
Measurement request(Context& context) {
  StorageConfig config = make(v4_config, context.device());
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
  StorageConfig config = make(v4_config, context.device());
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
    {"storage", "plan_v32_61", [](Context& c) { return plan(c, v32_config); }},
    {"storage", "plan_glm_78", [](Context& c) { return plan(c, glm_config); }},
    {"storage", "plan_v4_43", [](Context& c) { return plan(c, v4_config); }},
};
const Registration kBuilds[] = {
    {"storage", "build_v32_61", [](Context& c) { return build(c, v32_config); }},
    {"storage", "build_glm_78", [](Context& c) { return build(c, glm_config); }},
    {"storage", "build_v4_43", [](Context& c) { return build(c, v4_config); }},
};
const Registration kRequest("storage", "request_v4_32k", request);
const Registration kDecode("storage", "decode_v4_256_steps", decode);

}  // namespace
}  // namespace sparse_kvcm::bench
