// Requests come, grow and go while the tier grows and shrinks under them, on every device, with
// work in flight all the time: no live slot moves or loses a byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "backend/backend.hpp"
#include "graph.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "sparse_kvcm/storage.hpp"
#include "storage_fixture.hpp"
#include "test_device.hpp"

namespace sparse_kvcm {
namespace {

using testing::dense_layer;
using testing::kMiB;

constexpr std::int64_t kSlotBytes = kMiB / 2;
using Mark = std::array<std::uint64_t, 8>;

class StorageStormTest : public testing::DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFailure()) return;
    StorageConfig config =
        testing::small_config({dense_layer(0, {{"K", kSlotBytes, {}, false}}),
                               dense_layer(1, {{"K", kSlotBytes, {}, false}}, 8)},
                              24 * kMiB);
    config.device = device();
    config.cache_tiers[0].max_quota = 96 * kMiB;
    config.swa_scratch_reuse = SwaScratchReuseConfig{0};
    backend_ = backend_for(device());
    storage_ = std::make_unique<Storage>(config);
    base_ = storage_->pool_memory(0, 0).device_data;
  }

  // The first and last bytes of a slot.
  [[nodiscard]] std::array<std::byte*, 2> ends(std::int32_t slot) const {
    std::byte* const begin = base_ + slot * kSlotBytes;
    return {begin, begin + kSlotBytes - sizeof(Mark)};
  }
  void write(std::int32_t slot, std::uint64_t value) {
    Mark mark;
    mark.fill(value);
    for (std::byte* const end : ends(slot)) {
      const Upload upload{end, mark.data(), sizeof(mark)};
      backend_->upload({&upload, 1}, 0);
    }
  }
  void expect_marks() {
    const BufferPtr part = backend_->allocate_pinned(sizeof(Mark));
    for (const auto& [slot, value] : marks_) {
      for (std::byte* const end : ends(slot)) {
        backend_->download(*part, end, sizeof(Mark), 0);
        backend_->synchronize(*backend_->record(0));
        Mark mark;
        std::memcpy(mark.data(), part->data(), sizeof(Mark));
        ASSERT_TRUE(std::ranges::all_of(mark, [&](std::uint64_t v) { return v == value; }))
            << "slot " << slot;
      }
    }
  }
  // Marks slots that a table has now and had not before; forgets those that it lost.
  void follow(const RequestPages& request, const std::vector<std::int32_t>& before) {
    const std::vector<std::int32_t> now = slots_of(request);
    for (const std::int32_t slot : before) {
      if (!std::ranges::binary_search(now, slot)) marks_.erase(slot);
    }
    for (const std::int32_t slot : now) {
      if (std::ranges::binary_search(before, slot)) continue;
      ASSERT_TRUE(marks_.emplace(slot, ++last_mark_).second) << "slot " << slot << " is taken";
      write(slot, last_mark_);
    }
  }
  static std::vector<std::int32_t> slots_of(const RequestPages& request) {
    std::vector<std::int32_t> slots;
    for (const std::int32_t group : {0, 1}) {
      for (const std::int32_t slot : request.get_base_page_indices(group)) {
        if (slot != kBadPageIndex) slots.push_back(slot);
      }
      for (const std::int32_t slot : request.get_scratch_slots(group)) slots.push_back(slot);
    }
    std::sort(slots.begin(), slots.end());
    return slots;
  }

  void grow(RequestPages& request, std::mt19937& random) {
    const std::vector<std::int32_t> before = slots_of(request);
    const std::int32_t history = request.capacity();
    const auto more = static_cast<std::int32_t>(random() % (random() % 4 == 0 ? 40 : 4));
    static_cast<void>(request.resize(history + more, history, 0));
    follow(request, before);
  }
  // The last work on a request's slots is still in flight when they go, and the tier may shrink.
  void end(std::shared_ptr<RequestPages>& request) {
    const std::vector<std::int32_t> before = slots_of(*request);
    for (const std::int32_t slot : before) {
      for (int i = 0; i < 4; ++i) backend_->clear(ends(slot)[0], kSlotBytes, 0);
    }
    request->close(0);
    follow(*request, before);
    request = storage_->create_request_pages();
  }

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<Storage> storage_;
  std::byte* base_ = nullptr;
  std::map<std::int32_t, std::uint64_t> marks_;  // of live slots
  std::uint64_t last_mark_ = 0;
};
SPARSE_KVCM_ON_EVERY_DEVICE(StorageStormTest);

TEST_P(StorageStormTest, LiveSlotsKeepPlaceAndContentsWhileTheTierChanges) {
  int draining = 0;
  for (std::uint32_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::vector<std::shared_ptr<RequestPages>> requests(4);
    for (auto& request : requests) request = storage_->create_request_pages();
    for (int i = 0; i < 60; ++i) {
      const auto dice = random() % 8;
      auto& request = requests[random() % requests.size()];
      if (dice < 2) {
        storage_->resize(kGpuLevel, static_cast<std::int64_t>(1 + random() % 90) * kMiB);
        ASSERT_EQ(storage_->pool_memory(0, 0).device_data, base_);
      } else if (dice == 2) {
        ASSERT_NO_FATAL_FAILURE(end(request));
      } else {
        ASSERT_NO_FATAL_FAILURE(grow(*request, random));
      }
      const PoolGroupStatistics now = storage_->get_storage_statistics(kGpuLevel)[0];
      ASSERT_EQ(now.unavailable, std::ssize(marks_));
      ASSERT_EQ(now.total, now.free + now.unavailable);
      draining += now.draining > 0 ? 1 : 0;
      if (i % 4 == 0) {
        ASSERT_NO_FATAL_FAILURE(expect_marks());
      }
    }
    for (auto& request : requests) ASSERT_NO_FATAL_FAILURE(end(request));
    storage_->resize(kGpuLevel, 24 * kMiB);
    ASSERT_EQ(storage_->get_num_bytes(kGpuLevel), 24 * kMiB);
  }
  EXPECT_GE(draining, 20) << "that it is a storm";
}

TEST_P(StorageStormTest, SlotsGivenUpInACaptureComeBackWhenItHasEnded) {
  const auto graph = testing::make_graph(device());
  const auto request = storage_->create_request_pages();
  ASSERT_TRUE(request->resize(8, 0, graph->stream()));
  const auto used = [&] {
    std::int64_t slots = 0;
    for (const auto& group : storage_->get_storage_statistics(kGpuLevel))
      slots += group.unavailable;
    return slots;
  };
  const std::int64_t before = used();
  EXPECT_GT(before, 0);
  std::int64_t inside = -1;
  graph->capture([&] {
    backend_->clear(base_, sizeof(Mark), graph->stream());
    request->close(graph->stream());
    inside = used();
  });
  graph->replay();
  EXPECT_EQ(inside, device().kind == DeviceKind::kCpu ? 0 : before);  // a CPU captures nothing
  EXPECT_EQ(used(), 0);
}

}  // namespace
}  // namespace sparse_kvcm
