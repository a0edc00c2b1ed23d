// Suites that run on every backend.
//
//   class FetchTest : public DeviceTest {};
//   SPARSE_KVCM_ON_EVERY_DEVICE(FetchTest);
//   TEST_P(FetchTest, SkipsMissesWithoutAPage) { ops::fetch(device(), ...); }
//
// Without a GPU the CUDA cases are skipped and say so; with SPARSE_KVCM_REQUIRE_CUDA=1 that is a
// failure, so that a GPU machine cannot pass by skipping.
//
// Random programs run whole, or the share of them that SPARSE_KVCM_TEST_PERCENT names: under
// compute-sanitizer they would take an hour.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "sparse_kvcm/device.hpp"

namespace sparse_kvcm::testing {

[[nodiscard]] inline bool cuda_is_required() {
  const char* const value = std::getenv("SPARSE_KVCM_REQUIRE_CUDA");
  return value != nullptr && std::string(value) == "1";
}

[[nodiscard]] inline bool all_programs_run() {
  return std::getenv("SPARSE_KVCM_TEST_PERCENT") == nullptr;
}
// How many of `count` programs to run, at least one.
[[nodiscard]] inline std::int64_t programs_to_run(std::int64_t count) {
  if (all_programs_run()) return count;
  const std::int64_t percent = std::atoll(std::getenv("SPARSE_KVCM_TEST_PERCENT"));
  return std::max<std::int64_t>(1, count * percent / 100);
}

class DeviceTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::kCpu || cuda_is_available()) return;
    if (cuda_is_required()) {
      FAIL() << "SPARSE_KVCM_REQUIRE_CUDA=1, but " << cuda_unavailable_reason();
    }
    GTEST_SKIP() << cuda_unavailable_reason();
  }

  [[nodiscard]] static Device device() { return {GetParam(), 0}; }
};

inline std::string device_name(const ::testing::TestParamInfo<DeviceKind>& info) {
  return info.param == DeviceKind::kCpu ? "Cpu" : "Cuda";
}

}  // namespace sparse_kvcm::testing

#define SPARSE_KVCM_ON_EVERY_DEVICE(Suite)                                                  \
  INSTANTIATE_TEST_SUITE_P(                                                                 \
      Devices, Suite,                                                                       \
      ::testing::Values(::sparse_kvcm::DeviceKind::kCpu, ::sparse_kvcm::DeviceKind::kCuda), \
      ::sparse_kvcm::testing::device_name)
