// One Storage, many threads: tiers change, requests grow and go, one request is everybody's, and
// all is looked at meanwhile. Run under ThreadSanitizer by scripts/test.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "sparse_kvcm/storage.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int32_t kRounds = 150;
constexpr std::int32_t kHost = 1;

StorageConfig config() {
  StorageConfig c;
  c.tokens_per_block = 4;
  c.cache_tiers = {{CacheTier::kGpuMem, 4 * kMiB, 64 * kMiB},
                   {CacheTier::kHostMem, 8 * kMiB, 64 * kMiB}};
  c.layers = {{0, {{"KEY", std::int64_t{64} << 10, {}, false}}, {}, {}},
              {1, {{"KEY", std::int64_t{64} << 10, {}, false}}, 8, {}}};
  c.suspended = BatchDesc{{{400, 400}}, 0};
  return c;
}

using Random = std::mt19937;

class ThreadStorageTest : public ::testing::Test {
 protected:
  // Refusals are part of the storm; anything else ends the test.
  static void attempt(const std::function<void()>& call) {
    try {
      call();
    } catch (const InvalidState&) {
    } catch (const InvalidArgument&) {
    }
  }

  void use(RequestPages& request, Random& random) {
    const auto room = static_cast<std::int32_t>(1 + random() % 300);
    attempt([&] { moved_ += request.resize(room, room / 2, 0) ? 1 : 0; });
    attempt([&] { request.drop_step(0); });
    attempt([&] { moved_ += request.suspend(0) && request.resume(0) ? 1 : 0; });
    std::vector<std::int32_t> row(400);
    request.copy_base_page_indices(0, row);
    static_cast<void>(request.copy_of_base_page_indices(1));
    static_cast<void>(request.capacity() + request.history_length());
    static_cast<void>(request.is_suspended() || request.has_scratch_slots());
  }

  void look() {
    for (const auto& group : storage_.pool_group_descs()) {
      for (const PoolDesc& pool : group) EXPECT_LE(pool.num_usable, pool.num_slots);
    }
    for (const std::int32_t level : {0, kHost}) {
      for (const PoolGroupStatistics& s : storage_.get_storage_statistics(level)) {
        EXPECT_EQ(s.total, s.available + s.unavailable);
      }
      static_cast<void>(storage_.get_num_bytes(level) + storage_.get_quota(level));
    }
    static_cast<void>(storage_.get_page_index_upper_bound(0, "KEY"));
    static_cast<void>(storage_.pool_memory(0, 0));
    static_cast<void>(storage_.clamp_max_seq_len_for_mem(1, 1000));
    static_cast<void>(storage_.get_and_reset_statistics());
    static_cast<void>(storage_.warnings());
  }

  Storage storage_{config()};
  std::atomic<std::int32_t> moved_ = 0;
};

TEST_F(ThreadStorageTest, CallsFromManyThreadsTakeTurnsAndLeakNothing) {
  const auto shared = storage_.create_request_pages();
  const std::vector<std::function<void(Random&)>> work = {
      [&](Random& random) {
        storage_.resize(0, static_cast<std::int64_t>(1 + random() % 60) * kMiB);
      },
      [&](Random& random) {
        storage_.resize(kHost, static_cast<std::int64_t>(1 + random() % 60) * kMiB);
      },
      [&](Random&) {
        for (int i = 0; i < 3000; ++i) storage_.wait_usable(kHost);
      },
      [&](Random&) { storage_.trim(); },
      [&](Random&) { look(); },
      [&](Random& random) { use(*shared, random); },
      [&](Random& random) { use(*shared, random); },
      [&](Random& random) { use(*storage_.create_request_pages(), random); },
  };
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < work.size(); ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<std::uint32_t>(t));
      for (std::int32_t round = 0; round < kRounds; ++round) work[t](random);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(moved_, kRounds);
  shared->close();
  for (const std::int32_t level : {0, kHost}) {
    storage_.wait_usable(level);
    for (const PoolGroupStatistics& s : storage_.get_storage_statistics(level)) {
      EXPECT_EQ(s.free, s.total);
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm::testing
