// KvCacheManager: its config, what it makes, its memory and its lifetime.
#include <functional>
#include <limits>
#include <set>

#include "engine_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

class ManagerTest : public EngineTest {
 protected:
  // The config with one change must be refused with a message that names `field`.
  static void expect_bad_config(const std::string& field,
                                const std::function<void(KvCacheManagerConfig&)>& change) {
    KvCacheManagerConfig c = config();
    change(c);
    try {
      const KvCacheManager refused(c);
      ADD_FAILURE() << field << " was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(field), std::string::npos) << error.what();
      EXPECT_EQ(error.what()[0], '[') << error.what();
    }
  }
  void expect_bad_cache(const KvCacheOptions& options) {
    expect_refused<InvalidArgument>("KvCacheManager.create_kv_cache",
                                    [&] { (void)manager->create_kv_cache(options); });
  }
  void expect_bad_batch(const BatchOptions& options) {
    expect_refused<InvalidArgument>("KvCacheManager.create_batch",
                                    [&] { (void)manager->create_batch(options); });
  }
};

using Config = KvCacheManagerConfig;

// --- the config ---

TEST_F(ManagerTest, RefusesABadPage) {
  for (const std::int32_t tokens : {0, -1, -64})
    expect_bad_config("tokens_per_block", [&](Config& c) { c.tokens_per_block = tokens; });
  for (const std::int32_t tokens : {0, -1, 3, 8})
    expect_bad_config("tokens_per_unit", [&](Config& c) { c.tokens_per_unit = tokens; });
}

TEST_F(ManagerTest, RefusesBadCachedSlots) {
  for (const std::int32_t slots : {0, -4, 9, 65'536})
    expect_bad_config("cached_slots", [&](Config& c) { c.cached_slots = slots; });
}

TEST_F(ManagerTest, RefusesABadWindow) {
  for (const std::int32_t slots : {0, -4, 9})
    expect_bad_config("window_slots", [&](Config& c) { c.window_slots = slots; });
  for (const std::int32_t units : {0, -1, kWindow + 1})
    expect_bad_config("max_new_units", [&](Config& c) { c.max_new_units = units; });
}

TEST_F(ManagerTest, RefusesPoolsWithoutPages) {
  for (const std::int32_t n : {0, -1}) {
    expect_bad_config("arena_pages", [&](Config& c) { c.arena_pages = n; });
    expect_bad_config("host_pages", [&](Config& c) { c.host_pages = n; });
    expect_bad_config("max_leases", [&](Config& c) { c.max_leases = n; });
  }
}

TEST_F(ManagerTest, RefusesPoolsThatSlotNumbersCannotCount) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t pages : {std::int64_t{1} << 31, std::int64_t{1} << 40, kMost}) {
    expect_bad_config("arena_pages", [&](Config& c) { c.arena_pages = pages; });
    expect_bad_config("host_pages", [&](Config& c) { c.host_pages = pages; });
  }
}

