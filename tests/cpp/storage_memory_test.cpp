// The host memory of a storage: how much of it is touched, what it is told, who is refused.
#include <sys/resource.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/address_space.hpp"
#include "faulty_memory.hpp"
#include "host_files.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int64_t kPageBytes = 8 * 1024;  // of one group

// Two groups of one layer, pages of 8 units of 1 KiB.
StorageConfig two_pools(std::int64_t host_quota, std::optional<std::int32_t> max_pages) {
  StorageConfig config = small_config({sparse_layer(0, kPageBytes), sparse_layer(1, kPageBytes)});
  config.tokens_per_block = 8;
  config.cache_tiers.push_back({CacheTier::kHostMem, host_quota, 0});
  config.selection_groups = {{{0}, 4, UnitLayout({1024})}, {{1}, 4, UnitLayout({1024})}};
  config.max_host_pages = max_pages;
  return config;
}

PoolGroupStatistics host(const Storage& storage) {
  return storage.get_storage_statistics(kSparseHistoryLevel).at(0);
}

std::size_t resident(const Storage& storage, std::int32_t pool, std::size_t bytes) {
  return resident_bytes(storage.pool_memory(0, pool).data, bytes);
}

TEST(StorageMemoryTest, MostPagesOfHostHistoryBoundWhatTheQuotaHolds) {
  for (const std::int32_t pages : {1, 2, 3, 255, 256, 257, 511}) {
    Storage storage(two_pools(8 * kMiB, pages));
    storage.wait_usable(kSparseHistoryLevel);
    EXPECT_EQ(host(storage).total, pages);
    EXPECT_EQ(host(storage).free, pages);
    const auto request = storage.create_request_pages();
    EXPECT_TRUE(request->resize(8 * pages, 0, 0));
    EXPECT_FALSE(request->resize(8 * pages + 1, 0, 0));
  }
  Storage all(two_pools(8 * kMiB, {}));
  EXPECT_EQ(host(all).total, 512);
  Storage more(two_pools(8 * kMiB, 513));
  EXPECT_EQ(host(more).total, 512);
}

TEST(StorageMemoryTest, OnlyPagesThatThereAreTakeMemory) {
  constexpr std::int32_t kPages = 3;
  Storage storage(two_pools(8 * kMiB, kPages));
  storage.wait_usable(kSparseHistoryLevel);
  for (const std::int32_t pool : {0, 1}) {
    EXPECT_EQ(resident(storage, pool, 2 * kMiB), kPages * kPageBytes);
  }
}

TEST(StorageMemoryTest, FilledAtOnceItIsThereAndProgressAscendsToItsBytes) {
  constexpr std::int32_t kPages = 300;
  std::vector<std::int64_t> calls;
  const Storage storage(two_pools(8 * kMiB, kPages),
                        {StorageFill::kAtOnce, [&](std::int64_t done, std::int64_t total) {
                           EXPECT_EQ(total, 2 * kPages * kPageBytes);
                           calls.push_back(done);
                         }});
  EXPECT_EQ(calls, (std::vector<std::int64_t>{kPages * kPageBytes, 2 * kPages * kPageBytes}));
  EXPECT_EQ(host(storage).free, kPages);
  EXPECT_EQ(resident(storage, 1, 4 * kMiB), kPages * kPageBytes);
}

TEST(StorageMemoryTest, WhatTheMachineDoesNotHaveIsRefusedByNameAndNothingChanges) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 44;  // 16 TiB
  // The second is more than there are addresses, too.
  for (const std::int64_t quota : {kHuge, std::int64_t{1} << 50}) {
    try {
      StorageConfig config = two_pools(quota, {});
      config.cache_tiers[kSparseHistoryLevel].max_quota = quota;
      const Storage refused(config);
      FAIL() << "was not refused";
    } catch (const HostMemoryError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find("[Storage] "), 0U) << text;
      EXPECT_NE(text.find(" B are wanted"), std::string::npos) << text;
      EXPECT_TRUE(quota > kHuge || text.find(std::to_string(kHuge)) != text.npos) << text;
    }
  }
  StorageConfig config = two_pools(8 * kMiB, {});
  config.cache_tiers[kSparseHistoryLevel].max_quota = kHuge;
  Storage storage(config);
  EXPECT_THROW(storage.resize(kSparseHistoryLevel, kHuge), HostMemoryError);
  EXPECT_EQ(storage.get_quota(kSparseHistoryLevel), 8 * kMiB);
  storage.wait_usable(kSparseHistoryLevel);
  EXPECT_EQ(host(storage).free, 512);
}

