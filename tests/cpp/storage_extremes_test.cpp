// Sizes that no machine has, and prefills of any length: right, at once, and without overflow.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "sparse_kvcm/storage_layout.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::dense_layer;
using testing::kGiB;
using testing::small_config;

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

// One dense layer beside a sparse one, and who is suspended.
StorageConfig with_suspended(std::int64_t page_bytes, KvCacheDesc suspended) {
  StorageConfig config;
  config.tokens_per_block = 1;
  config.cache_tiers = {{CacheTier::kGpuMem, kGiB, 0}, {CacheTier::kHostMem, kGiB, 0}};
  config.layers = {{0, {{"KEY", 576, {}, true}}, {}, {}},
                   {1, {{"KEY", page_bytes, {}, false}}, {}, {}}};
  config.selection_groups = {{{0}, 4, UnitLayout({576})}};
  config.suspended = BatchDesc{{suspended}, 0};
  return config;
}

// Their bytes are more than 64 bits have, so no quota holds even one of them beside history.
TEST(StorageExtremesTest, SuspendedRequestsBeyondAllMemoryLeaveColdPoolsTheirShareByBytes) {
  constexpr std::int64_t kQuota = std::int64_t{1} << 50;
  for (const std::int64_t page_bytes :
       {(std::int64_t{1} << 33) + 4096, std::int64_t{1} << 33, std::int64_t{1} << 40}) {
    for (const std::int32_t length : {kMost, 1 << 30}) {
      const StorageLayout layout(with_suspended(page_bytes, {length, length}));
      const std::vector<std::int64_t> slots = layout.slots_for_quota(1, kQuota);
      std::int64_t bytes = 0;
      for (std::size_t g = 0; g < slots.size(); ++g) {
        const PoolGroupDesc& group = layout.pool_groups()[g];
        if (group.level != 1) continue;
        bytes += layout.get_num_bytes(static_cast<std::int32_t>(g), slots[g]);
        if (!group.is_cold) continue;
        // History's part of the tier is that of the typical step, 33 pages of 576 B.
        EXPECT_GE(slots[g], kQuota / page_bytes * 99 / 100 - 1);
        EXPECT_LE(slots[g], kQuota / page_bytes);
      }
      EXPECT_LE(bytes, kQuota);
    }
  }
}

TEST(StorageExtremesTest, HistoryOfASetSizeBeyondAllMemoryIsNotSet) {
  StorageConfig config = with_suspended(4096, {100, 100});
  config.tokens_per_block = 65'536;
  config.layers[0].buffers[0].page_bytes = std::int64_t{1} << 32;
  config.layers.push_back({2, {{"KEY", std::int64_t{1} << 32, {}, true}}, {}, {}});
  config.selection_groups = {{{0, 2}, 4, UnitLayout({65'536})}};  // 2^33 bytes per page of history
  config.max_host_pages = kMost;
  const StorageLayout layout(config);
  const std::vector<std::int64_t> slots = layout.slots_for_quota(1, std::int64_t{1} << 50);
  for (const std::int64_t count : slots) EXPECT_LT(count, 1 << 30);
}

TEST(StorageExtremesTest, ClampTakesNoLongerForLongSteps) {
  for (const std::int32_t tokens : {1, 2, 64}) {
    StorageConfig config = small_config({dense_layer(0, {{"K", 1024, {}, false}}, 128)});
    config.tokens_per_block = tokens;
    config.max_util_for_resume = 1;
    for (const std::int32_t step : {2, 1 << 24, kMost}) {
      for (const std::int32_t window : {1, 128, kMost}) {
        config.layers[0].sliding_window_size = window;
        config.typical_step = BatchDesc{{{step, 0}}, 0};
        const StorageLayout layout(config);
        EXPECT_EQ(layout.clamp_max_seq_len({kMost}, 1, kMost), kMost);
        if (window > 1) {
          EXPECT_EQ(layout.clamp_max_seq_len({1}, 1, kMost), tokens);
        }
      }
    }
  }
}

// By its definition: every length on the way, each in the step that it falls into.
std::int32_t walked(const StorageLayout& layout, std::int64_t total, std::int32_t step,
                    std::int32_t upper) {
  const LifeCycle& life_cycle = layout.layer_groups()[0].life_cycle;
  const std::int32_t tokens = layout.config().tokens_per_block;
  step = (step + tokens - 1) / tokens * tokens;
  for (std::int32_t length = 1; length <= upper; ++length) {
    const std::int32_t history = (length - 1) / step * step;
    const std::int64_t slots = std::max<std::int64_t>(
        most_pages(life_cycle, tokens, length), layout.count_slots({{{length, history}}, 0})[0]);
    if (slots > total) return length - 1;
  }
  return upper;
}

TEST(StorageExtremesTest, ClampIsWhatAWalkOverAllLengthsFinds) {
  std::mt19937 random(20);
  const auto draw = [&](std::int32_t low, std::int32_t high) {
    return std::uniform_int_distribution(low, high)(random);
  };
  int bound = 0;
  for (int i = 0; i < 3000; ++i) {
    StorageConfig config = small_config({});
    const std::int32_t window = draw(1, 60);
    const std::int32_t sinks = draw(0, 1) * draw(0, 40);
    const std::int32_t layers = draw(1, 9);  // scratch pages per slot
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      config.layers.push_back(dense_layer(layer, {{"K", 64, {}, false}}, window, sinks));
    }
    config.tokens_per_block = draw(1, 6);
    config.max_util_for_resume = 1;
    const std::int32_t step = draw(2, 90);
    config.typical_step = BatchDesc{{{step + 7, 7}}, 0};
    if (draw(0, 3) > 0) config.swa_scratch_reuse = SwaScratchReuseConfig{draw(0, 1) * draw(0, 70)};
    const StorageLayout layout(config);
    const std::int64_t total = draw(1, 40);
    const std::int32_t upper = draw(1, 500);
    const std::int32_t expected = walked(layout, total, step, upper);
    bound += expected < upper ? 1 : 0;
    ASSERT_EQ(layout.clamp_max_seq_len({total}, 1, upper), expected)
        << "case " << i << ": window " << window << ", sinks " << sinks << ", layers " << layers
        << ", page " << config.tokens_per_block << ", step " << step << ", rewind "
        << (config.swa_scratch_reuse ? config.swa_scratch_reuse->max_rewind_len : -1) << ", total "
        << total << ", upper " << upper;
  }
  EXPECT_GT(bound, 1000) << "that totals bind";
}

}  // namespace
}  // namespace sparse_kvcm
