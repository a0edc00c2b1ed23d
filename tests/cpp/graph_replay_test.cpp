// One graph, captured once, replayed for 1,000 steps while rows are seated, removed, suspended,
// closed and leased again between replays; now and then it is replayed without a publish.
//
// Each device runs beside a twin on the CPU: same calls, so same outputs, entries and bytes. What
// the twin itself gives is held against the units that should lie in each slot.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "faulty_backend.hpp"
#include "graph.hpp"
#include "program_launch.hpp"
#include "snapshot.hpp"
#include "test_device.hpp"
#include "unit_bytes.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kRows = 6;
constexpr std::int32_t kPage = 4;
constexpr std::int32_t kNeed = 90;
constexpr std::int32_t kSteps = 1000;
constexpr std::array<std::int32_t, 2> kTopK = {8, 5};

KvCacheManagerConfig config() {
  KvCacheManagerConfig c;
  c.tokens_per_block = kPage;
  c.groups = {{{7, 3}, kTopK[0], UnitLayout({12, 4})}, {{5}, kTopK[1], UnitLayout({16})}};
  c.cached_slots = 16;
  c.window_slots = 8;
  c.max_new_units = 2;
  c.arena_pages = 30;  // five leases
  c.host_pages = 140;
  c.max_leases = 6;
  return c;
}

// What a graph reads: launch order, and a selection per group.
struct Inputs {
  std::vector<std::int32_t> rows;
  std::array<std::vector<std::int32_t>, 2> selections;
};

struct Outputs {
  std::vector<std::int32_t> slots, write_slots, miss_counts, hit_counts;
  std::vector<std::uint32_t> errors;
  friend bool operator==(const Outputs&, const Outputs&) = default;
};

// An engine with a decode loop on one device.
class Engine {
 public:
  explicit Engine(Device device)
      : graph_(make_graph(device)),
        backend_(std::make_shared<FaultyBackend>(device)),
        manager_(make_manager(config(), backend_)),
        bytes_(*manager_),
        batch_(manager_->create_batch({kRows, kNeed, kNoSlot})),
        rows_(make_shared_buffer(device, kRows * sizeof(std::int32_t))) {
    for (const std::int32_t k : kTopK) {
      selections_.push_back(
          make_shared_buffer(device, static_cast<std::size_t>(kRows * k) * sizeof(std::int32_t)));
    }
    graph_->capture([this] { launch(); });
  }

  // --- between replays ---
  void admit(std::int32_t history, std::int32_t need) {
    requests.push_back(manager_->create_kv_cache({need, -1}));
    import(requests.size() - 1, history);
    resume(requests.size() - 1);
  }
  void resume(std::size_t i) {
    if (requests[i]->resume(graph_->stream())) batch_->add(*requests[i]);
  }
  void suspend(std::size_t i) { requests[i]->suspend(graph_->stream()); }
  void remove(std::size_t i) { batch_->remove(*requests[i]); }
  void close(std::size_t i) { requests[i]->close(); }

  // --- a step ---
  void publish(const std::vector<RowLength>& lengths) {
    batch_->resize(lengths);
    batch_->publish(graph_->stream());
    batch_->wait_ready(graph_->stream());
  }
  void replay(const Inputs& inputs) {
    upload(*rows_, inputs.rows);
    for (std::size_t g = 0; g < kTopK.size(); ++g) upload(*selections_[g], inputs.selections[g]);
    graph_->replay();
    backend_->settle(graph_->stream());
  }
  // The attention layers: new units into their window slots.
  void write_new_units(std::size_t i) const {
    const KvCache& cache = *requests[i];
    for (std::int32_t o = cache.committed_length(); o < cache.length(); ++o) {
      for (std::int32_t g = 0; g < 2; ++g) bytes_.write_group(g, ring_slot(cache, o), tag(i, o));
    }
  }
  void commit(const std::vector<std::int32_t>& rows) {
    batch_->record_read(rows, graph_->stream());
  }
  [[nodiscard]] StepErrors errors() {
    backend_->settle(graph_->stream());
    return batch_->take_errors();
  }

