// Grouping, places in slots, floors and ratios.
#include "sparse_kvcm/storage_layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "sparse_kvcm/error.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::dense_layer;
using testing::kGiB;
using testing::kMiB;
using testing::small_config;
using testing::sparse_layer;

using Bytes = std::vector<std::int64_t>;

TEST(StorageLayoutTest, LayersWithOneLifeCycleFormAGroup) {
  const StorageLayout layout(small_config(
      {dense_layer(0, {{"K", 64, {}, false}}, 8), dense_layer(1, {{"K", 64, {}, false}}),
       dense_layer(2, {{"K", 32, {}, false}}, 8), dense_layer(3, {{"K", 64, {}, false}}, 8, 4)}));
  ASSERT_EQ(layout.layer_groups().size(), 3u);
  EXPECT_EQ(layout.layer_grouping(), (std::vector<std::vector<std::int32_t>>{{0, 2}, {1}, {3}}));
  EXPECT_EQ(layout.get_layer_group_id(2), 0);
}

TEST(StorageLayoutTest, NoSinksAndZeroSinksAreOneLifeCycle) {
  LayerConfig zero = dense_layer(1, {{"K", 64, {}, false}}, 8);
  zero.num_sink_tokens = 0;
  const StorageLayout layout(small_config({dense_layer(0, {{"K", 64, {}, false}}, 8), zero}));
  EXPECT_EQ(layout.layer_groups().size(), 1u);
}

TEST(StorageLayoutTest, BuffersOfEqualSizeLieSideBySideLargestFirst) {
  const StorageLayout layout(
      small_config({dense_layer(0, {{"S", 16, {}, false}, {"K", 64, {}, false}}),
                    dense_layer(1, {{"K", 64, {}, false}, {"S", 16, {}, false}})}));
  ASSERT_EQ(layout.pool_groups().size(), 1u);
  EXPECT_EQ(layout.pool_groups()[0].slot_bytes, (Bytes{128, 32}));
  EXPECT_EQ(layout.place(1, "K").pool, 0);
  EXPECT_EQ(layout.place(1, "K").offset_bytes(), 64);
  EXPECT_EQ(layout.place(0, "S").pool, 1);
  EXPECT_EQ(layout.place(1, "S").converter,
            (PageIndexConverter{2, 1, 1, 1, PageIndexMode::kPerLayer}));
}

TEST(StorageLayoutTest, ABufferWithSmallerKernelPagesJoinsThoseOfItsWholePage) {
  const StorageLayout layout(small_config(
      {dense_layer(0, {{"K", 64, {}, false}}), dense_layer(1, {{"K", 16, 1, false}})}));
  EXPECT_EQ(layout.pool_groups()[0].slot_bytes, (Bytes{128}));
  EXPECT_EQ(layout.place(1, "K").converter.expansion, 4);
  EXPECT_EQ(layout.place(1, "K").offset_bytes(), 64);
  EXPECT_EQ(layout.place(1, "K").page_bytes, 16);
}

