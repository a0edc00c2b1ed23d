// After 10,000 random calls, refused ones included, and a close of every request, memory and rows
// are as in a fresh manager.
#include <functional>

#include "engine_fixture.hpp"
#include "program_launch.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kOperations = 10'000;
constexpr std::size_t kRequests = 6;

class LeakTest : public EngineTest {
 protected:
  void one_call(Random& random) {
    const BatchPtr& b = batches[static_cast<std::size_t>(random.below(2))];
    KvCachePtr& kv = requests[static_cast<std::size_t>(random.below(kRequests))];
    const std::int32_t row = random.below(b->max_rows());
    const RowLength length{row, random.below(kNeed + 2)};
    const std::vector<std::function<void()>> calls = {
        [&] { kv = manager->create_kv_cache({random.between(1, kNeed), -1}); },
        [&] { import(*kv, random.between(1, 12)); },
        [&] { (void)kv->resume(0); },
        [&] { kv->suspend(0); },
        [&] { kv->close(); },
        [&] { b->add(*kv); },
        [&] { b->add(*kv, row); },
        [&] { b->remove(*kv); },
        [&] { b->resize({&length, 1}); },
        [&] { b->resize({&length, 1}); },
        [&] { b->publish(0); },
        [&] { b->publish(0); },
        [&] { b->wait_ready(0); },
        [&] { b->record_read({&row, 1}, 0); },
        [&] { b->abort_step(0); },
    };
    try {
      random.pick(calls)();
      ++accepted_;
    } catch (const std::logic_error&) {
    } catch (const OutOfPages&) {
    }
  }

  std::int32_t accepted_ = 0;
};

TEST_F(LeakTest, EverythingIsFreeAfterTenThousandRandomCalls) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    make(config());
    make_batch({3, 64, kNoSlot});
    const std::vector<std::int64_t> fresh = occupancy();
    Random random(seed);
    accepted_ = 0;
    while (requests.size() < kRequests) request({kNeed, -1});
    for (std::int32_t n = 0; n < kOperations; ++n) one_call(random);
    EXPECT_GT(accepted_, kOperations / 10);
    for (const KvCachePtr& kv : requests) kv->close();
    for (const BatchPtr& b : batches)
      if (b->step_open()) b->abort_step(0);
    EXPECT_EQ(occupancy(), fresh);
    for (const BatchPtr& b : batches) {
      for (std::int32_t row = 0; row < b->max_rows(); ++row) {
        const KvCachePtr kv = active(0, 1);
        EXPECT_EQ(b->add(*kv), row);
      }
      for (std::size_t n = kRequests; n < requests.size(); ++n) requests[n]->close();
      requests.resize(kRequests);
    }
    EXPECT_EQ(occupancy(), fresh);
  }
}

}  // namespace
}  // namespace sparse_kvcm::testing
