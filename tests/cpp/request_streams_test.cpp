// What a request gives up is reused behind its own work, whatever streams calls were refused on,
// and behind what a call began that failed.
#include <gtest/gtest.h>

#include <memory>

#include "ordered_backend.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "storage_fixture.hpp"

namespace sparse_kvcm {
namespace {

using testing::kMiB;
using Access = testing::OrderedBackend::Access;

constexpr std::int64_t kSlotBytes = std::int64_t{64} << 10;
constexpr std::int32_t kSlots = 32;  // of the GPU, and of the host
constexpr std::int32_t kAll = 4 * kSlots;
constexpr Stream kOwn = 1;
constexpr Stream kOther = 2;
constexpr Stream kNext = 3;

class RequestStreamsTest : public ::testing::Test {
 protected:
  static StorageConfig config() {
    StorageConfig config =
        testing::small_config({testing::dense_layer(0, {{"K", kSlotBytes, {}, false}})}, 2 * kMiB);
    config.cache_tiers.push_back({CacheTier::kHostMem, 2 * kMiB, 0});
    config.suspended = BatchDesc{{{kAll, kAll}}, 0};
    config.max_util_for_resume = 1;
    return config;
  }
  RequestStreamsTest() { storage_.wait_usable(kSparseHistoryLevel); }

  std::shared_ptr<RequestPages> request(std::int32_t capacity, Stream stream) {
    auto pages = storage_.create_request_pages();
    EXPECT_TRUE(pages->resize(capacity, capacity, stream));
    return pages;
  }
  // A kernel that writes all pages of the request.
  void use(const RequestPages& pages, Stream stream) {
    for (const std::int32_t slot : pages.get_base_page_indices(0)) {
      backend_->touch(stream, storage_.pool_memory(0, 0).device_data + slot * kSlotBytes,
                      Access::kWrite);
    }
  }
  // Takes every slot of the GPU and writes it.
  void expect_reuse_without_race() {
    const auto next = request(kAll, kNext);
    use(*next, kNext);
    EXPECT_EQ(backend_->num_races(), 0);
  }

  std::shared_ptr<testing::OrderedBackend> backend_ = std::make_shared<testing::OrderedBackend>();
  Storage storage_{config(), backend_};
};

TEST_F(RequestStreamsTest, ARefusedResizeLeavesThePagesBehindTheStreamOfTheLastOne) {
  auto pages = request(kAll / 2, kOwn);
  use(*pages, kOwn);
  EXPECT_FALSE(pages->resize(kAll + 1, kAll / 2, kOther));
  pages.reset();
  expect_reuse_without_race();
}

TEST_F(RequestStreamsTest, ADroppedStepThatFailsLeavesThePagesBehindTheStreamOfTheLastOne) {
  auto pages = storage_.create_request_pages();
  ASSERT_TRUE(pages->resize(kAll / 2, 0, kOwn));
  use(*pages, kOwn);
  backend_->fail_records(1);
  EXPECT_THROW(pages->drop_step(kOther), testing::DeviceFault);
  pages.reset();
  expect_reuse_without_race();
}

TEST_F(RequestStreamsTest, ARefusedSuspendLeavesThePagesBehindTheStreamOfTheLastResize) {
  const auto holder = request(4, kOwn);
  ASSERT_TRUE(holder->suspend(kOwn));  // the host has not enough for another of all slots
  auto pages = request(kAll, kOwn);
  use(*pages, kOwn);
  EXPECT_FALSE(pages->suspend(kOther));
  pages.reset();
  expect_reuse_without_race();
}

TEST_F(RequestStreamsTest, HostPagesOfASuspendThatFailsTwiceWaitUntilItsCopiesCanBeFenced) {
  const auto failing = request(kAll, kOwn);
  backend_->fail_records(3);  // the copies' event, that of what goes back, and one more
  EXPECT_THROW(static_cast<void>(failing->suspend(kOwn)), testing::DeviceFault);
  EXPECT_FALSE(failing->is_suspended());
  EXPECT_EQ(storage_.get_storage_statistics(kSparseHistoryLevel)[0].free, 0);
  failing->close(kOwn);
  const auto other = request(kAll, kOther);
  use(*other, kOther);
  ASSERT_TRUE(other->suspend(kOther));  // to the same host pages
  EXPECT_EQ(backend_->num_races(), 0);
  other->close(kOther);
  EXPECT_EQ(storage_.get_storage_statistics(kSparseHistoryLevel)[0].free, kSlots);
}

TEST_F(RequestStreamsTest, PagesOfAResumeThatFailsTwiceWaitUntilItsCopiesCanBeFenced) {
  const auto failing = request(kAll, kOwn);
  ASSERT_TRUE(failing->suspend(kOwn));
  backend_->fail_records(3);
  EXPECT_THROW(static_cast<void>(failing->resume(kOwn)), testing::DeviceFault);
  EXPECT_TRUE(failing->is_suspended());
  EXPECT_EQ(storage_.get_storage_statistics(kGpuLevel)[0].free, 0);
  expect_reuse_without_race();
  ASSERT_TRUE(failing->resume(kOwn));
}

}  // namespace
}  // namespace sparse_kvcm