TEST(StorageLayoutTest, LayerGroupsWithEqualSlotsShareAPoolGroup) {
  // Two buffers of 64 in one group, one of 128 in the other: the slots are alike.
  const StorageLayout layout(small_config(
      {dense_layer(0, {{"K", 64, {}, false}, {"V", 64, {}, false}}),
       dense_layer(1, {{"K", 128, {}, false}}, 8), dense_layer(2, {{"K", 96, {}, false}}, 16)}));
  ASSERT_EQ(layout.pool_groups().size(), 2u);
  EXPECT_EQ(layout.pool_groups()[0].layer_groups, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(layout.place(0, "V").converter.scale, 2);
  EXPECT_EQ(layout.place(1, "K").converter.scale, 1);
}

TEST(StorageLayoutTest, SparseLayersNeverShareSlotsWithDenseOnes) {
  StorageConfig config =
      small_config({sparse_layer(0, 64), dense_layer(1, {{"K", 64, {}, false}})});
  config.cache_tiers.push_back({CacheTier::kHostMem, kMiB, 0});
  config.selection_groups = {{{0}, 4, UnitLayout({16})}};
  const StorageLayout layout(config);
  ASSERT_EQ(layout.pool_groups().size(), 3u);
  EXPECT_FALSE(layout.pool_groups()[0].is_sparse);
  EXPECT_EQ(layout.pool_groups()[0].level, kGpuLevel);
  EXPECT_TRUE(layout.pool_groups()[1].is_sparse);
  EXPECT_EQ(layout.pool_groups()[1].level, kSparseHistoryLevel);
  EXPECT_TRUE(layout.pool_groups()[2].is_cold);
  EXPECT_EQ(layout.pool_groups()[2].layer_groups, layout.pool_groups()[0].layer_groups);
  EXPECT_TRUE(layout.place(0, "KEY").is_sparse);
}

TEST(StorageLayoutTest, SparsePoolsAreTheHostRowsOfTheSelectionGroups) {
  // V4: 576 + 8 bytes per entry and layer make rows of 592 on the host, 64 entries a page.
  const StorageLayout layout(testing::v4_config(kGiB, kGiB));
  const auto sparse = std::ranges::find(layout.pool_groups(), true, &PoolGroupDesc::is_sparse);
  ASSERT_NE(sparse, layout.pool_groups().end());
  EXPECT_EQ(sparse->slot_bytes, Bytes(21, 592 * 64));
  const StorageLayout glm(testing::glm_config(kGiB, kGiB));
  EXPECT_EQ(glm.pool_groups()[1].slot_bytes[1], 576 * 64);
  EXPECT_EQ(glm.pool_groups()[1].slot_bytes[2], 4 * 576 * 64);
}

TEST(StorageLayoutTest, ColdGroupingIsIndependentOfHotGrouping) {
  // Other slots on the GPU, as many bytes in one piece.
  StorageConfig config = small_config({dense_layer(0, {{"K", 64, {}, false}, {"V", 32, {}, false}}),
                                       dense_layer(1, {{"K", 96, {}, false}}, 8)});
  config.cache_tiers.push_back({CacheTier::kHostMem, kMiB, 0});
  const StorageLayout layout(config);
  ASSERT_EQ(layout.pool_groups().size(), 3u);
  EXPECT_EQ(layout.pool_groups()[2].slot_bytes, (Bytes{96}));
  EXPECT_EQ(layout.pool_groups()[2].layer_groups, (std::vector<std::int32_t>{0, 1}));
}

TEST(StorageLayoutTest, UnknownLayersAndRolesAreRefused) {
  const StorageLayout layout(small_config({dense_layer(3, {{"K", 64, {}, false}})}));
  EXPECT_THROW(static_cast<void>(layout.get_layer_group_id(0)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(layout.place(3, "V")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(layout.min_quota(1)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(layout.get_num_bytes(1, 1)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(layout.get_num_bytes(0, -1)), InvalidArgument);
}

TEST(StorageSizingTest, GranulesGrowWithTheTier) {
  const std::pair<std::int64_t, std::int64_t> cases[] = {
      {256 * kMiB, 2}, {2 * kGiB - 1, 2}, {2 * kGiB, 4},     {7 * kGiB, 8},
      {8 * kGiB, 16},  {16 * kGiB, 32},   {1024 * kGiB, 32},
  };
  for (const auto& [quota, mib] : cases) {
    const StorageLayout layout(small_config({dense_layer(0, {{"K", 64, {}, false}})}, quota));
    EXPECT_EQ(layout.granule_bytes(kGpuLevel), mib * kMiB) << quota;
  }
}

TEST(StorageSizingTest, FloorsHoldTheWidestWindowWithHeadroom) {
  // Window 8 in pages of 4 touches 3 pages, with a sink page 4; 4 / 0.97 rounds up to 5.
  const StorageLayout layout(small_config(
      {dense_layer(0, {{"K", 64, {}, false}}, 8, 1), dense_layer(1, {{"K", 32, {}, false}})}));
  EXPECT_EQ(layout.min_slots(), (Bytes{5, 5}));
}

TEST(StorageSizingTest, FloorsOfGroupsThatShareSlotsAddUp) {
  const StorageLayout layout(small_config(
      {dense_layer(0, {{"K", 64, {}, false}}, 8), dense_layer(1, {{"K", 64, {}, false}}, 16)}));
  EXPECT_EQ(layout.min_slots(), (Bytes{9}));  // (3 + 5) / 0.97
}

TEST(StorageSizingTest, ConstraintsRaiseFloorsAlsoUnderAnExplicitRatio) {
  StorageConfig config = small_config(
      {dense_layer(0, {{"K", 64, {}, false}}), dense_layer(1, {{"K", 32, {}, false}}, 8)});
  config.constraints = {{{{400, 399}, {8, 0}}, 0}};
  config.initial_pool_ratio = {0.0625, 0.9375};
  const StorageLayout layout(config);
  EXPECT_EQ(layout.min_slots(), (Bytes{106, 5}));  // 102 and 2 + 2 pages
  EXPECT_GE(layout.slots_for_quota(kGpuLevel, 1)[0], 106);
}

TEST(StorageSizingTest, SharedPagesOfASystemPromptCountOnce) {
  StorageConfig config = small_config(
      {dense_layer(0, {{"K", 64, {}, false}}), dense_layer(1, {{"K", 32, {}, false}}, 8)});
  const StorageLayout layout(config);
  // 10 pages each, 4 of them shared. The windows [32, 39] hold pages 8 and 9 of each request.
  EXPECT_EQ(layout.count_slots({{{40, 39}, {40, 39}}, 17}), (Bytes{4 + 6 + 6, 4}));
  // At 20 tokens the window [12, 19] still reads the shared page 3.
  EXPECT_EQ(layout.count_slots({{{20, 19}, {20, 19}}, 17}), (Bytes{4 + 1 + 1, 1 + 1 + 1}));
}

TEST(StorageSizingTest, ScratchCountsAsTheSlotsThatItShares) {
  StorageConfig config = small_config({});
  for (std::int32_t layer = 0; layer < 14; ++layer) {
    config.layers.push_back(dense_layer(layer, {{"K", 64, {}, false}}, 8));
  }
  const BatchDesc prefill{{{264, 0}}, 0};
  EXPECT_EQ(StorageLayout(config).count_slots(prefill), (Bytes{66}));
  config.swa_scratch_reuse = SwaScratchReuseConfig{0};
  const StorageLayout layout(config);
  EXPECT_EQ(layout.scratch_range(0, {264, 0}), (PageRange{0, 64}));
  EXPECT_EQ(layout.scratch_slots(0, 64), 5);
  EXPECT_EQ(layout.count_slots(prefill), (Bytes{5 + 2}));
}

TEST(StorageSizingTest, TheRatioComesFromTheFirstSourceThereIs) {
  StorageConfig config = small_config(
      {dense_layer(0, {{"K", 64, {}, false}}), dense_layer(1, {{"K", 32, {}, false}}, 8)});
  // 2,049 tokens: 513 pages of 64 bytes, and 3 pages of 32 behind the boundary.
  const double built_in = StorageLayout(config).pool_ratio()[0];
  EXPECT_DOUBLE_EQ(built_in, 513.0 * 64 / (513 * 64 + 3 * 32));
  config.constraints = {{{{16, 15}}, 0}, {{{40, 39}}, 0}};
  EXPECT_DOUBLE_EQ(StorageLayout(config).pool_ratio()[0], 640.0 / (640 + 64));
  config.typical_step = BatchDesc{{{8, 7}}, 0};
  EXPECT_DOUBLE_EQ(StorageLayout(config).pool_ratio()[0], 128.0 / (128 + 64));
  config.initial_pool_ratio = {0.25, 0.75};
  EXPECT_DOUBLE_EQ(StorageLayout(config).pool_ratio()[0], 0.25);
}

TEST(StorageSizingTest, AMultipleOfThePageIsSampledBehindTheBoundary) {
  // 33,024 = 129 pages of 256. At the length itself a window of 128 has one page, right behind the
  // boundary two; page counts of full history are those of the last page either way.
  StorageConfig config = small_config(
      {dense_layer(0, {{"K", 64, {}, false}}), dense_layer(1, {{"K", 32, {}, false}}, 128)});
  config.tokens_per_block = 256;
  const StorageLayout layout(config);
  EXPECT_EQ(layout.count_slots({{{33'024, 33'023}}, 0}), (Bytes{129, 1}));
  EXPECT_EQ(layout.count_slots({{{128 * 256 + 1, 128 * 256}}, 0}), (Bytes{129, 2}));
}

TEST(StorageSizingTest, ARatioForOtherPoolGroupsIsRefused) {
  StorageConfig config = small_config({dense_layer(0, {{"K", 64, {}, false}})});
  config.initial_pool_ratio = {0.5, 0.5};
  EXPECT_THROW(StorageLayout{config}, InvalidArgument);
}

TEST(StorageSizingTest, SlotsFitTheQuotaAndNeverFallBelowFloors) {
  for (const std::int64_t gpu : {std::int64_t{1}, 100 * kMiB, kGiB, 45 * kGiB}) {
    for (const auto make : {&testing::v32_config, &testing::glm_config, &testing::v4_config}) {
      const StorageLayout layout(make(gpu, 2 * gpu));
      const Bytes least = layout.min_slots();
      for (std::int32_t level = 0; level < layout.num_levels(); ++level) {
        const std::int64_t quota = layout.effective_quota(level, gpu * (level + 1));
        const Bytes slots = layout.slots_for_quota(level, quota);
        std::int64_t bytes = 0;
        for (std::size_t g = 0; g < slots.size(); ++g) {
          if (layout.pool_groups()[g].level != level) continue;
          EXPECT_GE(slots[g], least[g]);
          bytes += layout.get_num_bytes(static_cast<std::int32_t>(g), slots[g]);
        }
        EXPECT_LE(bytes, quota);
        EXPECT_GE(bytes, layout.min_quota(level));
      }
    }
  }
}

// Bytes of the host tier that history and cold pools get, in that order.
std::pair<std::int64_t, std::int64_t> divided(const StorageConfig& config) {
  const StorageLayout layout(config);
  const Bytes slots =
      layout.slots_for_quota(kSparseHistoryLevel, config.cache_tiers[kSparseHistoryLevel].quota);
  std::int64_t history = 0;
  std::int64_t cold = 0;
  for (std::size_t g = 0; g < slots.size(); ++g) {
    const PoolGroupDesc& group = layout.pool_groups()[g];
    if (group.level != kSparseHistoryLevel) continue;
    (group.is_sparse ? history : cold) +=
        layout.get_num_bytes(static_cast<std::int32_t>(g), slots[g]);
  }
  return {history, cold};
}

TEST(StorageSizingTest, ColdPoolsHoldTheSuspendedRequestsPagesAndHistoryHasTheRest) {
  for (const auto make : {&testing::v32_config, &testing::glm_config, &testing::v4_config}) {
    // The larger tier holds the typical step's history too.
    for (const auto& [quota, requests] :
         {std::pair(64 * kGiB, 1), {256 * kGiB, 1}, {256 * kGiB, 8}}) {
      StorageConfig config = make(8 * kGiB, quota);
      config.typical_step = BatchDesc{std::vector<KvCacheDesc>(100, {32'769, 32'768}), 0};
      config.suspended = BatchDesc{std::vector<KvCacheDesc>(requests, {32'768, 32'768}), 0};
      const StorageLayout layout(config);
      const Bytes wanted = layout.count_slots(*config.suspended);
      const Bytes slots = layout.slots_for_quota(kSparseHistoryLevel, quota);
      std::int64_t cold_bytes = 0;
      std::int64_t pools = 0;
      for (std::size_t g = 0; g < slots.size(); ++g) {
        const PoolGroupDesc& group = layout.pool_groups()[g];
        pools += group.level == kSparseHistoryLevel ? std::ssize(group.slot_bytes) : 0;
        if (!group.is_cold) continue;
        EXPECT_GE(slots[g], wanted[g]);
        cold_bytes += wanted[g] * group.slot_bytes[0];
      }
      const auto [history, cold] = divided(config);
      const std::int64_t granule = layout.granule_bytes(kSparseHistoryLevel);
      EXPECT_LE(cold, cold_bytes + pools * granule);
      EXPECT_GE(history, quota - cold - pools * granule);
    }
    // Without a word about it there is room for one of the typical requests.
    StorageConfig config = make(8 * kGiB, 64 * kGiB);
    config.typical_step = BatchDesc{{{7, 6}, {32'769, 32'768}}, 0};
    const auto unnamed = divided(config);
    config.suspended = BatchDesc{{{32'769, 32'769}}, 0};
    EXPECT_EQ(divided(config), unnamed);
  }
}

TEST(StorageSizingTest, AHostTierThatIsTooSmallForBothIsDividedByTheirBytes) {
  // A granule has 16 pages on the GPU, and 32 pages of each of two groups of history.
  StorageConfig config = small_config({sparse_layer(0, 64 * 1024), sparse_layer(1, 64 * 1024),
                                       dense_layer(2, {{"K", 128 * 1024, {}, false}})});
  config.cache_tiers.push_back({CacheTier::kHostMem, 16 * kMiB, 0});
  const UnitLayout layout({16 * 1024});
  config.selection_groups = {{{0}, 4, layout}, {{1}, 4, layout}};
  const KvCacheDesc request{256, 255};  // 64 pages
  const auto suspend = [&](std::size_t requests, std::int32_t length) {
    config.suspended = BatchDesc{std::vector<KvCacheDesc>(requests, {length, length}), 0};
  };
  config.typical_step = BatchDesc{{request}, 0};
  EXPECT_EQ(divided(config), std::pair(8 * kMiB, 8 * kMiB));
  config.initial_pool_ratio = {0.99, 0.01};  // says nothing about cold pools
  EXPECT_EQ(divided(config), std::pair(8 * kMiB, 8 * kMiB));
  config.typical_step = BatchDesc{{request, request, request}, 0};
  suspend(4, 64);  // 64 pages, too
  EXPECT_EQ(divided(config), std::pair(12 * kMiB, 4 * kMiB));
  suspend(1, 256);  // by bytes there would be half of a request
  EXPECT_EQ(divided(config), std::pair(8 * kMiB, 8 * kMiB));
  suspend(1, 260);  // more than half of the tier
  EXPECT_EQ(divided(config), std::pair(12 * kMiB, 4 * kMiB));
  suspend(9, 256);
  EXPECT_EQ(divided(config), std::pair(4 * kMiB, 12 * kMiB));
  suspend(1, 4);
  EXPECT_EQ(divided(config), std::pair(12 * kMiB, 2 * kMiB));  // 7 granules for two equal pools
  std::erase_if(config.layers, [](const LayerConfig& layer) { return layer.layer_id < 2; });
  config.selection_groups.clear();
  config.initial_pool_ratio.clear();
  EXPECT_EQ(divided(config), std::pair(std::int64_t{0}, 16 * kMiB));
}

TEST(StorageSizingTest, GlmHoldsItsIndexerKeysAtTwentyOneTimes132BytesPerToken) {
  const StorageLayout layout(testing::glm_config(kGiB, 4 * kGiB));
  EXPECT_EQ(layout.pool_groups()[0].slot_bytes, (Bytes{21 * 132 * 64}));
  const Bytes& host = layout.pool_groups()[1].slot_bytes;
  EXPECT_EQ(std::accumulate(host.begin(), host.end(), std::int64_t{0}), 78 * 576 * 64);
}

TEST(StorageSizingTest, ClampFindsTheLongestSequenceThatFits) {
  const StorageLayout layout(small_config(
      {dense_layer(0, {{"K", 64, {}, false}}), dense_layer(1, {{"K", 32, {}, false}}, 8)}));
  EXPECT_EQ(layout.clamp_max_seq_len({100, 100}, 1, 1'000'000), 97 * 4);  // 97 % of 100 pages
  EXPECT_EQ(layout.clamp_max_seq_len({100, 100}, 1, 30), 30);
  EXPECT_EQ(layout.clamp_max_seq_len({100, 100}, 0x7FFFFFFF, 0x7FFFFFFF), 0);
  EXPECT_EQ(layout.clamp_max_seq_len({100, 100}, 1, 0), 0);
  EXPECT_EQ(layout.clamp_max_seq_len({100, 100}, 11, 1'000'000), 87 * 4);
  // The window needs 3 slots: with fewer, its own pages bind.
  EXPECT_EQ(layout.clamp_max_seq_len({100, 3}, 1, 1'000'000), 8);
  EXPECT_EQ(layout.clamp_max_seq_len({100, 2}, 1, 1'000'000), 4);
  EXPECT_EQ(layout.clamp_max_seq_len({2, 100}, 1, 1'000'000), 4);  // a single page
  EXPECT_EQ(layout.clamp_max_seq_len({1, 100}, 1, 1'000'000), 0);
  EXPECT_THROW(static_cast<void>(layout.clamp_max_seq_len({1, 1}, 0, 1)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(layout.clamp_max_seq_len({1, 1}, 1, -1)), InvalidArgument);
}

// 14 window layers in one slot, so that 14 scratch pages share it; pages of 4, window 8.
TEST(StorageSizingTest, ClampCountsWhatAPrefillHasInScratch) {
  StorageConfig config = small_config({});
  for (std::int32_t layer = 0; layer < 14; ++layer) {
    config.layers.push_back(dense_layer(layer, {{"K", 64, {}, false}}, 8));
  }
  config.max_util_for_resume = 1;
  config.constraints = {{{{264, 0}}, 0}};  // steps of 264 tokens
  EXPECT_EQ(StorageLayout(config).clamp_max_seq_len({65}, 1, 1'000'000), 65 * 4);
  EXPECT_EQ(StorageLayout(config).clamp_max_seq_len({3}, 1, 1'000'000), 3 * 4);
  // The next step writes 66 pages and finds two that its first query reads.
  EXPECT_EQ(StorageLayout(config).clamp_max_seq_len({67}, 1, 1'000'000), 264 + 65 * 4);
  EXPECT_EQ(StorageLayout(config).clamp_max_seq_len({68}, 1, 1'000'000), 1'000'000);
  config.swa_scratch_reuse = SwaScratchReuseConfig{0};
  const StorageLayout layout(config);
  // Of 17 pages 14 are in scratch and share a slot, of 18 one more: 2 + 3.
  EXPECT_EQ(layout.clamp_max_seq_len({4}, 1, 1'000'000), 17 * 4);
  EXPECT_EQ(layout.clamp_max_seq_len({3}, 1, 1'000'000), 3 * 4);
  EXPECT_EQ(layout.clamp_max_seq_len({5 + 3}, 1, 264), 264);
  config.constraints.clear();  // only decoding
  EXPECT_EQ(StorageLayout(config).clamp_max_seq_len({3}, 1, 1'000'000), 1'000'000);
}

TEST(StorageSizingTest, EveryRequestOfABatchCountsHoweverManyThereAre) {
  StorageConfig config = small_config({dense_layer(0, {{"K", 64, {}, false}}, 8)});
  const BatchDesc batch{std::vector<KvCacheDesc>(100'000, {41, 40}), 0};
  config.constraints = {batch};
  const StorageLayout layout(config);
  EXPECT_EQ(layout.count_slots(batch), Bytes{300'000});
  EXPECT_GE(static_cast<double>(layout.min_slots()[0]) * 0.97, 300'000);
  EXPECT_EQ(layout.clamp_max_seq_len({310'000}, 300'000, 1'000'000), 1'000'000);
  EXPECT_EQ(layout.clamp_max_seq_len({310'000}, 310'000, 1'000'000), 0);
}

TEST(StorageSizingTest, ConstraintsThatNoMachineHoldsAreRefusedWithTheirSlots) {
  StorageConfig config = small_config({dense_layer(0, {{"K", std::int64_t{1} << 40, {}, false}})});
  config.constraints = {{{{2'000'000'000, 0}}, 0}};
  EXPECT_THROW(static_cast<void>(StorageLayout(config).min_quota(kGpuLevel)), InvalidArgument);
}

}  // namespace
}  // namespace sparse_kvcm
