// One graph, captured once, replayed for 1,000 steps with dense layers beside the sparse ones,
// while requests come, go, sleep and wake between replays and the device fails now and then, in the
// middle of whatever call. The graph reads the page tables, so that what it saw shows.
//
// Each device runs beside a twin on the CPU: same calls and same faults, so same tables, slots and
// outputs. What is in units and pages is held against what their owner wrote there.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "faulty_backend.hpp"
#include "graph.hpp"
#include "page_bytes.hpp"
#include "program_launch.hpp"
#include "snapshot.hpp"
#include "sparse_kvcm/error.hpp"
#include "test_device.hpp"
#include "unit_bytes.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kRows = 5;
constexpr std::int32_t kPage = 4;
constexpr std::int32_t kNeed = 90;
constexpr std::int32_t kSteps = 1000;
constexpr std::int32_t kTopK = 8;

KvCacheManagerConfig config() {
  constexpr std::int64_t kBytes = std::int64_t{16} << 10;
  KvCacheManagerConfig c;
  c.tokens_per_block = kPage;
  c.groups = {{{7, 3}, kTopK, UnitLayout({12, 4})}};
  c.cached_slots = 16;
  c.window_slots = 8;
  c.max_new_units = 2;
  c.arena_pages = 30;  // five leases
  c.host_pages = 140;
  c.max_leases = 6;
  c.dense_layers = {{100, {{"INDEX_KEY", 2 * kBytes, {}, false}}, {}, {}},  // 64 pages
                    {101, {{"KEY", 4 * kBytes, {}, false}, {"STATE", kBytes, {}, false}}, 8, {}},
                    {102, {{"KEY", 4 * kBytes, {}, false}, {"STATE", kBytes, {}, false}}, 6, 4}};
  c.gpu_quota = 1;
  return c;
}

class Engine {
 public:
  explicit Engine(Device device)
      : graph_(make_graph(device)),
        backend_(std::make_shared<FaultyBackend>(device)),
        manager_(make_manager(config(), backend_)),
        bytes_(*manager_),
        pages_(*manager_, backend_),
        batch_(manager_->create_batch({kRows, kNeed, kNoSlot})),
        rows_(make_shared_buffer(device, kRows * sizeof(std::int32_t))),
        selection_(make_shared_buffer(device, kRows * kTopK * sizeof(std::int32_t))),
        seen_(backend_->allocate_pinned(table_bytes(), {})) {
    graph_->capture([this] { launch(); });
  }

  // Calls `call`; if the device is to fail in it, again until it comes through. Returns the faults.
  std::int32_t with_faults(std::int32_t after, const std::function<void(Engine&)>& call) {
    std::int32_t faults = 0;
    backend_->settle(graph_->stream());
    if (after >= 0) backend_->fail_after(after);
    for (;; ++faults) {
      try {
        call(*this);
        backend_->withdraw();
        backend_->settle(graph_->stream());
        return faults;
      } catch (const DeviceFault&) {
        backend_->settle(graph_->stream());
      }
    }
  }

  // --- calls that may fail and be made again ---
  void create(std::int32_t need) { requests.push_back(manager_->create_kv_cache({need, -1})); }
  void import(std::size_t i, std::int32_t num_units) {
    if (requests[i]->length() > 0 || num_units == 0) return;
    std::vector<UnitTag> tags;
    for (std::int32_t o = 0; o < num_units; ++o) tags.push_back(tag(i, o));
    std::vector<std::vector<std::byte>> rows;
    std::vector<UnitRows> layers;
    for (std::int32_t layer = 0; layer < bytes_.num_layers(); ++layer) {
      rows.push_back(bytes_.rows(layer, tags, 0));
      layers.push_back({rows.back().data(), bytes_.unit_bytes(layer)});
    }
    try {
      requests[i]->import_history(layers, num_units, stream());
    } catch (const OutOfPages&) {
    }
  }
  void resume(std::size_t i) {
    KvCache& kv = *requests[i];
    if (!kv.resume(stream())) return;
    const bool fits = kv.resize(kv.history_length(), kv.history_length(), stream());
    if (fits && !kv.row()) batch_->add(kv);
  }
  void suspend(std::size_t i) {
    try {
      requests[i]->suspend(stream());
    } catch (const OutOfPages&) {
    }
  }
  void resize(const RowTokens& wanted) {
    result = batch_->resize_tokens({&wanted, 1}, stream()).front();
  }
  void publish() {
    if (!batch_->step_open()) batch_->publish(stream());
    batch_->wait_ready(stream());
  }
  void commit(const std::vector<std::int32_t>& rows) { batch_->record_read(rows, stream()); }
  void abort() { batch_->abort_step(stream()); }

