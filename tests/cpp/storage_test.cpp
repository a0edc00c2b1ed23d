// Storage: addresses, statistics, resizing, and storms on every device.
#include "sparse_kvcm/storage.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "faulty_memory.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::dense_layer;
using testing::kGiB;
using testing::kMiB;
using testing::small_config;

constexpr PageIndexMode kShared = PageIndexMode::kShared;
constexpr PageIndexMode kPerLayer = PageIndexMode::kPerLayer;

// Two full layers with keys and scales, pages of 4 tokens.
StorageConfig pair_config() {
  return small_config({dense_layer(0, {{"K", 64, {}, false}, {"S", 16, 2, false}}),
                       dense_layer(1, {{"K", 64, {}, false}, {"S", 16, 2, false}})},
                      4 * kMiB);
}

TEST(StorageTest, AddressesOfASharedTableHaveTheLayersOffset) {
  const Storage storage(pair_config());
  const auto pools = storage.pool_group_descs().at(0);
  ASSERT_EQ(pools.size(), 2u);
  EXPECT_EQ(storage.get_mem_pool_base_address(1, "K", kPerLayer), pools[0].base_address);
  EXPECT_EQ(storage.get_mem_pool_base_address(0, "K", kShared), pools[0].base_address);
  EXPECT_EQ(storage.get_mem_pool_base_address(1, "K", kShared), pools[0].base_address + 64);
  EXPECT_EQ(storage.get_mem_pool_base_address(1, "S", kShared), pools[1].base_address + 32);
}

TEST(StorageTest, BothModesReachTheSameBytes) {
  const Storage storage(pair_config());
  for (const std::int32_t layer : {0, 1}) {
    for (const char* role : {"K", "S"}) {
      std::vector<std::uintptr_t> addresses;
      for (const PageIndexMode mode : {kShared, kPerLayer}) {
        const PageIndexConverter by = storage.get_page_index_converter(layer, role, mode);
        std::vector<std::int32_t> indices(static_cast<std::size_t>(by.expansion));
        by.convert(3, indices.data());
        addresses.push_back(storage.get_mem_pool_base_address(layer, role, mode) +
                            static_cast<std::uintptr_t>(indices.back()) *
                                static_cast<std::uintptr_t>(storage.get_page_stride(layer, role)));
      }
      EXPECT_EQ(addresses[0], addresses[1]) << layer << role;
    }
  }
}

TEST(StorageTest, TheUpperBoundEndsWithThePool) {
  const Storage storage(pair_config());
  const std::int64_t slots = storage.pool_group_descs()[0][0].num_slots;
  EXPECT_EQ(storage.get_page_index_upper_bound(0, "K"), 2 * slots);
  EXPECT_EQ(storage.get_page_index_upper_bound(1, "K"), 2 * slots - 1);
  EXPECT_EQ(storage.get_page_index_upper_bound(1, "S"), 2 * (2 * slots - 1));
  EXPECT_EQ(storage.get_page_index_scale(1, "S"), 2);
  EXPECT_EQ(storage.get_page_stride(1, "S"), 16);
}

TEST(StorageTest, SparseBuffersHaveNoPageIndex) {
  const Storage storage(testing::glm_config(1, 1));
  EXPECT_TRUE(storage.is_sparse(5, "KEY"));
  EXPECT_FALSE(storage.is_sparse(1002, "INDEX_KEY"));
  EXPECT_THROW(static_cast<void>(storage.is_sparse(5, "VALUE")), InvalidArgument);
  EXPECT_FALSE(storage.supports_index_mode(5, "KEY", kPerLayer));
  EXPECT_THROW(static_cast<void>(storage.get_page_index_converter(5, "KEY", kShared)),
               InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.get_mem_pool_base_address(5, "KEY", kPerLayer)),
               InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.get_page_index_upper_bound(5, "KEY")), InvalidArgument);
  const auto pools = storage.pool_group_descs();
  EXPECT_EQ(pools[0][0].storage_medium, CacheTier::kGpuMem);
  EXPECT_EQ(pools[1].size(), 21u);
  EXPECT_EQ(pools[1][0].storage_medium, sparse_backing_medium());
}

TEST(StorageTest, WindowsWithScratchTakeIndicesPerLayerOnly) {
  StorageConfig config = small_config(
      {dense_layer(0, {{"K", 64, {}, false}}, 8), dense_layer(1, {{"K", 64, {}, false}})});
  config.swa_scratch_reuse = SwaScratchReuseConfig{0};
  const Storage storage(config);
  EXPECT_THROW(static_cast<void>(storage.get_page_index_converter(0, "K", kShared)),
               InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.get_mem_pool_base_address(0, "K", kShared)),
               InvalidArgument);
  EXPECT_TRUE(storage.supports_index_mode(0, "K", kPerLayer));
  EXPECT_TRUE(storage.supports_index_mode(1, "K", kShared));
}