  // --- what is there ---
  [[nodiscard]] Outputs outputs(std::int32_t group) const {
    const ResolveOutputs o = batch_->outputs(group);
    const std::int32_t k = kTopK[static_cast<std::size_t>(group)];
    return {{o.slots, o.slots + kRows * k},
            {o.write_slots, o.write_slots + kRows * 2},
            {o.miss_counts, o.miss_counts + kRows},
            {o.hit_counts, o.hit_counts + kRows},
            {o.errors, o.errors + kRows}};
  }
  [[nodiscard]] bool holds(std::int32_t group, std::int32_t slot, std::size_t i,
                           std::int32_t ordinal) const {
    return bytes_.group_holds(group, slot, tag(i, ordinal));
  }
  [[nodiscard]] Snapshot snapshot() const {
    backend_->settle(graph_->stream());
    return take_snapshot(*manager_, requests, {batch_}, WithBytes::kYes);
  }

  std::vector<KvCachePtr> requests;  // closed ones stay, so that an index is a name

 private:
  static UnitTag tag(std::size_t i, std::int32_t ordinal) {
    return {static_cast<std::uint32_t>(i), ordinal, 1};
  }
  static std::int32_t ring_slot(const KvCache& cache, std::int32_t ordinal) {
    const Lease lease = *cache.lease();
    return lease.base + lease.cached_slots + ordinal % lease.window_slots;
  }

  void launch() {
    const auto* rows = reinterpret_cast<const std::int32_t*>(rows_->device_data());
    for (std::int32_t g = 0; g < 2; ++g) {
      const BufferPtr& memory = selections_[static_cast<std::size_t>(g)];
      const auto* selection = reinterpret_cast<const std::int32_t*>(memory->device_data());
      const std::int32_t k = kTopK[static_cast<std::size_t>(g)];
      batch_->resolve(g, rows, kRows, selection, k, k, {}, graph_->stream());
      // The leader's units first, then its followers', which is what one fetch of all does.
      const std::span layers(manager_->config().groups[static_cast<std::size_t>(g)].layers);
      batch_->fetch(g, rows, kRows, k, layers.first(1), {}, graph_->stream());
      if (layers.size() > 1) {
        batch_->fetch(g, rows, kRows, k, layers.subspan(1), {}, graph_->stream());
      }
    }
  }

  void import(std::size_t i, std::int32_t num_units) {
    std::vector<UnitTag> tags;
    for (std::int32_t o = 0; o < num_units; ++o) tags.push_back(tag(i, o));
    std::vector<std::vector<std::byte>> rows;
    std::vector<UnitRows> layers;
    for (std::int32_t layer = 0; layer < bytes_.num_layers(); ++layer) {
      rows.push_back(bytes_.rows(layer, tags, 0));
      layers.push_back({rows.back().data(), bytes_.unit_bytes(layer)});
    }
    requests[i]->import_history(layers, num_units, graph_->stream());
  }

  void upload(const Buffer& to, const std::vector<std::int32_t>& from) {
    const Upload upload{to.device_data(), from.data(), from.size() * sizeof(std::int32_t)};
    backend_->upload({&upload, 1}, graph_->stream());
  }

  std::unique_ptr<Graph> graph_;  // outlives the Batch, which may use its stream to the end
  std::shared_ptr<FaultyBackend> backend_;
  std::unique_ptr<KvCacheManager> manager_;
  UnitBytes bytes_;
  BatchPtr batch_;
  BufferPtr rows_;
  std::vector<BufferPtr> selections_;
};

class GraphReplayTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    twin_ = std::make_unique<Engine>(Device{});
    engine_ = std::make_unique<Engine>(device());
    for (int i = 0; i < 3; ++i) both([](Engine& engine) { engine.admit(60, kNeed); });
  }

  template <class Call>
  void both(const Call& call) {
    call(*twin_);
    call(*engine_);
  }

  // Requests that sit in a row, by row; -1 = nobody.
  [[nodiscard]] std::vector<std::int32_t> seats() const {
    std::vector<std::int32_t> seats(kRows, -1);
    for (std::size_t i = 0; i < twin_->requests.size(); ++i) {
      const auto row = twin_->requests[i]->row();
      if (row) seats[static_cast<std::size_t>(*row)] = static_cast<std::int32_t>(i);
    }
    return seats;
  }

  // A request comes, goes, sleeps or wakes.
  void change_seats() {
    std::vector<std::size_t> active, asleep;
    for (std::size_t i = 0; i < twin_->requests.size(); ++i) {
      const KvCacheState state = twin_->requests[i]->state();
      if (state == KvCacheState::kActive) active.push_back(i);
      if (state == KvCacheState::kSuspended) asleep.push_back(i);
    }
    const std::int32_t dice = random_.below(100);
    if (active.empty() || (dice < 30 && active.size() + asleep.size() < 7)) {
      const std::int32_t need = random_.percent(20) ? 20 : kNeed;  // 20 units are all window
      const std::int32_t history = random_.between(0, need - 5);
      both([=](Engine& engine) { engine.admit(history, need); });
    } else if (dice < 55 && !asleep.empty()) {
      const std::size_t i = random_.pick(asleep);
      both([=](Engine& engine) { engine.resume(i); });
    } else {
      const std::size_t i = random_.pick(active);
      if (dice < 75) return both([=](Engine& engine) { engine.suspend(i); });
      if (dice < 90) return both([=](Engine& engine) { engine.close(i); });
      if (twin_->requests[i]->row()) both([=](Engine& engine) { engine.remove(i); });
    }
  }

  // Rows in random order, some left out; of each, units that exist.
  Inputs choose_inputs(const std::vector<std::int32_t>& seats) {
    Inputs inputs;
    for (std::int32_t row = 0; row < kRows; ++row) {
      const bool launched = seats[static_cast<std::size_t>(row)] >= 0 && !random_.percent(10);
      inputs.rows.push_back(launched ? row : kPaddingRow);
    }
    random_.shuffle(inputs.rows);
    for (std::size_t g = 0; g < kTopK.size(); ++g) {
      for (const std::int32_t row : inputs.rows) {
        const KvCache* cache = row < 0 ? nullptr : &request(seats, row);
        for (std::int32_t j = 0; j < kTopK[g]; ++j) {
          const bool none = cache == nullptr || cache->length() == 0 || random_.percent(10);
          inputs.selections[g].push_back(none ? -1 : random_.below(cache->length()));
        }
      }
    }
    return inputs;
  }

  [[nodiscard]] KvCache& request(const std::vector<std::int32_t>& seats, std::int32_t row) const {
    return *twin_->requests[static_cast<std::size_t>(seats[static_cast<std::size_t>(row)])];
  }

  void step() {
    published_ = seats();
    std::vector<RowLength> lengths;
    for (std::int32_t row = 0; row < kRows; ++row) {
      if (published_[static_cast<std::size_t>(row)] < 0) continue;
      const KvCache& cache = request(published_, row);
      const std::int32_t most = cache.committed_length() + random_.below(3);
      lengths.push_back({row, std::min(most, cache.need())});
    }
    both([&](Engine& engine) { engine.publish(lengths); });
    inputs_ = choose_inputs(published_);
    both([&](Engine& engine) { engine.replay(inputs_); });
    std::vector<std::int32_t> rows;
    for (const std::int32_t row : inputs_.rows) {
      if (row < 0) continue;
      rows.push_back(row);
      const auto i = static_cast<std::size_t>(published_[static_cast<std::size_t>(row)]);
      both([=](Engine& engine) { engine.write_new_units(i); });
    }
    for (std::int32_t group = 0; group < 2; ++group) expect_units(group);
    both([&](Engine& engine) { engine.commit(rows); });
  }

  void expect_units(std::int32_t group) {
    const Outputs outputs = engine_->outputs(group);
    ASSERT_EQ(outputs, twin_->outputs(group)) << "group " << group;
    for (std::size_t n = 0; n < kRows; ++n) {
      misses_ += outputs.miss_counts[n];
      hits_ += outputs.hit_counts[n];
    }
    const std::int32_t k = kTopK[static_cast<std::size_t>(group)];
    for (std::int32_t n = 0; n < kRows * k; ++n) {
      const std::int32_t row = inputs_.rows[static_cast<std::size_t>(n / k)];
      const std::int32_t ordinal =
          inputs_.selections[static_cast<std::size_t>(group)][static_cast<std::size_t>(n)];
      const std::int32_t slot = outputs.slots[static_cast<std::size_t>(n)];
      ASSERT_EQ(slot == kNoSlot, ordinal == -1) << "row " << row << ", ordinal " << ordinal;
      if (slot == kNoSlot) continue;
      const auto i = static_cast<std::size_t>(published_[static_cast<std::size_t>(row)]);
      ASSERT_TRUE(engine_->holds(group, slot, i, ordinal))
          << "group " << group << ", row " << row << ", ordinal " << ordinal << ", slot " << slot;
    }
  }

  // The step is over, rows may have changed since, and the graph runs all the same, for rows that
  // the step had left out too.
  void replay_without_publish() {
    inputs_ = choose_inputs(published_);
    const Snapshot before = engine_->snapshot();
    both([&](Engine& engine) { engine.replay(inputs_); });
    ASSERT_EQ(first_difference(before, engine_->snapshot()), "");
    for (std::int32_t group = 0; group < 2; ++group) {
      const Outputs outputs = engine_->outputs(group);
      const std::int32_t k = kTopK[static_cast<std::size_t>(group)];
      ASSERT_EQ(outputs.slots, std::vector<std::int32_t>(static_cast<std::size_t>(kRows * k), -1));
      ASSERT_EQ(outputs.miss_counts, std::vector<std::int32_t>(kRows, 0));
      for (std::size_t n = 0; n < kRows; ++n) {
        ASSERT_EQ(outputs.errors[n], inputs_.rows[n] < 0 ? 0u : kErrorStale);
        if (inputs_.rows[n] < 0) continue;
        stale_.emplace_back(inputs_.rows[n], group);
        ++num_stale_;
      }
    }
  }

  // Errors of the step that just ended, and with them those of replays before it.
  void expect_errors() {
    for (Engine* engine : {twin_.get(), engine_.get()}) {
      const StepErrors errors = engine->errors();
      std::vector<std::pair<std::int32_t, std::int32_t>> reported;
      for (const StepError& error : errors.rows) {
        ASSERT_EQ(error.bits, kErrorStale);
        reported.emplace_back(error.row, error.group);
      }
      std::sort(reported.begin(), reported.end());
      std::sort(stale_.begin(), stale_.end());
      ASSERT_EQ(reported, stale_);
      ASSERT_EQ(errors.batch, 0u);
    }
    stale_.clear();
  }

  Random random_{20};
  std::unique_ptr<Engine> twin_, engine_;
  std::vector<std::int32_t> published_;                       // request by row, at the last publish
  Inputs inputs_;                                             // of the last replay
  std::vector<std::pair<std::int32_t, std::int32_t>> stale_;  // row and group, not yet reported
  std::int64_t hits_ = 0, misses_ = 0, num_stale_ = 0;
};
SPARSE_KVCM_ON_EVERY_DEVICE(GraphReplayTest);

TEST_P(GraphReplayTest, StepsAreRightWhileRowsChangeAndAReplayWithoutPublishIsStaleAndHarmless) {
  for (std::int32_t n = 0; n < programs_to_run(kSteps); ++n) {
    SCOPED_TRACE(::testing::Message() << "step " << n);
    step();
    ASSERT_FALSE(HasFatalFailure());
    expect_errors();
    ASSERT_FALSE(HasFatalFailure());
    if (n % 50 == 0) {
      ASSERT_EQ(first_difference(twin_->snapshot(), engine_->snapshot()), "");
    }
    while (random_.percent(40)) change_seats();
    if (random_.percent(10)) replay_without_publish();
    ASSERT_FALSE(HasFatalFailure());
  }
  ASSERT_EQ(first_difference(twin_->snapshot(), engine_->snapshot()), "");
  if (!all_programs_run()) return;
  EXPECT_GT(hits_, 1000);
  EXPECT_GT(misses_, 1000);
  EXPECT_GT(num_stale_, 100);
  EXPECT_GT(twin_->requests.size(), 50u);  // and so many leases at least
}

}  // namespace
}  // namespace sparse_kvcm::testing
