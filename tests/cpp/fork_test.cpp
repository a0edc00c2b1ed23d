// A child of a fork has none of its parent's threads, and must not wait for them: it looks at a
// storage and lets it go, whatever the thread that fills was about to do.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <thread>

#include "backend/filler.hpp"
#include "backend/host_memory.hpp"
#include "backend/mapped_range.hpp"
#include "range_fixture.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm {
namespace {

using testing::kGranule;
using testing::kReserved;

enum class When : std::uint8_t { kWhileFilling, kWhenFilled };

// Filling waits in it for as long as the test wants.
class SlowMemory final : public HostMemory {
 public:
  [[nodiscard]] bool needs_fill() const override { return true; }
  void open(std::byte*, std::size_t) override {
    inside = true;
    while (hold) std::this_thread::yield();
  }
  std::atomic<bool> hold = false;
  std::atomic<bool> inside = false;
};

// What the child's exit says of `child`: 0 if it returned true; -1 if it hangs.
int exit_of(const std::function<bool()>& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child() ? 0 : 1);
  for (int i = 0; i < 2000; ++i) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return -1;
}

class ForkTest : public ::testing::TestWithParam<When> {
 protected:
  void SetUp() override {
    driver_->hold = GetParam() == When::kWhileFilling;
    range_->resize(2 * kGranule);
    range_->start_filling();
    if (driver_->hold) {
      while (!driver_->inside) std::this_thread::yield();
    } else {
      range_->wait_usable(2 * kGranule);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until the thread waits
    }
  }
  void TearDown() override { driver_->hold = false; }

  std::shared_ptr<SlowMemory> driver_ = std::make_shared<SlowMemory>();
  std::unique_ptr<MappedRange> range_ = std::make_unique<MappedRange>(
      driver_, std::make_shared<Filler>(kGranule), kReserved, kGranule);
};
INSTANTIATE_TEST_SUITE_P(, ForkTest, ::testing::Values(When::kWhileFilling, When::kWhenFilled),
                         [](const auto& when) {
                           return when.param == When::kWhileFilling ? "WhileFilling" : "WhenFilled";
                         });

TEST_P(ForkTest, AChildLetsARangeGo) {
  EXPECT_EQ(exit_of([&] {
              range_.reset();
              return true;
            }),
            0);
  driver_->hold = false;
  range_->wait_usable(2 * kGranule);
}

TEST_P(ForkTest, AChildShrinksARangeAndStopsItsFilling) {
  EXPECT_EQ(exit_of([&] {
              range_->stop_filling();
              range_->resize(kGranule);
              return range_->mapped_bytes() == kGranule;
            }),
            0);
}

TEST_P(ForkTest, AChildIsToldThatNobodyFills) {
  EXPECT_EQ(exit_of([&] {
              range_->resize(3 * kGranule);
              range_->start_filling();
              try {
                range_->wait_usable(3 * kGranule);
              } catch (const InvalidState&) {
                return true;
              }
              return false;
            }),
            0);
}

}  // namespace
}  // namespace sparse_kvcm
