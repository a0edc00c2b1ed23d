// What a StorageConfig refuses (tests/python/test_bad_storage.py has every message), and the
// storage that a manager of sparse layers stands for.
#include "sparse_kvcm/storage_config.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/error.hpp"
#include "sparse_kvcm/storage_layout.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::kGiB;

std::string refusal(const StorageConfig& config) {
  try {
    check(config);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(StorageConfigTest, RealModelsAreAccepted) {
  EXPECT_EQ(refusal(testing::v32_config(kGiB, kGiB)), "accepted");
  EXPECT_EQ(refusal(testing::glm_config(kGiB, kGiB)), "accepted");
  EXPECT_EQ(refusal(testing::v4_config(kGiB, kGiB)), "accepted");
}

TEST(StorageConfigTest, ARefusalNamesFunctionFieldLimitAndValue) {
  StorageConfig config = testing::glm_config(kGiB, kGiB);
  config.layers[3].buffers[0].page_bytes = 0;
  EXPECT_EQ(refusal(config),
            "[StorageConfig] layers[3].buffers[0].page_bytes must be in [1, 1099511627776], got 0");
}

TEST(StorageConfigTest, AUtilisationThatNoTotalComesToIsRefused) {
  StorageConfig config = testing::small_config({testing::dense_layer(0, {{"K", 64, {}, false}})});
  for (const double util : {0.0, 1e-300, 1e-17, 1e-12, 0.000999, 1.001, std::nan("")}) {
    config.max_util_for_resume = util;
    EXPECT_THROW(check(config), InvalidArgument) << util;
  }
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  config.constraints = {{std::vector<KvCacheDesc>(10, {kMost, 0}), 0}};
  for (const double util : {kLeastUtilForResume, 1.0}) {
    config.max_util_for_resume = util;
    const std::int64_t least = StorageLayout(config).min_slots()[0];
    EXPECT_TRUE(fits(10LL * ((kMost + 3LL) / 4), least, util));
  }
}

TEST(StorageConfigTest, SparseLayersNeedAHost) {
  StorageConfig config = testing::glm_config(kGiB, kGiB);
  config.cache_tiers.pop_back();
  EXPECT_NE(refusal(config).find("HOST_MEM"), std::string::npos) << refusal(config);
}

TEST(StorageConfigTest, ASparseLayerOutsideOfEverySelectionGroupIsNamed) {
  StorageConfig config = testing::glm_config(kGiB, kGiB);
  config.selection_groups.back().layers.pop_back();
  EXPECT_NE(refusal(config).find("layer 77"), std::string::npos) << refusal(config);
}

KvCacheManagerConfig manager_config(std::int64_t host_pages) {
  KvCacheManagerConfig config;
  config.groups = {{{0, 1, 2}, 64, UnitLayout({656})}, {{7}, 64, UnitLayout({576, 8}, 576)}};
  config.cached_slots = 128;
  config.window_slots = 64;
  config.arena_pages = 9;
  config.host_pages = host_pages;
  config.max_leases = 3;
  return config;
}

TEST(StorageConfigTest, AManagerOfSparseLayersStandsForAHostTierOfItsPages) {
  for (const std::int64_t pages : {1, 2, 63, 64, 10'000, 200'000}) {
    const KvCacheManagerConfig manager = manager_config(pages);
    const StorageLayout layout(storage_config(manager));
    ASSERT_EQ(layout.pool_groups().size(), 1u);
    EXPECT_EQ(layout.pool_groups()[0].slot_bytes,
              (std::vector<std::int64_t>{64 * 3 * 656, 64 * 592}));
    const std::int64_t quota = layout.config().cache_tiers[kSparseHistoryLevel].quota;
    EXPECT_GE(layout.slots_for_quota(kSparseHistoryLevel, quota)[0], pages);
    const std::int64_t granule = layout.granule_bytes(kSparseHistoryLevel);
    EXPECT_LT(quota, pages * 64 * (3 * 656 + 592) + 2 * granule);
    EXPECT_EQ(layout.min_quota(kGpuLevel), 0);
  }
}

TEST(StorageConfigTest, ABadManagerConfigStandsForNothing) {
  EXPECT_THROW(static_cast<void>(storage_config(manager_config(0))), InvalidArgument);
}

}  // namespace
}  // namespace sparse_kvcm
