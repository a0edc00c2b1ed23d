// One manager, many threads: each has a request of its own that it admits, seats, suspends, resumes
// and closes, while one thread takes a common Batch through its steps. Run under ThreadSanitizer by
// scripts/test. At the end every byte of host history is right and nothing is in use.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/kv_cache_manager.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kThreads = 4;
constexpr std::int32_t kRounds = 60;
constexpr std::int32_t kSteps = 400;
constexpr std::int32_t kNeed = 40;
constexpr std::int32_t kUnitBytes = 16;

KvCacheManagerConfig config() {
  KvCacheManagerConfig c;
  c.tokens_per_block = 4;
  c.groups = {{{0}, 4, UnitLayout({kUnitBytes})}};
  c.cached_slots = 8;
  c.window_slots = 8;
  c.arena_pages = 4 * 3;  // three leases for four threads
  c.host_pages = 30;
  c.max_leases = 4;
  c.dense_layers = {{1, {{"KEY", std::int64_t{128} << 10, {}, false}}, {}, {}},
                    {2, {{"KEY", std::int64_t{256} << 10, {}, false}}, 8, {}}};
  c.gpu_quota = 1;
  return c;
}

class ThreadStormTest : public ::testing::Test {
 protected:
  // What a thread does with its request.
  void live(std::int32_t thread) {
    for (std::int32_t round = 0; round < kRounds; ++round) {
      const auto request = manager_.create_kv_cache({kNeed, -1});
      const std::int32_t history = 4 + (thread * 7 + round * 3) % 20;
      const std::vector<std::byte> units(static_cast<std::size_t>(history) * kUnitBytes,
                                         std::byte{7});
      const UnitRows layer{units.data(), kUnitBytes};
      const auto import = [&] {
        if (round % 2 == 1) return receive(*request, units, round % 8 == 7);
        return attempt([&] { request->import_history({&layer, 1}, history, 0); });
      };
      const bool there = import() && attempt([&] { return request->resume(0); }) &&
                         attempt([&] { return request->resize(history, history, 0); }) &&
                         attempt([&] { batch_->add(*request); });
      if (there) ++seated_;
      for (int look = 0; look < 5; ++look) {
        static_cast<void>(request->length());
        static_cast<void>(request->get_base_page_indices(0));
        static_cast<void>(request->row());
        std::this_thread::yield();
      }
      if (there && round % 3 == 0 && attempt([&] { request->suspend(0); })) {
        ++suspended_;
        if (attempt([&] { return request->resume(0); })) attempt([&] { batch_->add(*request); });
      }
      if (there && round % 3 == 1) attempt([&] { batch_->remove(*request); });
      request->close();
    }
  }

  // Two threads repack the pages of one request; if it `quits`, it is closed meanwhile.
  bool receive(KvCache& request, const std::vector<std::byte>& units, bool quits) {
    const auto history = static_cast<std::int32_t>(units.size()) / kUnitBytes;
    if (!attempt([&] { return request.reserve_history(history); })) return false;
    const auto write = [&](std::int32_t first, std::int32_t count) {
      const RegionPages pages{units.data() + std::ptrdiff_t{first} * kUnitBytes, 2 * kUnitBytes};
      attempt([&] { request.write_history(0, {first, count, 2, {&pages, 1}}); });
    };
    std::thread other([&] { write(0, history / 2); });
    if (quits) request.close();
    write(history / 2, history - history / 2);
    other.join();
    return attempt([&] { request.commit_history(0); });
  }

  void step(std::uint32_t) {
    const std::array<std::int32_t, kThreads> rows = {0, 1, 2, 3};
    const std::array<std::int32_t, 4 * kThreads> selection{};
    for (std::int32_t s = 0; s < kSteps; ++s) {
      for (const std::int32_t row : rows) {
        attempt([&] {
          const RowState& state = batch_->row_states_address()[row];
          static_cast<void>(
              batch_->resize_tokens(std::vector<RowTokens>{{row, state.committed + 1}}, 0));
        });
      }
      batch_->publish(0);
      batch_->wait_ready(0);
      std::vector<std::int32_t> seated;
      for (const std::int32_t row : rows) {
        if (batch_->row_states_address()[row].lease_id >= 0) seated.push_back(row);
      }
      batch_->resolve(0, rows.data(), kThreads, selection.data(), 4, 4, {}, 0);
      batch_->fetch(0, rows.data(), kThreads, 4, {}, 0);
      if (s % 8 == 7) {
        batch_->abort_step(0);
      } else {
        batch_->record_read(seated, 0);
      }
      static_cast<void>(batch_->take_errors());
      static_cast<void>(manager_.occupancy());
      static_cast<void>(manager_.pool_group_use());
    }
  }

  // Refusals are part of the storm; anything else ends the test.
  template <class Call>
  static bool attempt(Call call) {
    try {
      if constexpr (std::is_same_v<decltype(call()), bool>) return call();
      call();
      return true;
    } catch (const InvalidState&) {
    } catch (const InvalidArgument&) {
    } catch (const OutOfPages&) {
    }
    return false;
  }

  KvCacheManager manager_{config()};
  std::shared_ptr<Batch> batch_ = manager_.create_batch({kThreads, kNeed, kNoSlot});
  std::atomic<std::int32_t> seated_ = 0;
  std::atomic<std::int32_t> suspended_ = 0;
};

TEST_F(ThreadStormTest, SeatStepSuspendAndCloseFromManyThreadsLeakNothing) {
  const Occupancy fresh = manager_.occupancy();
  std::vector<std::int64_t> free;
  for (const PoolGroupUse& use : manager_.pool_group_use()) free.push_back(use.slots.free);
  {
    std::vector<std::thread> threads;
    threads.emplace_back([&] { step(0); });
    for (std::int32_t t = 0; t < kThreads; ++t) threads.emplace_back([this, t] { live(t); });
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_GT(seated_, kRounds);
  EXPECT_GT(suspended_, 0);
  batch_->close();
  EXPECT_EQ(manager_.poison_reason(), "");
  EXPECT_EQ(manager_.occupancy().free_host_pages, fresh.free_host_pages);
  EXPECT_EQ(manager_.occupancy().free_arena_slots, fresh.free_arena_slots);
  EXPECT_EQ(manager_.occupancy().free_leases, fresh.free_leases);
  std::size_t g = 0;
  for (const PoolGroupUse& use : manager_.pool_group_use()) {
    EXPECT_EQ(use.slots.free, free[g]) << "pool group " << g;
    ++g;
  }
}

}  // namespace
}  // namespace sparse_kvcm::testing