TEST_F(ManagerTest, DeviceMemoryThatNoMachineHasIsRefusedByThePartThatWantsIt) {
  KvCacheManagerConfig config;
  config.tokens_per_block = 16;
  config.groups = {{{5}, 16, UnitLayout({65'536})}};
  config.cached_slots = config.window_slots = 16;
  config.arena_pages = (std::int64_t{1} << 27) - 2;  // 2^47 bytes
  config.host_pages = 1;
  config.max_leases = 1;
  try {
    const KvCacheManager too_large(config);
    FAIL() << "was given";
  } catch (const DeviceMemoryError& error) {
    EXPECT_TRUE(
        std::string(error.what())
            .starts_with(
                "[KvCacheManager] the arena of layer 5 takes 140737487306752 B of device memory"))
        << error.what();
  }
}

TEST_F(ManagerTest, RefusesBadGroups) {
  expect_bad_config("groups", [](Config& c) { c.groups.clear(); });
  expect_bad_config("groups[1].layers", [](Config& c) { c.groups[1].layers.clear(); });
  expect_bad_config("layer", [](Config& c) { c.groups[1].layers = {7}; });
  expect_bad_config("layer", [](Config& c) { c.groups[0].layers = {7, 7}; });
  for (const std::int32_t k : {0, -1, kCached + 1})
    expect_bad_config("groups[1].top_k", [&](Config& c) { c.groups[1].top_k = k; });
}

TEST_F(ManagerTest, RefusesMorePiecesThanAGroupMayHave) {
  const auto with_layers = [](std::int32_t count) {
    Config c = config();
    c.groups[0].layers.clear();
    for (std::int32_t n = 0; n < count; ++n) c.groups[0].layers.push_back(10 + n);
    return c;
  };
  EXPECT_THROW(KvCacheManager{with_layers(kMaxPieces / 2 + 1)}, InvalidArgument);  // of 2 regions
  EXPECT_NO_THROW(KvCacheManager{with_layers(kMaxPieces / 2)});
}

TEST_F(ManagerTest, RefusesADeviceThatIsNotThere) {
  Config c = config();
  c.device = {DeviceKind::kCuda, 1000};
  EXPECT_THROW(KvCacheManager{c}, std::exception);
  c.device = {DeviceKind::kCpu, 1};
  EXPECT_THROW(KvCacheManager{c}, InvalidArgument);
}

TEST_F(ManagerTest, AcceptsTheSmallestConfig) {
  Config c;
  c.tokens_per_block = 1;
  c.groups = {{{0}, 1, UnitLayout({4})}};
  c.cached_slots = c.window_slots = 1;
  c.arena_pages = c.host_pages = c.max_leases = 1;
  make(c);
  const KvCachePtr kv = seated(1, 1);  // all window: one slot
  EXPECT_EQ(kv->lease()->num_slots(), 1);
  open();
  launch(0, {0});
}

// --- requests ---

TEST_F(ManagerTest, CreateKvCacheRefusesABadNeed) {
  for (const std::int32_t need : {0, -1, kMaxUnits + 1, std::numeric_limits<std::int32_t>::max()})
    expect_bad_cache({need, -1});
  request({1, -1});
}

TEST_F(ManagerTest, CreateKvCacheAcceptsTheLargestNeed) {
  EXPECT_EQ(request({kMaxUnits, -1})->need(), (1 << 24) - 1);
}

TEST_F(ManagerTest, CreateKvCacheRefusesANeedOfMoreTokensThanCanBeCounted) {
  Config c = config();
  c.tokens_per_block = 4 << 10;
  c.tokens_per_unit = 1 << 10;
  make(c);
  constexpr std::int32_t kMost = (1 << 21) - 1;
  EXPECT_EQ(request({kMost, -1})->need(), kMost);
  expect_bad_cache({kMost + 1, -1});
}

TEST_F(ManagerTest, CreateKvCacheRefusesBadCachedSlots) {
  for (const std::int32_t slots : {-2, -4, 5, 65'536, 1 << 30}) expect_bad_cache({kNeed, slots});
}

TEST_F(ManagerTest, CreateKvCacheRefusesCachedSlotsBelowTopKUnlessAllWindow) {
  Config c = config();
  c.groups[1].top_k = 5;
  make(c);
  expect_bad_cache({kNeed, 4});
  expect_bad_cache({kWindow + 1, 0});
  request({kWindow, 0});
  request({4 + kWindow, 4});
  request({kNeed, 8});
}

TEST_F(ManagerTest, CreateKvCacheRefusesALeaseLargerThanTheArena) {
  expect_bad_cache({kNeed * 10, 60});  // with the window 68 of 64 slots
  const KvCachePtr most = request({kNeed * 10, 56});
  EXPECT_TRUE(most->resume(0));
  EXPECT_EQ(manager->occupancy().free_arena_slots, 0);
}

TEST_F(ManagerTest, RequestsMayHaveLeasesOfTheirOwnWidth) {
  const KvCachePtr kv = request({kNeed, 16});
  import(*kv, 30);
  ASSERT_TRUE(kv->resume(0));
  EXPECT_EQ(kv->lease()->cached_slots, 16);
  batch->add(*kv);
  open();
  launch(0, {1, 8, 15, 22});
  record({0});
}

// --- Batches ---

TEST_F(ManagerTest, CreateBatchRefusesBadOptions) {
  for (const std::int32_t rows : {0, -1}) expect_bad_batch({rows, 64, kNoSlot});
  for (const std::int32_t units : {0, -1, kMaxUnits + 1}) expect_bad_batch({4, units, kNoSlot});
  for (const std::int32_t slot : {-2, 0, manager->trash_slot() - 1, manager->trash_slot() + 1})
    expect_bad_batch({4, 64, slot});
  make_batch({1, 1, manager->trash_slot()});
}

TEST_F(ManagerTest, ABatchHasAPageTableColumnPerPageOfMaxUnits) {
  EXPECT_EQ(make_batch({3, 1, kNoSlot})->max_pages(), 1);
  EXPECT_EQ(make_batch({3, kPage, kNoSlot})->max_pages(), 1);
  EXPECT_EQ(make_batch({3, kPage + 1, kNoSlot})->max_pages(), 2);
  EXPECT_EQ(batches.back()->max_rows(), 3);
}

// --- layers and memory ---

TEST_F(ManagerTest, LayersComeGroupByGroupLeaderFirst) {
  EXPECT_EQ(manager->layers(), (std::vector<std::int32_t>{7, 3, 5}));
  EXPECT_EQ(manager->num_groups(), 2);
  EXPECT_EQ(manager->group_of(7), 0);
  EXPECT_EQ(manager->group_of(3), 0);
  EXPECT_EQ(manager->group_of(5), 1);
}

TEST_F(ManagerTest, AnUnknownLayerOrGroupIsRefused) {
  for (const std::int32_t layer : {-1, 0, 8}) {
    expect_refused<InvalidArgument>("KvCacheManager.group_of",
                                    [&] { (void)manager->group_of(layer); });
    expect_refused<InvalidArgument>("KvCacheManager.arena", [&] { (void)manager->arena(layer); });
  }
  for (const std::int32_t group : {-1, 2})
    expect_refused<InvalidArgument>("KvCacheManager.host_history",
                                    [&] { (void)manager->host_history(group); });
}

TEST_F(ManagerTest, MemoryHasTheShapesOfTheLayouts) {
  EXPECT_EQ(manager->arena(3).shape, (std::vector<std::int64_t>{17, 64}));  // 4 x (12 + 4)
  EXPECT_EQ(manager->arena(5).shape, (std::vector<std::int64_t>{17, 64}));  // 4 x 16
  EXPECT_EQ(manager->host_history(0).shape, (std::vector<std::int64_t>{30, 4, 32}));  // 2 members
  EXPECT_EQ(manager->host_history(1).shape, (std::vector<std::int64_t>{30, 4, 16}));
  EXPECT_NE(manager->arena(3).data, manager->arena(7).data);
  EXPECT_EQ(manager->arena(3).data, manager->arena(3).device_data);  // on the CPU
}

TEST_F(ManagerTest, MemoryUseCountsAllOfIt) {
  const MemoryUse use = manager->memory_use();
  EXPECT_EQ(use.arena_bytes, 3 * 17 * 64);
  EXPECT_EQ(use.host_bytes, 30 * 4 * (32 + 16));
  // An entry per slot, a clock per lease, in each of 2 groups.
  EXPECT_GE(use.metadata_bytes, std::int64_t{2} * (16 * kPage + 4) * 4);
}

TEST_F(ManagerTest, PlannedMemoryIsWhatIsTaken) {
  EXPECT_EQ(planned_memory(manager->config()), manager->memory_use());
}

TEST_F(ManagerTest, PlannedMemoryOfABatchIsWhatIsTaken) {
  const BatchOptions options{.max_rows = 3, .max_units = 9};
  const BatchMemoryUse planned = planned_batch_memory(manager->config(), options);
  EXPECT_EQ(planned, manager->create_batch(options)->memory_use());
  // Two chunks of 64 KiB, two reports of a word per group and row and one for the launch.
  EXPECT_EQ(planned.staging_bytes, 2 * (65536 + (2 * 3 + 1) * 4));
}

TEST_F(ManagerTest, MemoryOfABadBatchIsNotPlanned) {
  for (const BatchOptions& bad : {BatchOptions{0, 9}, BatchOptions{3, 0}, BatchOptions{3, 9, 7}}) {
    expect_refused<InvalidArgument>("planned_batch_memory",
                                    [&] { (void)planned_batch_memory(manager->config(), bad); });
  }
  KvCacheManagerConfig config = manager->config();
  config.host_pages = 0;
  expect_refused<InvalidArgument>("KvCacheManagerConfig", [&] { (void)planned_memory(config); });
}

TEST_F(ManagerTest, AFreshManagerIsFree) {
  const Occupancy o = manager->occupancy();
  EXPECT_EQ(o.free_host_pages, 30);
  EXPECT_EQ(o.free_arena_slots, 64);
  EXPECT_EQ(o.largest_free_arena_run, 64);
  EXPECT_EQ(o.free_leases, 4);
  EXPECT_EQ(manager->trash_slot(), 64);
}

TEST_F(ManagerTest, OccupancyCountsPagesSlotsAndLeases) {
  const KvCachePtr first = active(5);
  active(9);
  first->suspend(0);
  const Occupancy o = manager->occupancy();
  EXPECT_EQ(o.free_host_pages, 30 - 2 - 3);
  EXPECT_EQ(o.free_arena_slots, 64 - 16);
  EXPECT_EQ(o.largest_free_arena_run, 32);  // 16 before the other lease, 32 behind it
  EXPECT_EQ(o.free_leases, 3);
}

TEST_F(ManagerTest, FreedLeasesCoalesce) {
  std::vector<KvCachePtr> caches;
  for (std::int32_t n = 0; n < 4; ++n) caches.push_back(active(0));
  for (const std::size_t n : {1, 3, 0, 2}) caches[n]->close();
  EXPECT_EQ(manager->occupancy().largest_free_arena_run, 64);
}

TEST_F(ManagerTest, TheTrashPageMayBeWrittenFreely) {
  const KvCachePtr kv = seated(30);
  for (std::int32_t slot = manager->trash_slot(); slot < manager->trash_slot() + kPage; ++slot)
    bytes->write_group(0, slot, {99, 0, 0});
  open();
  launch(0, {1, 2});
  record({0});
}

TEST_F(ManagerTest, MemoryLivesAsLongAsItsView) {
  const MemoryView arena = manager->arena(7);
  const MemoryView host = manager->host_history(0);
  requests.clear();
  batches.clear();
  batch.reset();
  manager.reset();
  arena.data[0] = host.data[0] = std::byte{1};
  EXPECT_EQ(arena.data[0], host.data[0]);
}

TEST_F(ManagerTest, RequestsAndBatchesOutliveTheManager) {
  const KvCachePtr kv = seated(30);
  grow({{0, 31}});
  manager.reset();
  batch->publish(0);
  batch->wait_ready(0);
  batch->abort_step(0);
  kv->suspend(0);
  EXPECT_EQ(kv->watermark(), 30);
}

}  // namespace
}  // namespace sparse_kvcm::testing
