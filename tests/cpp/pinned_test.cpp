// Pinned memory of every backend: size, progress, refusals, and registration in several chunks.
#include <stdexcept>

#include "faulty_backend.hpp"
#include "group_fixture.hpp"
#include "host_files.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kChunk = 2 * kMiB;

struct Stop : std::runtime_error {
  Stop() : std::runtime_error("stop") {}
};

class PinnedTest : public DeviceTest {
 protected:
  static Backend& backend() { return *backend_for(device()); }
};
SPARSE_KVCM_ON_EVERY_DEVICE(PinnedTest);

TEST_P(PinnedTest, HasExactlyTheSizeAndIsZero) {
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{4097}, kChunk - 1, kChunk,
        kChunk + 1, 3 * kChunk + 5}) {
    for (int round = 0; round < 2; ++round) {
      const BufferPtr buffer = backend().allocate_pinned(bytes, {.chunk_bytes = kChunk});
      EXPECT_EQ(buffer->bytes(), bytes);
      EXPECT_NE(buffer->device_data(), nullptr);
      ASSERT_EQ(static_cast<std::size_t>(
                    std::count(buffer->data(), buffer->data() + bytes, std::byte{0})),
                bytes);
      std::fill_n(buffer->data(), bytes, kPoisonByte);
    }
  }
}

TEST_P(PinnedTest, KernelsReadAndWriteAcrossTheBordersOfChunks) {
  // A unit of 1,168 B does not divide a chunk, so that units lie across both borders.
  constexpr std::int32_t kUnit = 1168;
  constexpr std::int32_t kPerPage = 64;
  constexpr std::int32_t kPages = 2 * kChunk / kUnit / kPerPage + 3;
  TestGroup group(device(), {UnitLayout({kUnit}), 1, kPerPage, 64, kPages});
  std::vector<ops::UnitMove> in;
  std::vector<ops::UnitMove> out;
  for (const std::size_t border : {kChunk, 2 * kChunk}) {
    const auto unit = static_cast<std::int64_t>(border / kUnit);
    ASSERT_NE(border % kUnit, 0U);
    for (std::int64_t u = unit - 2; u <= unit + 2; ++u) {
      auto& moves = u % 2 == 0 ? in : out;
      moves.push_back({u, static_cast<std::int32_t>(in.size() + out.size())});
    }
  }
  out.push_back({group.num_host_units() - 1, 63});
  for (const ops::UnitMove& loaded : in) group.tag_host(loaded.host_unit, loaded.host_unit);
  for (const ops::UnitMove& flushed : out) group.tag_arena(flushed.slot, -1 - flushed.slot);
  group.upload({.chunk_bytes = kChunk});
  for (const ops::UnitMove& loaded : in) group.tag_arena(loaded.slot, loaded.host_unit);
  for (const ops::UnitMove& flushed : out) group.tag_host(flushed.host_unit, -1 - flushed.slot);
  const std::vector<ops::GroupMemory> groups{group.memory()};
  ops::move_units(device(), {in, groups, ops::MoveDirection::kHostToArena}, 0);
  ops::move_units(device(), {out, groups, ops::MoveDirection::kArenaToHost}, 0);
  group.expect_as_modelled();
}

TEST_P(PinnedTest, ProgressAscendsToTheTotal) {
  for (const std::size_t bytes : {std::size_t{1}, 3 * kChunk + 5, 150 * kMiB}) {
    std::int64_t last = 0;
    const auto progress = [&](std::int64_t done, std::int64_t total) {
      EXPECT_GE(done, last);
      EXPECT_EQ(total, static_cast<std::int64_t>(bytes));
      last = done;
    };
    const BufferPtr buffer =
        backend().allocate_pinned(bytes, {.progress = progress, .chunk_bytes = kChunk});
    EXPECT_EQ(last, static_cast<std::int64_t>(bytes));
  }
}

