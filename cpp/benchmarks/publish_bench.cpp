// What the manager costs the host: publish at many rows, and a request that comes and goes. The
// limit is the time that a step can spare, not what the machine could do.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "bench.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/kv_cache_manager.hpp"

namespace sparse_kvcm::bench {
namespace {

constexpr std::int32_t kTokens = 4;  // of a unit, and of a page
constexpr std::int32_t kPages = 512;
constexpr std::int32_t kHistory = 300;  // pages at the start
constexpr std::int32_t kUnitBytes = 16;
constexpr std::int32_t kSamples = 51;
constexpr double kUs = 1e-6;

// A history in the sparse layer group, two layer groups that keep everything, five windows: eight
// layer groups. A page holds a unit, so that a row which grows by one changes an entry in each
// table, and two in those of windows. Pages are small: what is measured is the host.
KvCacheManagerConfig many_rows(Device device, std::int32_t rows) {
  KvCacheManagerConfig config;
  config.device = device;
  config.tokens_per_block = config.tokens_per_unit = kTokens;
  config.groups = {{{0}, 8, UnitLayout({kUnitBytes})}};
  config.cached_slots = 8;
  config.window_slots = 8;
  config.arena_pages = std::int64_t{16} * rows;
  config.host_pages = std::int64_t{kPages} * rows;
  config.max_leases = rows;
  std::int32_t id = 1;
  for (const std::int64_t bytes : {16, 32}) {
    config.dense_layers.push_back({id++, {{"KEY", bytes, {}, false}}, {}, {}});
  }
  for (const std::int32_t window : {16, 32, 64, 128, 256}) {
    config.dense_layers.push_back({id++, {{"KEY", 48, {}, false}}, window, {}});
  }
  config.gpu_quota = 1;
  BatchDesc all;
  all.kv_caches.assign(static_cast<std::size_t>(rows), {kPages * kTokens, (kPages - 1) * kTokens});
  config.constraints = {all};
  return config;
}

class Rows {
 public:
  Rows(Device device, std::int32_t rows)
      : backend_(backend_for(device)),
        manager_(many_rows(device, rows)),
        batch_(manager_.create_batch({rows, kPages, kNoSlot})) {
    const std::vector<std::byte> history(std::size_t{kHistory} * kUnitBytes);
    const UnitRows layer{history.data(), kUnitBytes};
    for (std::int32_t row = 0; row < rows; ++row) {
      requests_.push_back(manager_.create_kv_cache({kPages, -1}));
      KvCache& request = *requests_.back();
      request.import_history({&layer, 1}, kHistory, 0);
      require(request.resume(0) && request.resize(kHistory * kTokens, kHistory * kTokens, 0));
      batch_->add(request);
    }
    publish_and_record({});
  }

  // Requests that are there and do nothing.
  void add_idle(std::int32_t count) {
    for (std::int32_t i = 0; i < count; ++i) {
      idle_.push_back(manager_.create_kv_cache({kPages, -1}));
    }
  }

  // Host time of a publish behind a step in which `count` rows, others each time, grew by a unit.
  double publish(std::int32_t count) {
    std::vector<RowTokens> capacities;
    std::vector<std::int32_t> rows;
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t row = next_row_;
      next_row_ = (next_row_ + 1) % batch_->max_rows();
      const KvCache& request = *requests_[static_cast<std::size_t>(row)];
      capacities.push_back({row, request.history_length() + kTokens});
      rows.push_back(row);
    }
    for (const ResizeResult result : batch_->resize_tokens(capacities, 0)) {
      require(result == ResizeResult::kOk);
    }
    backend_->synchronize(*backend_->record(0));
    return publish_and_record(rows);
  }

 private:
  static void require(bool fits) {
    if (!fits) throw NotAvailable("the pools are too small");
  }

  double publish_and_record(const std::vector<std::int32_t>& rows) {
    const double seconds = host_seconds([&] { batch_->publish(0); });
    batch_->wait_ready(0);
    batch_->record_read(rows, 0);
    static_cast<void>(batch_->take_errors());
    return seconds;
  }