  // --- the rest ---
  void remove(std::size_t i) { batch_->remove(*requests[i]); }
  void close(std::size_t i) { requests[i]->close(); }
  // The prefill, or a step: pages with tokens from the history on.
  void write_pages(std::size_t i, std::int32_t from) const {
    const KvCache& kv = *requests[i];
    for (const std::int32_t group : pages_.dense_groups()) {
      const std::vector<std::int32_t> table = kv.get_base_page_indices(group);
      for (std::int32_t page = from / kPage; page < std::ssize(table); ++page) {
        const std::int32_t slot = table[static_cast<std::size_t>(page)];
        if (slot >= 0) pages_.write(slot, {static_cast<std::uint32_t>(i), group, page});
      }
    }
  }
  void write_units(std::size_t i) const {
    const KvCache& kv = *requests[i];
    const Lease lease = *kv.lease();
    for (std::int32_t o = kv.committed_length(); o < kv.length(); ++o) {
      bytes_.write_group(0, lease.base + lease.cached_slots + o % lease.window_slots, tag(i, o));
    }
  }
  void replay(const std::vector<std::int32_t>& rows, const std::vector<std::int32_t>& selection) {
    upload(*rows_, rows);
    upload(*selection_, selection);
    graph_->replay();
    backend_->settle(graph_->stream());
  }

  [[nodiscard]] std::vector<std::int32_t> slots() const {
    const std::int32_t* slots = batch_->outputs(0).slots;
    return {slots, slots + kRows * kTopK};
  }
  [[nodiscard]] bool holds_unit(std::int32_t slot, std::size_t i, std::int32_t ordinal) const {
    return bytes_.group_holds(0, slot, tag(i, ordinal));
  }
  [[nodiscard]] bool holds_pages(std::size_t i) const {
    return pages_.holds_all(*requests[i], static_cast<std::uint32_t>(i));
  }
  // What the last replay read.
  [[nodiscard]] std::vector<std::int32_t> seen_table(std::int32_t group, std::int32_t row) const {
    const auto* table = reinterpret_cast<const std::int32_t*>(seen_->data()) +
                        (group * kRows + row) * batch_->max_pages();
    return {table, table + batch_->max_pages()};
  }
  [[nodiscard]] Snapshot snapshot() const {
    backend_->settle(graph_->stream());
    return take_snapshot(*manager_, requests, {batch_}, WithBytes::kNo);
  }
  [[nodiscard]] std::int32_t num_layer_groups() const { return batch_->num_layer_groups(); }
  [[nodiscard]] std::int64_t max_pages() const { return batch_->max_pages(); }
  [[nodiscard]] std::vector<std::int64_t> free_slots() const {
    std::vector<std::int64_t> free;
    for (const PoolGroupUse& use : manager_->pool_group_use()) free.push_back(use.slots.free);
    return free;
  }

  std::vector<KvCachePtr> requests;  // closed ones stay, so that an index is a name
  ResizeResult result = ResizeResult::kOk;

 private:
  [[nodiscard]] Stream stream() const { return graph_->stream(); }
  [[nodiscard]] std::size_t table_bytes() const {
    return static_cast<std::size_t>(batch_->num_layer_groups() * kRows * batch_->max_pages()) *
           sizeof(std::int32_t);
  }
  static UnitTag tag(std::size_t i, std::int32_t ordinal) {
    return {static_cast<std::uint32_t>(i), ordinal, 1};
  }
  void launch() {
    backend_->download(*seen_, reinterpret_cast<const std::byte*>(batch_->page_table_address(0)),
                       table_bytes(), stream());
    const auto* rows = reinterpret_cast<const std::int32_t*>(rows_->device_data());
    const auto* selection = reinterpret_cast<const std::int32_t*>(selection_->device_data());
    batch_->resolve(0, rows, kRows, selection, kTopK, kTopK, {}, stream());
    batch_->fetch(0, rows, kRows, kTopK, {}, stream());
  }
  void upload(const Buffer& to, const std::vector<std::int32_t>& from) {
    const Upload upload{to.device_data(), from.data(), from.size() * sizeof(std::int32_t)};
    backend_->upload({&upload, 1}, stream());
  }