// A process has 128 TiB of addresses; 61 pools of 4 TiB each would take 244.
TEST(StorageMemoryTest, ATiersAddressesAreReservedOnceForAllPoolsOfAGroup) {
  constexpr std::int64_t kMost = std::int64_t{4} << 40;
  try {
    release_addresses(reserve_addresses(kMost, kHugePage), kMost);
  } catch (const HostMemoryError&) {
    GTEST_SKIP() << "not even one range of 4 TiB can be had";
  }
  StorageConfig config = v32_config(1, 64 * kMiB);
  config.cache_tiers[kSparseHistoryLevel].max_quota = kMost;
  Storage storage(config);
  storage.resize(kSparseHistoryLevel, 1 * kGiB);
  EXPECT_EQ(storage.get_quota(kSparseHistoryLevel), 1 * kGiB);
  storage.resize(kSparseHistoryLevel, 1);
}

TEST(StorageMemoryTest, TheAddressSpaceLimitIsNamed) {
  {
    const Storage first(two_pools(8 * kMiB, {}));
  }  // maps what it maps for itself
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = mapped_bytes() + 16 * kMiB;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  std::string text;
  try {
    const Storage refused(two_pools(32 * kMiB, {}));
  } catch (const HostMemoryError& error) {
    text = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  const std::string limit = "RLIMIT_AS (ulimit -v) is " + std::to_string(tight.rlim_cur) + " B";
  EXPECT_NE(text.find(limit), std::string::npos) << text;
}

TEST(StorageMemoryTest, WarningsAreKeptOnce) {
  const auto backend = std::make_shared<FaultyBackend>();
  EXPECT_TRUE(Storage(two_pools(8 * kMiB, {}), backend).warnings().empty());
  backend->set_warning("too far away");
  EXPECT_EQ(Storage(two_pools(8 * kMiB, {}), backend).warnings(),
            std::vector<std::string>{"too far away"});
}

TEST(StorageMemoryTest, WholeHugePagesAreAskedForUnlessTheEnvironmentOptsOut) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
    GTEST_SKIP() << "this kernel has no transparent huge pages";
  }
  for (const auto& [value, flag] : std::vector<std::pair<const char*, const char*>>{
           {nullptr, " hg "}, {"1", " hg "}, {"0", " nh "}}) {
    const Environment environment(value);
    Storage storage(two_pools(8 * kMiB, 300));  // 2,400 KiB each
    storage.wait_usable(kSparseHistoryLevel);
    std::byte* const data = storage.pool_memory(0, 1).data;
    EXPECT_NE(vm_flags(data).find(flag), std::string::npos) << vm_flags(data);
    EXPECT_NE(vm_flags(data + kHugePage).find(" nh "), std::string::npos);
  }
}

TEST(StorageMemoryTest, ASwitchThatIsNotUnderstoodWarns) {
  const Environment environment("off");
  const Storage storage(two_pools(8 * kMiB, {}));
  const Storage dense(small_config({dense_layer(0, {{"K", 64, {}, false}})}));
  ASSERT_EQ(storage.warnings().size(), 1U);
  EXPECT_EQ(storage.warnings()[0],
            "[SPARSE_KVCM_THP] must be 0 or 1, got \"off\"; huge pages are asked for");
  EXPECT_TRUE(dense.warnings().empty());  // has no host memory
}