TEST(StorageTest, WhatIsMappedIsWhatTheLayoutPlans) {
  const Storage storage(testing::v4_config(64 * kMiB, 64 * kMiB));
  const StorageLayout& layout = storage.layout();
  for (std::int32_t level = 0; level < 2; ++level) {
    std::int64_t planned = 0;
    const auto slots = layout.slots_for_quota(level, 64 * kMiB);
    for (std::size_t g = 0; g < slots.size(); ++g) {
      if (layout.pool_groups()[g].level != level) continue;
      planned += layout.get_num_bytes(static_cast<std::int32_t>(g), slots[g]);
    }
    EXPECT_EQ(storage.get_num_bytes(level), planned);
    EXPECT_LE(planned, storage.get_quota(level));
    EXPECT_EQ(storage.get_quota(level), layout.effective_quota(level, 64 * kMiB));
  }
}

TEST(StorageTest, HostSlotsComeIntoUseAsTheyFill) {
  Storage storage(testing::glm_config(1, 64 * kMiB));
  storage.wait_usable(kSparseHistoryLevel);
  for (const PoolGroupStatistics& group : storage.get_storage_statistics(kSparseHistoryLevel)) {
    EXPECT_EQ(group.free, group.total);
    EXPECT_GT(group.total, 0);
  }
}

TEST(StorageTest, HostSlotsThatAreNotFilledAreNotHandedOut) {
  std::atomic<int> allowed = 0;
  std::atomic<int> filled = 0;
  const auto backend = std::make_shared<testing::FaultyMemoryBackend>();
  backend->on_fill = [&] {
    while (filled >= allowed) std::this_thread::yield();
    ++filled;
  };
  // Two pools of 4 slots per granule, two granules each.
  StorageConfig config = small_config(
      {testing::sparse_layer(0, 4 * 65'536 * 2), testing::sparse_layer(1, 4 * 65'536 * 2)});
  config.tokens_per_block = 8;
  config.cache_tiers.push_back({CacheTier::kHostMem, 8 * kMiB, 0});
  config.selection_groups = {{{0}, 4, UnitLayout({65'536})}, {{1}, 4, UnitLayout({65'536})}};
  Storage storage(config, backend);
  const auto now = [&] { return storage.get_storage_statistics(kSparseHistoryLevel)[0]; };
  const auto usable = [&] { return storage.pool_group_descs()[0][1].num_usable; };
  EXPECT_EQ(now().total, 8);
  EXPECT_EQ(now().free, 0);
  EXPECT_EQ(storage.pool_group_descs()[0][1].num_slots, 8);
  EXPECT_EQ(usable(), 0);
  const auto request = storage.create_request_pages();
  EXPECT_FALSE(request->resize(1, 0, 0));
  allowed = 3;  // one granule of each pool, and one more
  while (filled < 3) std::this_thread::yield();
  while (now().free == 0) std::this_thread::yield();
  EXPECT_EQ(now().free, 4);
  EXPECT_EQ(usable(), 4);
  ASSERT_TRUE(request->resize(4 * 8, 0, 0));
  EXPECT_FALSE(request->resize(4 * 8 + 1, 0, 0));
  allowed = 4;
  storage.wait_usable(kSparseHistoryLevel);
  EXPECT_EQ(usable(), 8);
  EXPECT_TRUE(request->resize(8 * 8, 0, 0));
}

TEST(StorageTest, PoolsWhoseIndicesExceed32BitsAreRefused) {
  StorageConfig config = small_config({dense_layer(0, {{"K", 1, 1, false}})}, 16 * kGiB);
  EXPECT_THROW(Storage{config}, InvalidArgument);
}

TEST(StorageTest, QuotasAndLevelsThatAreNotThereAreRefused) {
  StorageConfig config = pair_config();
  config.cache_tiers[0].max_quota = 8 * kMiB;
  Storage storage(config);
  EXPECT_THROW(storage.resize(1, kMiB), InvalidArgument);
  EXPECT_THROW(storage.resize(0, 0), InvalidArgument);
  EXPECT_THROW(storage.resize(0, 8 * kMiB + 1), InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.get_quota(-1)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.get_storage_statistics(1)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.get_num_bytes(2)), InvalidArgument);
  EXPECT_THROW(storage.wait_usable(7), InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.pool_memory(0, 2)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.pool_memory(1, 0)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(storage.create_request_pages(-1)), InvalidArgument);
  EXPECT_EQ(storage.get_quota(0), 4 * kMiB);
}