  std::unique_ptr<Graph> graph_;  // outlives the Batch, which may use its stream to the end
  std::shared_ptr<FaultyBackend> backend_;
  std::unique_ptr<KvCacheManager> manager_;
  UnitBytes bytes_;
  PageBytes pages_;
  BatchPtr batch_;
  BufferPtr rows_, selection_, seen_;
};

class DenseReplayTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    twin_ = std::make_unique<Engine>(Device{});
    engine_ = std::make_unique<Engine>(device());
    fresh_ = engine_->free_slots();
  }

  // The same on both, with the same fault.
  void both(const std::function<void(Engine&)>& call) {
    const std::int32_t after = random_.percent(15) ? random_.below(12) : -1;
    const std::int32_t faults = twin_->with_faults(after, call);
    ASSERT_EQ(engine_->with_faults(after, call), faults);
    num_faults_ += faults;
  }
  void both_safely(const std::function<void(Engine&)>& call) {
    twin_->with_faults(-1, call);
    engine_->with_faults(-1, call);
  }

  [[nodiscard]] std::vector<std::int32_t> seats() const {
    std::vector<std::int32_t> seats(kRows, -1);
    for (std::size_t i = 0; i < twin_->requests.size(); ++i) {
      const auto row = twin_->requests[i]->row();
      if (row) seats[static_cast<std::size_t>(*row)] = static_cast<std::int32_t>(i);
    }
    return seats;
  }

  void admit() {
    const std::int32_t need = random_.percent(20) ? 20 : kNeed;  // 20 units are all window
    const std::int32_t history = random_.between(0, need - 5);
    const std::size_t i = twin_->requests.size();
    both_safely([=](Engine& engine) { engine.create(need); });
    both([=](Engine& engine) { engine.import(i, history); });
    both([=](Engine& engine) { engine.resume(i); });
    both_safely([=](Engine& engine) { engine.write_pages(i, 0); });
  }

  void change_seats() {
    std::vector<std::size_t> active, asleep;
    for (std::size_t i = 0; i < twin_->requests.size(); ++i) {
      const KvCacheState state = twin_->requests[i]->state();
      if (state == KvCacheState::kActive) active.push_back(i);
      if (state == KvCacheState::kSuspended) asleep.push_back(i);
    }
    const std::int32_t dice = random_.below(100);
    if (active.empty() || (dice < 25 && active.size() + asleep.size() < 7)) return admit();
    if (dice < 55 && !asleep.empty()) {
      const std::size_t i = random_.pick(asleep);
      const bool fresh = twin_->requests[i]->capacity() == 0;  // its first resume was refused
      both([=](Engine& engine) { engine.resume(i); });
      if (fresh) both_safely([=](Engine& engine) { engine.write_pages(i, 0); });
      num_resumed_ += twin_->requests[i]->state() == KvCacheState::kActive ? 1 : 0;
      ASSERT_TRUE(engine_->holds_pages(i)) << "request " << i << " after its resume";
      return;
    }
    const std::size_t i = random_.pick(active);
    if (dice < 80) {
      both([=](Engine& engine) { engine.suspend(i); });
      num_suspended_ += twin_->requests[i]->state() == KvCacheState::kSuspended ? 1 : 0;
    } else if (dice < 92) {
      both_safely([=](Engine& engine) { engine.close(i); });
    } else if (twin_->requests[i]->row()) {
      both_safely([=](Engine& engine) { engine.remove(i); });
    }
  }

  void step() {
    const std::vector<std::int32_t> seated = seats();
    // Row by row: which of two free slots is taken depends on whether the device is done with one.
    for (std::int32_t row = 0; row < kRows; ++row) {
      if (seated[static_cast<std::size_t>(row)] < 0) continue;
      const KvCache& kv = request(seated, row);
      const std::int32_t capacity = std::min(kv.history_length() + random_.below(3), kv.need());
      both([=](Engine& engine) { engine.resize({row, capacity}); });
      ASSERT_EQ(engine_->result, twin_->result);
    }
    both([](Engine& engine) { engine.publish(); });
    std::vector<std::int32_t> rows, selection;
    choose_inputs(seated, rows, selection);
    both_safely([&](Engine& engine) { engine.replay(rows, selection); });
    expect_tables(seated);
    std::vector<std::int32_t> launched;
    for (const std::int32_t row : rows) {
      if (row < 0) continue;
      launched.push_back(row);
      const auto i = static_cast<std::size_t>(seated[static_cast<std::size_t>(row)]);
      const std::int32_t history = twin_->requests[i]->history_length();
      both_safely([=](Engine& engine) {
        engine.write_units(i);
        engine.write_pages(i, history);
      });
    }
    expect_units(seated, rows, selection);
    if (random_.percent(10)) return both([](Engine& engine) { engine.abort(); });
    both([&](Engine& engine) { engine.commit(launched); });
  }

  [[nodiscard]] KvCache& request(const std::vector<std::int32_t>& seated, std::int32_t row) const {
    return *twin_->requests[static_cast<std::size_t>(seated[static_cast<std::size_t>(row)])];
  }

  void choose_inputs(const std::vector<std::int32_t>& seated, std::vector<std::int32_t>& rows,
                     std::vector<std::int32_t>& selection) {
    for (std::int32_t row = 0; row < kRows; ++row) {
      const bool launched = seated[static_cast<std::size_t>(row)] >= 0 && !random_.percent(10);
      rows.push_back(launched ? row : kPaddingRow);
    }
    random_.shuffle(rows);
    for (const std::int32_t row : rows) {
      const KvCache* kv = row < 0 ? nullptr : &request(seated, row);
      for (std::int32_t j = 0; j < kTopK; ++j) {
        const bool none = kv == nullptr || kv->length() == 0 || random_.percent(10);
        selection.push_back(none ? -1 : random_.below(kv->length()));
      }
    }
  }

  // What the replay saw is what each request has, -1 elsewhere.
  void expect_tables(const std::vector<std::int32_t>& seated) {
    for (std::int32_t group = 0; group < engine_->num_layer_groups(); ++group) {
      for (std::int32_t row = 0; row < kRows; ++row) {
        std::vector<std::int32_t> expected;
        if (seated[static_cast<std::size_t>(row)] >= 0) {
          expected = request(seated, row).get_base_page_indices(group);
        }
        expected.resize(static_cast<std::size_t>(engine_->max_pages()), -1);
        ASSERT_EQ(engine_->seen_table(group, row), expected)
            << "layer group " << group << ", row " << row;
      }
    }
  }

  void expect_units(const std::vector<std::int32_t>& seated, const std::vector<std::int32_t>& rows,
                    const std::vector<std::int32_t>& selection) {
    const std::vector<std::int32_t> slots = engine_->slots();
    ASSERT_EQ(slots, twin_->slots());
    for (std::size_t n = 0; n < slots.size(); ++n) {
      if (selection[n] < 0) continue;
      const std::int32_t row = rows[n / kTopK];
      const auto i = static_cast<std::size_t>(seated[static_cast<std::size_t>(row)]);
      ASSERT_TRUE(engine_->holds_unit(slots[n], i, selection[n]))
          << "row " << row << ", ordinal " << selection[n];
      ++num_units_;
    }
  }

  Random random_{5};
  std::unique_ptr<Engine> twin_, engine_;
  std::vector<std::int64_t> fresh_;
  std::int64_t num_faults_ = 0, num_units_ = 0, num_suspended_ = 0, num_resumed_ = 0;
};
SPARSE_KVCM_ON_EVERY_DEVICE(DenseReplayTest);