  std::shared_ptr<Backend> backend_;
  KvCacheManager manager_;
  std::shared_ptr<Batch> batch_;
  std::vector<std::shared_ptr<KvCache>> requests_;
  std::vector<std::shared_ptr<KvCache>> idle_;
  std::int32_t next_row_ = 0;
};

Measurement publish(Context& context, std::int32_t num_rows, std::int32_t dirty,
                    std::optional<double> limit_seconds) {
  Rows rows(context.device(), num_rows);
  return time_us(Context::median_of(kSamples, [&] { return rows.publish(dirty); }), limit_seconds);
}

Measurement publish_beside_idle(Context& context) {
  Rows rows(context.device(), 300);
  rows.add_idle(10'000);
  return time_us(Context::median_of(kSamples, [&] { return rows.publish(30); }), 60 * kUs);
}

// GLM-5.2's two layer groups: history, and indexer keys of 512 pages of 64 tokens.
KvCacheManagerConfig one_request(Device device) {
  KvCacheManagerConfig config;
  config.device = device;
  config.groups = {{{0}, 2048, UnitLayout({kUnitBytes})}};
  config.cached_slots = 4096;
  config.window_slots = 64;
  config.arena_pages = 4 * 65;
  config.host_pages = 4 * 516;
  config.max_leases = 4;
  config.dense_layers = {{1, {{"INDEX_KEY", 64, {}, false}}, {}, {}}};
  config.gpu_quota = 1;
  config.constraints = {{{{32'832, 32'768}, {32'832, 32'768}, {32'832, 32'768}}, 0}};
  return config;
}

// Its history comes by a transfer, which is not counted.
Measurement admit(Context& context) {
  constexpr std::int32_t kUnits = 32'768;
  KvCacheManager manager(one_request(context.device()));
  const auto backend = backend_for(context.device());
  const auto batch = manager.create_batch({128, 33'000, kNoSlot});
  const std::vector<std::byte> history(std::size_t{kUnits} * kUnitBytes);
  const UnitRows layer{history.data(), kUnitBytes};
  return time_us(Context::median_of(
                     kSamples,
                     [&] {
                       std::shared_ptr<KvCache> request;
                       double seconds =
                           host_seconds([&] { request = manager.create_kv_cache({32'960, -1}); });
                       request->import_history({&layer, 1}, kUnits, 0);
                       backend->synchronize(*backend->record(0));
                       seconds += host_seconds([&] {
                         if (!request->resume(0) || !request->resize(kUnits + 1, kUnits, 0)) {
                           throw NotAvailable("the pools are too small");
                         }
                         batch->add(*request);
                         batch->publish(0);
                       });
                       batch->wait_ready(0);
                       batch->record_read({}, 0);
                       static_cast<void>(batch->take_errors());
                       seconds += host_seconds([&] { request->close(); });
                       return seconds;
                     }),
                 100 * kUs);
}

std::vector<Registration> publishes() {
  std::vector<Registration> all;
  for (const std::int32_t rows : {300, 3'000, 12'000}) {
    const std::string name = "r" + std::to_string(rows);
    all.emplace_back("publish", name + "_none",
                     [rows](Context& c) { return publish(c, rows, 0, 5 * kUs); });
    all.emplace_back("publish", name + "_dirty30",
                     [rows](Context& c) { return publish(c, rows, 30, 60 * kUs); });
    // On the CPU the device's part counts too: a random write for each entry.
    all.emplace_back("publish", name + "_dirty_all",
                     [rows](Context& c) { return publish(c, rows, rows, {}); });
  }
  return all;
}

const std::vector<Registration> kPublishes = publishes();
const Registration kIdle("publish", "r300_dirty30_beside_idle10000", publish_beside_idle);
const Registration kAdmit("admit", "glm_32k", admit);

}  // namespace
}  // namespace sparse_kvcm::bench