TEST(StorageTest, AQuotaIsRaisedToFloorsAndGranules) {
  StorageConfig config = pair_config();
  config.cache_tiers[0] = {CacheTier::kGpuMem, 4 * kMiB + 1, 64 * kMiB};
  Storage storage(config);
  EXPECT_EQ(storage.get_quota(0), 6 * kMiB);
  storage.resize(0, 1);
  EXPECT_EQ(storage.get_quota(0), 4 * kMiB);  // a granule for each of two pools
  EXPECT_EQ(storage.get_num_bytes(0), 4 * kMiB);
}

TEST(StorageTest, AShrinkDrainsLiveSlotsAndThenGivesMemoryBack) {
  StorageConfig config = small_config({dense_layer(0, {{"K", kMiB, {}, false}})}, 32 * kMiB);
  Storage storage(config);
  const auto low = storage.create_request_pages();
  const auto high = storage.create_request_pages();
  ASSERT_TRUE(low->resize(4 * 2, 0, 0));
  ASSERT_TRUE(high->resize(4 * 20, 0, 0));
  storage.resize(0, 8 * kMiB);
  PoolGroupStatistics now = storage.get_storage_statistics(0)[0];
  EXPECT_EQ(now.total, 22);
  EXPECT_EQ(now.draining, 14);
  EXPECT_EQ(now.free, 0);
  EXPECT_EQ(storage.get_num_bytes(0), 22 * kMiB);
  EXPECT_EQ(high->get_base_page_indices(0).back(), 21);
  EXPECT_EQ(storage.get_page_index_upper_bound(0, "K"), 22);
  EXPECT_EQ(storage.pool_group_descs()[0][0].num_slots, 22);
  EXPECT_EQ(storage.pool_memory(0, 0).shape, (std::vector<std::int64_t>{22, kMiB}));
  EXPECT_FALSE(low->resize(4 * 3, 0, 0));
  high->close(0);
  now = storage.get_storage_statistics(0)[0];
  EXPECT_EQ(now.total, 8);
  EXPECT_EQ(now.free, 6);
  EXPECT_EQ(storage.get_page_index_upper_bound(0, "K"), 8);
  storage.trim();
  EXPECT_EQ(storage.get_num_bytes(0), 8 * kMiB);
}

TEST(StorageTest, ASlotThatDrainsIsNotTakenAgainByItsOwner) {
  StorageConfig config = small_config({dense_layer(0, {{"K", kMiB, {}, false}}, 8)}, 32 * kMiB);
  Storage storage(config);
  const auto first = storage.create_request_pages();
  const auto last = storage.create_request_pages();
  ASSERT_TRUE(first->resize(4 * 8, 0, 0));
  ASSERT_TRUE(last->resize(4 * 3, 0, 0));
  first->close(0);
  storage.resize(0, 8 * kMiB);
  EXPECT_EQ(storage.get_storage_statistics(0)[0].draining, 3);
  ASSERT_TRUE(last->resize(13, 12, 0));  // gives one page up and takes one
  EXPECT_EQ(storage.get_storage_statistics(0)[0].draining, 2);
  EXPECT_LT(last->get_base_page_indices(0).back(), 8);
}

// Sums that hold at every moment, and every live slot in one table only.
void expect_exact(const Storage& storage,
                  const std::vector<std::shared_ptr<RequestPages>>& requests) {
  for (const PoolGroupStatistics& group : storage.get_storage_statistics(kGpuLevel)) {
    std::vector<std::int32_t> live;
    const auto& desc = storage.layout().pool_groups()[static_cast<std::size_t>(group.pool_group)];
    for (const auto& request : requests) {
      for (const std::int32_t id : desc.layer_groups) {
        for (const std::int32_t slot : request->get_base_page_indices(id)) {
          if (slot != kBadPageIndex) live.push_back(slot);
        }
        for (const std::int32_t slot : request->get_scratch_slots(id)) live.push_back(slot);
      }
    }
    std::sort(live.begin(), live.end());
    ASSERT_EQ(std::adjacent_find(live.begin(), live.end()), live.end());
    ASSERT_EQ(group.unavailable, std::ssize(live));
    ASSERT_EQ(group.total, group.free + group.unavailable);
    ASSERT_TRUE(live.empty() ||
                live.back() < storage.get_num_bytes(kGpuLevel) / group.slot_bytes[0]);
  }
}

StorageConfig storm_config() {
  StorageConfig config = small_config({dense_layer(0, {{"K", kMiB / 2, {}, false}}),
                                       dense_layer(1, {{"K", kMiB / 4, {}, false}}, 8),
                                       dense_layer(2, {{"K", kMiB / 4, {}, false}}, 8),
                                       dense_layer(3, {{"K", kMiB / 4, {}, false}}, 8)},
                                      24 * kMiB);
  config.cache_tiers[0].max_quota = 64 * kMiB;
  config.swa_scratch_reuse = SwaScratchReuseConfig{2};
  config.typical_step = BatchDesc{{{40, 39}}, 0};
  return config;
}