TEST(StorageMemoryTest, OnlyItsOwnerChangesAStorage) {
  Storage storage(two_pools(8 * kMiB, {}), {StorageFill::kAtOnce, nullptr, "KvCacheManager"});
  try {
    storage.resize(kSparseHistoryLevel, 4 * kMiB);
    FAIL() << "was not refused";
  } catch (const InvalidState& error) {
    EXPECT_EQ(std::string(error.what()),
              "[Storage.resize] the storage belongs to a KvCacheManager, which alone changes it");
  }
  EXPECT_THROW(static_cast<void>(storage.create_request_pages()), InvalidState);
  EXPECT_EQ(host(storage).total, 512);
  storage.trim();
  storage.wait_usable(kSparseHistoryLevel);
  EXPECT_EQ(host(storage).free, 512);
}

// The host tier grows and shrinks under requests, filled or not: no page of theirs moves or loses a
// byte, and every page of the system is opened once (faulty_memory.hpp).
TEST(StorageMemoryTest, AStormOfHostQuotasKeepsEveryLivePage) {
  std::map<std::string, int> seen;  // that the storm is one
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto backend = std::make_shared<FaultyMemoryBackend>();
    StorageConfig config = two_pools(8 * kMiB, {});
    config.cache_tiers[kSparseHistoryLevel].max_quota = 64 * kMiB;
    config.selection_groups[1].layout = UnitLayout({1008});  // slots end anywhere in a page
    config.layers[1].buffers[0].page_bytes = 8 * 1008;
    Storage storage(config, backend);
    std::vector<std::shared_ptr<RequestPages>> requests(3);
    for (auto& request : requests) request = storage.create_request_pages();
    std::map<std::int32_t, std::byte> marks;  // by page
    const auto ends = [&](std::int32_t page) {
      const MemoryView pool = storage.pool_memory(0, 1);
      std::byte* const begin = pool.data + page * pool.shape[1];
      return std::pair(begin, begin + pool.shape[1] - 1);
    };
    for (int i = 0; i < 60; ++i) {
      auto& request = requests[random() % requests.size()];
      if (random() % 3 == 0) {
        storage.resize(kSparseHistoryLevel, static_cast<std::int64_t>(1 + random() % 64) * kMiB);
      } else if (random() % 4 == 0) {
        for (const std::int32_t page : request->get_base_page_indices(0)) marks.erase(page);
        request->close(0);
        request = storage.create_request_pages();
      } else if (random() % 4 == 0) {
        storage.wait_usable(kSparseHistoryLevel);
      } else if (request->resize(request->capacity() + static_cast<std::int32_t>(random() % 4000),
                                 request->history_length(), 0)) {
        ++seen["grown"];
        for (const std::int32_t page : request->get_base_page_indices(0)) {
          if (marks.count(page) > 0) continue;
          const auto mark = static_cast<std::byte>(random());
          marks.emplace(page, mark);
          *ends(page).first = *ends(page).second = mark;
        }
      } else {
        ++seen["refused"];
      }
      for (const auto& [page, mark] : marks) {
        ASSERT_EQ(*ends(page).first, mark) << "page " << page;
        ASSERT_EQ(*ends(page).second, mark) << "page " << page;
      }
      const PoolGroupStatistics now = host(storage);
      ASSERT_EQ(now.total, now.free + now.unavailable);
      ASSERT_GE(now.unavailable, std::ssize(marks));
      if (now.draining > 0) ++seen["draining"];
      if (now.unavailable > std::ssize(marks)) ++seen["filling"];
    }
    for (auto& request : requests) request->close(0);
    storage.trim();
    storage.wait_usable(kSparseHistoryLevel);
    EXPECT_EQ(host(storage).free, host(storage).total);
  }
  for (const char* const what : {"grown", "refused", "draining", "filling"}) {
    EXPECT_GE(seen[what], 20) << what;
  }
}