TEST_P(DenseReplayTest, EveryTableSlotAndByteIsRightWhileRequestsComeAndGoAndTheDeviceFails) {
  for (std::int32_t n = 0; n < programs_to_run(kSteps); ++n) {
    SCOPED_TRACE(::testing::Message() << "step " << n);
    step();
    ASSERT_FALSE(HasFatalFailure());
    while (random_.percent(40)) {
      change_seats();
      ASSERT_FALSE(HasFatalFailure());
    }
    if (n % 10 != 0) continue;
    ASSERT_EQ(first_difference(twin_->snapshot(), engine_->snapshot()), "");
    for (std::size_t i = 0; i < engine_->requests.size(); ++i) {
      if (engine_->requests[i]->state() != KvCacheState::kActive) continue;
      ASSERT_TRUE(engine_->holds_pages(i)) << "request " << i;
    }
  }
  for (std::size_t i = 0; i < engine_->requests.size(); ++i) engine_->close(i);
  EXPECT_EQ(engine_->free_slots(), fresh_);
  if (!all_programs_run()) return;
  EXPECT_GT(num_faults_, 100);
  EXPECT_GT(num_units_, 1000);
  EXPECT_GT(num_suspended_, 50);
  EXPECT_GT(num_resumed_, 50);
}

}  // namespace
}  // namespace sparse_kvcm::testing