// A random step of one request.
void step(RequestPages& request, std::mt19937& random) {
  const std::int32_t capacity = request.capacity();
  const std::int32_t history = std::max(request.history_length(), capacity);
  if (random() % 8 == 0) {
    request.drop_step(0);
  } else {
    const auto more = static_cast<std::int32_t>(random() % (random() % 4 == 0 ? 60 : 4));
    static_cast<void>(request.resize(history + more, history, 0));
  }
}

TEST(StorageStormTest, FailedMappingsLeaveStorageAsItWas) {
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto backend = std::make_shared<testing::FaultyMemoryBackend>();
    Storage storage(storm_config(), backend);
    std::vector<std::shared_ptr<RequestPages>> requests(4);
    for (auto& request : requests) request = storage.create_request_pages();
    for (int i = 0; i < 120; ++i) {
      if (random() % 3 == 0) {
        const auto before = storage.get_storage_statistics(kGpuLevel);
        const std::int64_t quota = storage.get_quota(kGpuLevel);
        const std::int64_t bytes = storage.get_num_bytes(kGpuLevel);
        backend->log->maps_left = random() % 2 == 0 ? static_cast<std::int64_t>(random() % 24) : -1;
        try {
          storage.resize(kGpuLevel, static_cast<std::int64_t>(1 + random() % 60) * kMiB);
        } catch (const std::bad_alloc&) {
          ASSERT_EQ(storage.get_storage_statistics(kGpuLevel), before);
          ASSERT_EQ(storage.get_quota(kGpuLevel), quota);
          ASSERT_LE(storage.get_num_bytes(kGpuLevel), bytes);
        }
        backend->log->maps_left = -1;
      } else if (random() % 12 == 0) {
        auto& request = requests[random() % requests.size()];
        request->close(0);
        request = storage.create_request_pages();
      } else {
        step(*requests[random() % requests.size()], random);
      }
      expect_exact(storage, requests);
      ASSERT_EQ(backend->log->mapped * 2 * kMiB, storage.get_num_bytes(kGpuLevel));
    }
    for (auto& request : requests) request->close(0);
    storage.trim();
    ASSERT_LE(storage.get_num_bytes(kGpuLevel), storage.get_quota(kGpuLevel));
  }
}

// A device that fails when it is waited for holds memory back, and nothing else.
TEST(StorageStormTest, AResizeIsCompleteThoughTheDeviceCannotBeWaitedFor) {
  const auto backend = std::make_shared<testing::FaultyMemoryBackend>();
  Storage storage(storm_config(), backend);
  storage.resize(kGpuLevel, 60 * kMiB);
  const std::int64_t bytes = storage.get_num_bytes(kGpuLevel);
  backend->log->synchronize_fails = true;
  storage.resize(kGpuLevel, 20 * kMiB);
  EXPECT_EQ(storage.get_quota(kGpuLevel), 20 * kMiB);
  EXPECT_EQ(storage.get_num_bytes(kGpuLevel), bytes);
  const auto shrunk = storage.get_storage_statistics(kGpuLevel);
  EXPECT_THROW(storage.trim(), testing::DeviceFault);
  EXPECT_EQ(storage.get_storage_statistics(kGpuLevel), shrunk);
  EXPECT_EQ(storage.get_num_bytes(kGpuLevel), bytes);
  // A growth that fails is undone, though what it mapped cannot be unmapped.
  backend->log->maps_left = 1;
  EXPECT_THROW(storage.resize(kGpuLevel, 64 * kMiB), std::bad_alloc);
  EXPECT_EQ(storage.get_storage_statistics(kGpuLevel), shrunk);
  EXPECT_EQ(storage.get_quota(kGpuLevel), 20 * kMiB);
  backend->log->synchronize_fails = false;
  storage.trim();
  EXPECT_LE(storage.get_num_bytes(kGpuLevel), 20 * kMiB);
  EXPECT_EQ(storage.get_storage_statistics(kGpuLevel), shrunk);
}

TEST(StorageStormTest, NothingIsLeftOfAStorageThatCouldNotBeMade) {
  for (std::int64_t maps = 0; maps < 11; ++maps) {
    const auto backend = std::make_shared<testing::FaultyMemoryBackend>();
    backend->log->maps_left = maps;
    EXPECT_THROW(Storage(storm_config(), backend), std::bad_alloc) << maps;
    EXPECT_EQ(backend->log->mapped, 0);
  }
}

}  // namespace
}  // namespace sparse_kvcm