// Any thread may wait while another grows and shrinks the tier and takes slots.
TEST(StorageMemoryTest, ManyThreadsMayWaitWhileTheTierChanges) {
  StorageConfig config = two_pools(8 * kMiB, {});
  config.cache_tiers[kSparseHistoryLevel].max_quota = 64 * kMiB;
  Storage storage(config);
  std::atomic<bool> stop = false;
  std::vector<std::future<void>> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.push_back(std::async(std::launch::async, [&] {
      while (!stop) storage.wait_usable(kSparseHistoryLevel);
    }));
  }
  for (std::int64_t i = 0; i < 40; ++i) {
    storage.resize(kSparseHistoryLevel, (1 + i * 29 % 64) * kMiB);
    const auto request = storage.create_request_pages();
    static_cast<void>(request->resize(static_cast<std::int32_t>(1 + i * 61), 0, 0));
  }
  stop = true;
  for (std::future<void>& waiter : waiters) waiter.get();
  storage.wait_usable(kSparseHistoryLevel);
  EXPECT_EQ(host(storage).free, host(storage).total);
}

// --- of a manager ---

KvCacheManagerConfig manager_config() {
  KvCacheManagerConfig config;
  config.tokens_per_block = 4;
  config.groups = {{{7, 3}, 4, UnitLayout({1024})}, {{5}, 4, UnitLayout({512})}};
  config.cached_slots = config.window_slots = 8;
  config.arena_pages = 4;
  config.host_pages = 37;
  config.max_leases = 1;
  return config;
}

TEST(ManagerStorageTest, HostHistoryLivesInTheManagersStorage) {
  const KvCacheManager manager(manager_config());
  const auto storage = manager.storage();
  ASSERT_EQ(storage->layout().pool_groups().size(), 1U);
  const auto pools = storage->pool_group_descs()[0];
  ASSERT_EQ(pools.size(), 2U);
  for (std::int32_t group = 0; group < 2; ++group) {
    const MemoryView view = manager.host_history(group);
    const PoolDesc& pool = pools[static_cast<std::size_t>(group)];
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data), pool.base_address);
    EXPECT_EQ(pool.slot_bytes, view.shape[1] * view.shape[2]);
    EXPECT_EQ(pool.num_slots, 37);
    EXPECT_EQ(pool.storage_medium, sparse_backing_medium());
  }
}

TEST(ManagerStorageTest, ItsStatisticsFollowTheRequests) {
  KvCacheManager manager(manager_config());
  const auto storage = manager.storage();
  EXPECT_EQ(host(*storage).free, 37);
  const auto cache = manager.create_kv_cache({.need = 30});
  const std::vector<std::byte> rows(10 * 1024);
  const std::vector<UnitRows> layers{{rows.data(), 1024}, {rows.data(), 1024}, {rows.data(), 512}};
  cache->import_history(layers, 10, 0);
  EXPECT_EQ(host(*storage).free, 34);
  EXPECT_EQ(host(*storage).unavailable, 3);
  EXPECT_EQ(manager.occupancy().free_host_pages, 34);
  cache->close();
  EXPECT_EQ(host(*storage).free, 37);
  const auto counts = std::const_pointer_cast<Storage>(storage)->get_and_reset_statistics();
  EXPECT_EQ(counts, (std::vector<LayerGroupStatistics>{{3, 3, 0}}));
  const auto next = manager.create_kv_cache({.need = 30});
  next->import_history(layers, 5, 0);
  const auto more = std::const_pointer_cast<Storage>(storage)->get_and_reset_statistics();
  EXPECT_EQ(more, (std::vector<LayerGroupStatistics>{{2, 0, 0}}));
}

TEST(ManagerStorageTest, KeepsTheManagersMemoryAlive) {
  auto manager = std::make_unique<KvCacheManager>(manager_config());
  const auto storage = manager->storage();
  const MemoryView view = manager->host_history(0);
  manager.reset();
  EXPECT_EQ(host(*storage).free, 37);
  *view.data = std::byte{1};
}

}  // namespace
}  // namespace sparse_kvcm::testing