TEST_P(PinnedTest, ProgressThatThrowsLeavesNothing) {
  constexpr std::size_t kBytes = 150 * kMiB;
  const auto progress = [](std::int64_t, std::int64_t) { throw Stop(); };
  std::size_t before = 0;
  for (int round = 0; round < 20; ++round) {
    if (round == 1) before = mapped_bytes();
    EXPECT_THROW(static_cast<void>(backend().allocate_pinned(
                     kBytes, {.progress = progress, .chunk_bytes = kChunk})),
                 Stop);
  }
  EXPECT_LT(mapped_bytes(), before + kBytes);
  EXPECT_EQ(backend().allocate_pinned(kBytes)->bytes(), kBytes);
}

TEST_P(PinnedTest, RefusesMemoryThatNoMachineHas) {
  for (const std::size_t bytes : {std::size_t{1} << 60, ~std::size_t{0}}) {
    EXPECT_THROW(static_cast<void>(backend().allocate_pinned(bytes)), HostMemoryError);
  }
  EXPECT_EQ(backend().allocate_pinned(16)->bytes(), 16U);
}

// --- the manager's pools ---

KvCacheManagerConfig two_pools(std::int32_t unit_bytes, std::int64_t host_pages) {
  KvCacheManagerConfig config;
  config.tokens_per_block = 4;
  config.groups = {{{7, 3}, 4, UnitLayout({unit_bytes})}, {{5}, 4, UnitLayout({unit_bytes})}};
  config.cached_slots = config.window_slots = 8;
  config.arena_pages = 4;
  config.host_pages = host_pages;
  config.max_leases = 1;
  return config;
}

TEST(ManagerMemoryTest, ProgressRunsOverAllPools) {
  constexpr std::int64_t kTotal = std::int64_t{3000} * 4 * 3 * 1024;
  std::vector<std::int64_t> calls;
  const KvCacheManager manager(two_pools(1024, 3000), {[&](std::int64_t done, std::int64_t total) {
                                 EXPECT_EQ(total, kTotal);
                                 calls.push_back(done);
                               }});
  EXPECT_EQ(manager.memory_use().host_bytes, kTotal);
  EXPECT_TRUE(std::is_sorted(calls.begin(), calls.end()));
  EXPECT_EQ(std::count(calls.begin(), calls.end(), kTotal / 3 * 2), 1);  // the first pool
  EXPECT_EQ(calls.back(), kTotal);
}

TEST(ManagerMemoryTest, ProgressThatThrowsLeavesNothing) {
  constexpr std::int64_t kTotal = std::int64_t{3000} * 4 * 3 * 1024;
  const std::size_t before = mapped_bytes();
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(KvCacheManager(two_pools(1024, 3000), {[](std::int64_t done, std::int64_t total) {
                                  if (done == total) throw Stop();
                                }}),
                 Stop);
  }
  EXPECT_LT(mapped_bytes(), before + kTotal);
}

TEST(ManagerMemoryTest, PoolsThatDoNotFitTogetherAreRefusedAsAWhole) {
  constexpr std::int64_t kPages = (std::int64_t{1} << 31) - 1;
  try {
    const KvCacheManager refused(two_pools(65'536, kPages), {[](std::int64_t, std::int64_t) {
                                   FAIL() << "memory was touched";
                                 }});
    FAIL() << "was not refused";
  } catch (const HostMemoryError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("[KvCacheManager] "), 0U) << text;
    const std::string wanted = std::to_string(kPages * 4 * 3 * 65'536) + " B are wanted";
    EXPECT_NE(text.find(wanted), std::string::npos) << text;
  }
}

TEST(ManagerMemoryTest, AWarningOfSeveralPoolsIsKeptOnce) {
  const auto backend = std::make_shared<FaultyBackend>();
  EXPECT_TRUE(make_manager(two_pools(16, 1), backend)->warnings().empty());
  backend->set_warning("too far away");
  EXPECT_EQ(make_manager(two_pools(16, 1), backend)->warnings(),
            std::vector<std::string>{"too far away"});
}

}  // namespace
}  // namespace sparse_kvcm::testing
